"""Low-rank adapters (Hu et al. 2021, LoRA): PEFT's layers inside the transformers model.

Only the adapter has gradients and optimizer state. The engine gets the merged weights W + scaling B
A by the usual sync; the model without its adapter is the reference policy.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from minirl.config import ConfigError, ModelConfig

KEY = "model.lora_target_modules"
BASE = ".base_layer."
"""In PEFT's name of an adapted layer's own weights; the plain model has a dot there."""
IN_LAYER = re.compile(r"\.\d+\.")


def check_library() -> None:
    """ConfigError where PEFT is missing."""
    if find_spec("peft") is None:
        raise ConfigError(
            "model.lora_rank: peft is not installed; say `pip install minirl[lora]`, or write 0"
        )


def add_adapter(model: PreTrainedModel, settings: ModelConfig, seed: int) -> None:
    """Put an adapter into `model` and freeze the rest.

    A is drawn by `seed`, alike on every rank, B is 0: the policy starts as it is. Raises
    ConfigError for target modules that are not there or cannot have one.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=settings.lora_target_modules or "all-linear",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(config)
        except ValueError as error:
            raise ConfigError(f"{KEY}: {str(error).strip().splitlines()[0]}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            _check_target(name, module.get_base_layer())
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT gives it the type of the frozen weights
            parameter.data = parameter.data.float()


def _check_target(name: str, layer: nn.Module) -> None:
    """The head is read without its module, embeddings and others are not merged."""
    if not isinstance(layer, nn.Linear) or not IN_LAYER.search(name):
        raise ConfigError(
            f"{KEY}: it names {name} ({type(layer).__name__}); name linear modules of the decoder "
            "layers (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj), or [] for all"
        )


def has_adapter(model: nn.Module) -> bool:
    """Whether `add_adapter` was called."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def scaling(model: Any) -> float | None:
    """alpha / rank: what B A counts in the weights; None without an adapter."""
    if not has_adapter(model):
        return None
    [config] = model.peft_config.values()
    return config.lora_alpha / config.r


@contextmanager
def adapter_disabled(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before training."""
    model.disable_adapters()
    for name, parameter in model.named_parameters():  # which PEFT freezes meanwhile, and FSDP
        parameter.requires_grad_(is_adapter(name))  # learns in its first pass what trains
    try:
        yield
    finally:
        model.enable_adapters()


def is_adapter(name: str) -> bool:
    """Whether the parameter is the adapter's."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name of a parameter in the model without an adapter."""
    return name.replace(BASE, ".")


def merged(bucket: list[tuple[str, Tensor]], scaling: float) -> list[tuple[str, Tensor]]:
    """W + scaling B A for each W with an adapter in the bucket, by the plain model's names.

    A layer's weights stand in one bucket.
    """
    parts, plain = dict(bucket), []
    for name, tensor in bucket:
        if name.endswith(f"{BASE}weight"):
            layer = name.removesuffix(f"{BASE}weight")
            a, b = (parts[f"{layer}.lora_{x}.default.weight"] for x in "AB")  # [r, in], [out, r]
            tensor = torch.addmm(tensor, b, a, alpha=scaling)
        if not is_adapter(name):
            plain.append((base_name(name), tensor))
    return plain


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of a model that is not sharded as PEFT does: adapter_model.safetensors and
    adapter_config.json, which names the folder of the base model."""
    folder.mkdir()
    named = {f"base_model.model.{k}": v for k, v in model.get_adapter_state_dict().items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    [config] = model.peft_config.values()
    config.save_pretrained(folder)
