"""Attention over packed sequences: each token sees the earlier tokens of its own sequence only.

Registered with transformers' attention interface as `minirl_packed`. No mask of [T, T] is ever
built: on a GPU the sequences go through a varlen kernel, elsewhere they are laid out as
right-padded rows, where causal attention alone keeps the padding out.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from minirl.config import ConfigError

NAME = "minirl_packed"
"""What `attn_implementation` is set to."""

SHORTEST_IN_ROW = 0.75
"""Sequences share padded rows while they are at least this share of the longest one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences of similar length, to be computed as rows [S, L] padded on the right."""

    slots: Tensor  # [n] int64, places of the n tokens in the rows, flattened to [S * L]
    num_rows: int
    length: int

    def pad(self, tokens: Tensor) -> Tensor:
        """[n, heads, D] to [S, heads, L, D]."""
        if self.slots.numel() < self.num_rows * self.length:
            padded = tokens.new_zeros(self.num_rows * self.length, *tokens.shape[1:])
            tokens = padded.index_put((self.slots,), tokens)
        return tokens.unflatten(0, (self.num_rows, self.length)).transpose(1, 2)

    def unpad(self, rows: Tensor) -> Tensor:
        """[S, heads, L, D] to [n, heads, D]."""
        flat = rows.transpose(1, 2).flatten(0, 1)
        return flat if self.slots.numel() == flat.shape[0] else _Take.apply(flat, self.slots)


@dataclass(eq=False)  # if it were frozen, torch 2.11 would compile anew for each number of rows
class Packing:
    """How a packed batch of T tokens is cut into sequences; made once, used by every layer."""

    lengths: Tensor  # [S] int64, on the CPU
    boundaries: Tensor  # [S + 1] int32, starts of the sequences, and T
    max_length: int

    @staticmethod
    def of(lengths: Tensor, device: torch.device) -> "Packing":
        """For sequences of `lengths` [S], each at least 1, laid end to end."""
        lengths = lengths.cpu()
        boundaries = F.pad(torch.cumsum(lengths, 0), (1, 0)).to(device, torch.int32)
        return Packing(lengths, boundaries, int(lengths.max()))

    @cached_property
    def rows(self) -> tuple[list[Rows], Tensor]:
        """For devices without a varlen kernel; and order [T] int64: token i of the rows, laid end
        to end, is token order[i] of the batch."""
        sizes, device = self.lengths.tolist(), self.boundaries.device
        starts = self.boundaries.tolist()
        rows, order = [], []
        for members in _similar_lengths(sizes):
            longest = sizes[members[0]]
            spans = [torch.arange(sizes[s]) for s in members]
            order += [span + starts[s] for span, s in zip(spans, members, strict=True)]
            slots = torch.cat([span + row * longest for row, span in enumerate(spans)])
            rows.append(Rows(slots.to(device), len(members), longest))
        return rows, torch.cat(order).to(device)


def _similar_lengths(sizes: list[int]) -> list[list[int]]:
    """Sequence indices, longest first, in groups that bound the padding."""
    groups: list[list[int]] = []
    for s in sorted(range(len(sizes)), key=lambda s: -sizes[s]):
        if groups and sizes[s] >= SHORTEST_IN_ROW * sizes[groups[-1][0]]:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


class _Take(torch.autograd.Function):
    """x[index] for an index without repetition: its gradient needs no accumulation, which is
    slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), (grad,) = ctx.saved_tensors, grads
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_put_((index,), grad), None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, T, H, D], and None for the weights.

    Dropout is left out on purpose: it would change the log-probabilities that are compared.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if kernel := varlen_kernel(q.device.type, q.dtype):
        return kernel(q, k, v, packing, scaling)[None], None
    all_rows, order = packing.rows
    sizes = [rows.slots.numel() for rows in all_rows]
    parts = zip(*(_Take.apply(x, order).split(sizes) for x in (q, k, v)), strict=True)
    outputs = []
    for rows, part in zip(all_rows, parts, strict=True):
        q_rows, k_rows, v_rows = (rows.pad(x) for x in part)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q_rows, k_rows, v_rows, is_causal=True, scale=scaling, enable_gqa=gqa
        )
        outputs.append(rows.unpad(out))
    return _Take.apply(torch.cat(outputs), torch.argsort(order))[None], None


Kernel = Callable[[Tensor, Tensor, Tensor, Packing, float | None], Tensor]


@cache
def varlen_kernel(device_type: str, dtype: torch.dtype) -> Kernel | None:
    """The fused kernel on this device: flash_attn's, torch's, or None for padded rows."""
    kernel, name = None, "padded rows"
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        found = importlib.util.find_spec("flash_attn")
        if found and found.origin:  # else the folder of flash-attn-4, which SGLang brings along
            kernel, name = _flash_attn, "flash_attn"
        elif importlib.util.find_spec("torch.nn.attention.varlen"):
            kernel, name = _torch_varlen, "torch.nn.attention.varlen"
    log.info("attention on %s in %s: %s", device_type, dtype, name)
    return kernel


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    cut, longest = packing.boundaries, packing.max_length
    return flash_attn_varlen_func(
        *(q, k, v, cut, cut, longest, longest),
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # of the gradient
    )


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = _torch_varlen_options(scale, q.shape[2])
    if "enable_gqa" not in options and (shared := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    cut, longest = packing.boundaries, packing.max_length
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = varlen_attn(q, k, v, cut, cut, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


@cache
def _torch_varlen_options(scale: float | None, head_dim: int) -> dict[str, Any]:
    """Its keyword arguments; torch 2.10 to 2.13 name them differently."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known and scale not in (None, head_dim**-0.5):
        raise ConfigError(
            f"model.path: its attention scale {scale} needs a newer torch than {torch.__version__}"
        )
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | {
        name: value for name, value in (("scale", scale), ("enable_gqa", True)) if name in known
    }


def check_attention(config: PretrainedConfig, max_length: int, key: str = "model.path") -> None:
    """Raise ConfigError when the model attends in a way that `packed_attention` does not do.

    A sliding window is fine where no sequence is longer (`max_length`, tokens).
    """
    text = config.get_text_config()
    window, layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    kinds = set(layers or ["full_attention"])
    if layers is None and window and getattr(text, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if window and window >= max_length:
        kinds.discard("sliding_attention")
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "kv_lora_rank",
        "attention_chunk_size",
    ):
        if getattr(text, name, None):
            kinds.add(name)
    if other := sorted(kinds - {"full_attention"}):
        raise ConfigError(
            f"{key}: this {text.model_type} model has {', '.join(other)}"
            f"{f' (window {window})' if window else ''}; minirl trains models with plain causal "
            f"attention (Qwen 2.5, Qwen 3, Llama, Mistral ...) over sequences of up to "
            f"{max_length} tokens"
        )


# The compiler would make a graph for each way in which a batch is cut.
AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
