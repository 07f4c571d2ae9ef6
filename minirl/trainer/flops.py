"""Floating-point operations of a model, and what the device could do."""

import torch
from transformers import PreTrainedModel

from minirl.types import MicroBatch

PEAK_FLOPS = {
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}
"""Dense bfloat16 operations per second by part of the card's name; the longest that fits counts."""


def forward_flops(model: PreTrainedModel, batch: MicroBatch) -> float:
    """Operations of one forward pass over `batch`, a multiplication and an addition being two.

    Matrices of the layers for every token, attention over the tokens at and before each within its
    sequence, and the head at the positions that predict a token with response_mask 1. A backward
    pass costs twice as much. Nothing that is computed again counts (Chowdhery et al. 2022, PaLM,
    appendix B). Mixtures of experts count as if every expert were used.
    """
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    outside = {id(p) for module in (head, embedding) for p in module.parameters()}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in outside]
    per_token = sum(p.numel() for p in matrices)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    lengths = batch.lengths.double()
    pairs = float((lengths * (lengths + 1) / 2).sum())
    return (
        2.0 * per_token * batch.num_tokens
        + 4.0 * config.num_hidden_layers * width * pairs
        + 2.0 * head.weight.numel() * float(batch.response_mask.sum())
    )


def peak_flops(device: torch.device) -> float | None:
    """Of one device, in bfloat16, per second; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAK_FLOPS if part in name]
    return PEAK_FLOPS[max(known, key=len)] if known else None
