"""Models: loading, sharding by FSDP2, and handing out the full weights."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from minirl.config import ConfigError, ModelConfig
from minirl.distributed import Dist
from minirl.trainer import attention

T = TypeVar("T")
PADDING = 64  # bytes per tensor
SCORE_BIAS = "score.bias"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def check_model_folder(path: str, key: str = "model.path") -> None:
    """Raise ConfigError unless `path` is a folder with config and weights, or may be a hub name.

    Reads file names only, so it can run before anything else.
    """
    folder = Path(path).expanduser()
    if not folder.exists() and path.count("/") == 1 and path[0] not in "./~":
        return  # a hub name: transformers looks in its cache, then on the hub
    if not folder.is_dir():
        raise ConfigError(f"{key}: got {path!r}, which is not a folder; name a model folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: {path!r} has no config.json; name a folder written by save_pretrained"
        )
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise ConfigError(
            f"{key}: {path!r} has a config.json but no weights (*.safetensors); "
            "save the model there with save_pretrained, or finish its download"
        )


def check_model(
    model: ModelConfig, max_length: int, *, path: str | None = None, key: str = "model.path"
) -> PretrainedConfig:
    """`check_model_folder`, and that its attention can be computed over sequences of `max_length`.

    Reads the model's config.json, no weights; returns it.
    """
    check_model_folder(path or model.path, key)
    config = _read_config(path or model.path, model, key)
    attention.check_attention(config, max_length, key)
    return config


def _read_config(path: str, model: ModelConfig, key: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Of matrix products and of the engine: `model.dtype` on a GPU, float32 always on a CPU."""
    return getattr(torch, model.dtype) if device.type == "cuda" else torch.float32


Head = Literal["vocabulary", "value", "score"]


def load_model(
    path: str,
    model: ModelConfig,
    world: Dist,
    *,
    key: str = "model.path",
    head: Head = "vocabulary",
) -> PreTrainedModel:
    """The model at `path`: float32, packed attention, no dropout, sharded.

    Its output is, per token, the vocabulary's logits, or one number: a `value`, 0 everywhere to
    begin with, or the `score` of a classifier with one label.

    Only rank 0 reads the weights, and every rank receives its shard, so that the host holds one
    full copy, whatever the number of ranks. Every rank takes part.
    """
    check_model_folder(path, key)
    dtype = compute_dtype(model, world.device)
    full = _read_weights(path, model, key, head) if world.is_main else None
    if full is not None and head == "value":
        _replace_head(full)
    if full is not None and not is_sharded(world):
        return _prepare(full, model, key)
    empty = empty_model(path, model, key, head)
    if head == "value":
        _replace_head(empty)
    sharded = shard(_prepare(empty, model, key), world, dtype)
    _scatter(dict(full.named_parameters()) if full is not None else None, sharded)
    return sharded


def is_sharded(world: Dist) -> bool:
    """Whether `load_model` applies FSDP: always but on a single CPU rank.

    There it only costs: with 0.7 M parameters, 1 to 9 ms of 11 to 76 per forward and backward
    pass, and twice the time in the optimizer.
    """
    return world.world_size > 1 or world.device.type == "cuda"


def shard(model: PreTrainedModel, world: Dist, dtype: torch.dtype) -> PreTrainedModel:
    """Apply FSDP2 to each decoder layer and to the rest, over all ranks; products in `dtype`.

    Gradients are summed in float32, not averaged: losses are divided by global counts already.
    """
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # A plain sum: with NCCL the factor would become a scaled one that not every type has.
        module.set_force_sum_reduction_for_comms(True)
    sharded: Any = model
    sharded.call = MethodType(lambda self, function: function(self), model)
    register_fsdp_forward_method(model, "call")
    return model


def with_weights(model: Any, function: Callable[[Any], T]) -> T:
    """`function(model)`, in which the model's modules have their full weights, as in its forward.

    What depends on the weights in what it returns must be tensors, or a tuple of them.
    """
    return model.call(function) if hasattr(model, "call") else function(model)


def reshard(model: nn.Module) -> None:
    """Free the full embedding and head, which FSDP2 keeps after a pass without a backward."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _replace_head(model: PreTrainedModel) -> None:
    """A value in place of the vocabulary's logits; untied from the embedding."""
    text = model.config.get_text_config()
    head = nn.Linear(text.hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)  # V = 0: the first advantages are the plain returns
    model.set_output_embeddings(head)
    text.tie_word_embeddings = model.config.tie_word_embeddings = False


