"""Log-probabilities and entropy of packed tokens under a model."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minirl.trainer.attention import Packing
from minirl.types import MicroBatch

CHUNK_ELEMENTS = 2**26
"""Rows x vocabulary that are turned into float32 at once: 256 MiB."""


Entropy = Literal["none", "value", "grad"]


def token_logprobs(
    model: nn.Module, batch: MicroBatch, temperature: float, *, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [T], float32, in nats, of the tokens with response_mask 1.

    Both stand at the token itself and are 0 elsewhere. The distribution is softmax(logits /
    temperature) at the position before; the first token of a sequence has none, and gets 0.
    `entropy` says whether entropies are left out (0), computed, or computed with their gradient.
    """
    wanted = ((batch.response_mask > 0) & (batch.positions > 0)).nonzero().squeeze(1)  # [n]
    logits = model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        use_cache=False,
        logits_to_keep=wanted - 1,
        packing=Packing.of(batch.lengths, batch.tokens.device),
    ).logits[0]  # [n, V]
    logprobs, entropies = _chunked(logits, batch.tokens[wanted], temperature, entropy)
    zeros = torch.zeros(batch.num_tokens, device=logits.device)
    return zeros.index_put((wanted,), logprobs), zeros.index_put((wanted,), entropies)


def _chunked(
    logits: Tensor, targets: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    """`_logprobs_and_entropies`, a few rows at a time so that float32 copies stay small."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    if len(targets) <= rows:
        return _logprobs_and_entropies(logits, targets, temperature, entropy)
    parts = [
        checkpoint(_logprobs_and_entropies, *chunk, temperature, entropy, use_reentrant=False)
        for chunk in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprobs_and_entropies(
    logits: Tensor, targets: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    """[n, V] and [n] to [n] and [n]: log p(target), and H = logsumexp(z) - sum_v p_v z_v."""
    z = logits.float() / temperature
    total = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(-1, targets[:, None]).squeeze(-1) - total
    if entropy == "none":
        return logprobs, torch.zeros_like(total)
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        entropies = total - (torch.softmax(z, dim=-1) * z).sum(-1)
    return logprobs, entropies
