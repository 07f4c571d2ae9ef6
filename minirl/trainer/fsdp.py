"""Models: loading, sharding by FSDP2, and handing out the full weights."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
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
from minirl.trainer import attention, lora
from minirl.trainer.shards import ShardedFiles

T = TypeVar("T")
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


def check_lora(model: ModelConfig) -> None:
    """Raise ConfigError for an adapter that cannot be made; reads config.json, no weights."""
    if model.lora_rank:
        lora.check_library()
        with torch.device("meta"):
            lora.add_adapter(empty_model(model.path, model), model, seed=0)


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
    frozen: bool = False,
    adapter_seed: int | None = None,
) -> PreTrainedModel:
    """The model at `path`: packed attention, no dropout, sharded; weights that train in float32.

    Its output is, per token, the vocabulary's logits, or one number: a `value`, 0 everywhere to
    begin with, or the `score` of a classifier with one label. Weights that do not train, because
    the model is `frozen` or has an adapter (model.lora_rank, drawn by `adapter_seed`), are kept in
    the type in which they are computed with.

    Every rank reads its rows of the weights only. Where the files' names are not the model's (an
    older format, layers that transformers fuses), rank 0 reads all and the others get theirs from
    it. Every rank takes part.
    """
    check_model_folder(path, key)
    dtype = compute_dtype(model, world.device)
    trains = not frozen and adapter_seed is None
    kept_in = torch.float32 if trains else dtype

    def prepare(plain: PreTrainedModel) -> PreTrainedModel:
        if head == "value":
            _replace_head(plain)
        if frozen:
            plain.requires_grad_(False)
        if adapter_seed is not None:
            lora.add_adapter(plain, model, adapter_seed)
        return _prepare(plain, model, key)

    if not is_sharded(world):
        return prepare(read_weights(path, model, key, head, kept_in))
    sharded = shard(prepare(empty_model(path, model, key, head, kept_in)), world, dtype)
    files = _open_files(path, key, world)
    wanted = _from_files(sharded, files, head)
    if all(files.shape(name) == parameter.shape for name, parameter in wanted.items()):
        _read_rows(files, wanted)
    else:
        full = read_weights(path, model, key, head, kept_in) if world.is_main else None
        _scatter(full, wanted)
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
    for module in [*_decoder_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # A plain sum: with NCCL the factor would become a scaled one that not every type has.
        module.set_force_sum_reduction_for_comms(True)
    sharded: Any = model
    sharded.call = MethodType(lambda self, function: function(self), model)
    register_fsdp_forward_method(model, "call")
    return model


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]


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
    if config.compile:
        for layer in _decoder_layers(model):
            # One graph for any number of tokens; attention, which is cut by lengths, stays outside.
            layer.compile(dynamic=True)
    return model.train()


def _auto_class(head: Head) -> Any:
    """A classifier of sequences has no output per token, so it is loaded as one of tokens."""
    return AutoModelForTokenClassification if head == "score" else AutoModelForCausalLM


def empty_model(
    path: str,
    model: ModelConfig,
    key: str = "model.path",
    head: Head = "vocabulary",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The model with untouched memory as weights, which the system does not even allocate."""
    with no_init_weights():
        empty = _auto_class(head).from_config(
            _read_config(path, model, key),
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=model.trust_remote_code,
        )
    empty.tie_weights()
    return empty


def _open_files(path: str, key: str, world: Dist) -> ShardedFiles:
    """Rank 0 first: it may have to download them."""
    if not world.is_main:
        world.barrier()
    try:
        return ShardedFiles(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be loaded: {_first_line(error)}") from error
    finally:
        if world.is_main:
            world.barrier()


@torch.no_grad()
def _from_files(model: PreTrainedModel, files: ShardedFiles, head: Head) -> dict[str, DTensor]:
    """The parameters to be read, by their names in the files: not an adapter, nor a new head."""
    wanted: dict[str, Any] = {
        lora.base_name(name): parameter
        for name, parameter in model.named_parameters()
        if not lora.is_adapter(name)
    }
    if head == "value":
        new = model.get_output_embeddings().weight
        wanted = {name: parameter for name, parameter in wanted.items() if parameter is not new}
    if head == "score" and files.shape(SCORE_BIAS) is None and SCORE_BIAS in wanted:
        wanted.pop(SCORE_BIAS).to_local().zero_()  # a classifier of sequences has none
    return wanted


@torch.no_grad()
def _read_rows(files: ShardedFiles, parameters: dict[str, DTensor]) -> None:
    """Fill this rank's shards."""
    for name, parameter in parameters.items():
        local = parameter.to_local()
        first = rows_per_rank(parameter) * dist.get_rank()
        if len(local):
            local.copy_(files.rows(name, first, first + len(local)))


@torch.no_grad()
def _scatter(full: PreTrainedModel | None, parameters: dict[str, DTensor]) -> None:
    """Copy rank 0's full parameters into every rank's shards, one at a time."""
    weights = dict(full.named_parameters()) if full is not None else {}
    for name, parameter in parameters.items():
        local = parameter.to_local()
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        if full is not None:
            whole.copy_(weights.pop(name))
        dist.broadcast(whole, src=0)
        first = rows_per_rank(parameter) * dist.get_rank()
        local.copy_(whole[first : first + len(local)])


def rows_per_rank(parameter: DTensor) -> int:
    """FSDP2 cuts dimension 0 like torch.chunk: equal parts, the last ones smaller or empty."""
    return -(-parameter.shape[0] // parameter.device_mesh.size())


def read_weights(
    path: str,
    model: ModelConfig,
    key: str = "model.path",
    head: Head = "vocabulary",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The whole model as transformers reads it; ConfigError for weights that are missing."""
    disable_progress_bar()  # it would draw over the run's own display
    try:
        with _no_report():
            pair: Any = _auto_class(head).from_pretrained(
                path,
                dtype=dtype,
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
    log.addFilter(_is_error)  # by its level it would also tell of layers that are "not sharded"
    try:
        yield
    finally:
        log.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