def _prepare(model: PreTrainedModel, config: ModelConfig, key: str) -> PreTrainedModel:
    if not model._supports_attention_backend:
        raise ConfigError(
            f"{key}: transformers' {type(model).__name__} has no exchangeable attention, "
            "which packed batches need; choose another model"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # it would change the log-probabilities that are compared
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _auto_class(head: Head) -> Any:
    """A classifier of sequences has no output per token, so it is loaded as one of tokens."""
    return AutoModelForTokenClassification if head == "score" else AutoModelForCausalLM


def empty_model(
    path: str, model: ModelConfig, key: str = "model.path", head: Head = "vocabulary"
) -> PreTrainedModel:
    """The model with untouched memory as weights, which the system does not even allocate."""
    with no_init_weights():
        empty = _auto_class(head).from_config(
            _read_config(path, model, key),
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            trust_remote_code=model.trust_remote_code,
        )
    empty.tie_weights()
    return empty


@torch.no_grad()
def _scatter(full: dict[str, Tensor] | None, model: nn.Module) -> None:
    """Copy rank 0's full parameters into every rank's shards, one at a time."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        if full is not None:
            whole = full.pop(name).to(local.device).contiguous()
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        dist.broadcast(whole, src=0)
        first = _rows_per_rank(parameter) * dist.get_rank()
        local.copy_(whole[first : first + len(local)])


def _rows_per_rank(parameter: DTensor) -> int:
    """FSDP2 cuts dimension 0 like torch.chunk: equal parts, the last ones smaller or empty."""
    return -(-parameter.shape[0] // parameter.device_mesh.size())


def _read_weights(path: str, model: ModelConfig, key: str, head: Head) -> PreTrainedModel:
    disable_progress_bar()  # it would draw over the run's own display
    try:
        with _no_report():
            pair: Any = _auto_class(head).from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be loaded: {_first_line(error)}") from error
    loaded, info = pair
    missing = set(info["missing_keys"])
    if head == "score" and SCORE_BIAS in missing:  # a classifier of sequences has none
        missing.remove(SCORE_BIAS)
        nn.init.zeros_(loaded.get_parameter(SCORE_BIAS))
    if missing:  # transformers warns, and draws them at random
        raise ConfigError(
            f"{key}: {path!r} lacks {len(missing)} weights of its config.json, such as "
            f"{min(missing)}; save it again with save_pretrained, or finish its download"
        )
    return loaded


@contextmanager
def _no_report() -> Iterator[None]:
    """Without transformers' table of missing weights: what is missing is an error, or meant."""
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


Bucket = list[tuple[str, Any]]
"""Names and parameters: all DTensor (sharded) or none."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch 2.13, and the one before."""


class WeightBuckets:
    """The full weights, a bucket at a time: iterate as often as needed, on every rank alike.

    Yields lists of (name, tensor) of together at most `max_bytes` (or a single larger tensor) in
    `dtype`, by Hugging Face names, in the order of `named_parameters`. Tied weights come once,
    under the first name (`model.embed_tokens.weight`; no `lm_head.weight`). One all-gather per
    bucket.

    The tensors are views of buffers that the next bucket overwrites. The buffers are kept between
    iterations; `release` frees them.
    """

    def __init__(self, model: nn.Module, max_bytes: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._plan = _plan_buckets(model, max_bytes // dtype.itemsize)
        self.num_bytes = max(
            sum(p.numel() * dtype.itemsize + PADDING for _, p in bucket) for bucket in self._plan
        )
        """Of a buffer that holds any bucket, with room to align each tensor."""
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        for bucket in self._plan:
            if isinstance(bucket[0][1], DTensor):
                yield self._gather(bucket)
            else:
                yield [(name, p.detach().to(self.dtype)) for name, p in bucket]

    def release(self) -> None:
        """Free the buffers; the next iteration makes new ones."""
        self._buffers.clear()

    @torch.no_grad()
    def _gather(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        world = dist.get_world_size()
        sizes = [_rows_per_rank(p) * p[0].numel() for _, p in bucket]  # per rank, padded
        device = bucket[0][1].to_local().device
        mine = self._buffer("send", sum(sizes), device)
        everyone = self._buffer("receive", sum(sizes) * world, device)
        for part, (_, parameter) in zip(mine.split(sizes), bucket, strict=True):
            local = parameter.to_local().flatten()
            part[: local.numel()].copy_(local)  # casts: fewer bytes travel
        # As bytes, since gloo does not know every type.
        _all_gather(everyone.view(torch.uint8), mine.view(torch.uint8))
        parts = everyone.view(world, -1).split(sizes, dim=1)  # [W, size] each
        out = self._buffer("full", sum(sizes) * world, device).split([s * world for s in sizes])
        full = []
        for target, part, (name, parameter) in zip(out, parts, bucket, strict=True):
            target.view_as(part).copy_(part)
            full.append((name, target[: parameter.numel()].view(parameter.shape)))
        return full

    def _buffer(self, name: str, size: int, device: torch.device) -> Tensor:
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype, device=device)
        return self._buffers[name][:size]


def _plan_buckets(model: nn.Module, max_elements: int) -> list[Bucket]:
    """Whole decoder layers (and single parameters outside them) into buckets.

    A layer stays together because an engine fuses its projections when it has all their parts.
    """
    units: dict[str, Bucket] = {}
    for name, parameter in model.named_parameters():
        layer = re.match(r".*?\.\d+\.", name)
        units.setdefault(layer[0] if layer else name, []).append((name, parameter))
    buckets: list[Bucket] = []
    room = 0
    for unit in units.values():
        size = sum(parameter.numel() for _, parameter in unit)
        if not buckets or size > room:
            buckets.append([])
            room = max_elements
        buckets[-1] += unit
        room -= size
    return buckets
