"""The full weights of a model that is spread over ranks, a bucket at a time."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minirl.trainer import lora
from minirl.trainer.fsdp import rows_per_rank

PADDING = 64  # bytes per tensor

Bucket = list[tuple[str, Any]]
"""Names and parameters: all DTensor (sharded) or none."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch 2.13, and the one before."""


class WeightBuckets:
    """The full weights, a bucket at a time: iterate as often as needed, on every rank alike.

    Yields lists of (name, tensor) of together at most `max_bytes` (or a single larger tensor) in
    `dtype`, by Hugging Face names, in the order of `named_parameters`. Tied weights come once,
    under the first name (`model.embed_tokens.weight`; no `lm_head.weight`), an adapter merged into
    what it adapts. One all-gather per bucket.

    The tensors are views of buffers that the next bucket overwrites. On a CPU the buffers are kept
    between iterations.
    """

    def __init__(
        self,
        model: nn.Module,
        max_bytes: int,
        dtype: torch.dtype,
        here: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.dtype = dtype
        self._here = here
        """Inside which the weights are on their device."""
        self._scaling = lora.scaling(model)
        self._plan = _plan_buckets(model, max_bytes // dtype.itemsize)
        self.num_bytes = max(
            sum(p.numel() * dtype.itemsize + PADDING for _, p in bucket) for bucket in self._plan
        )
        """Of a buffer that holds any bucket, with room to align each tensor."""
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        with self._here():
            for bucket in self._plan:
                full = self._full(bucket)
                yield full if self._scaling is None else lora.merged(full, self._scaling)
        if any(buffer.is_cuda for buffer in self._buffers.values()):
            self._buffers.clear()  # the engine's turn

    def _full(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        if isinstance(bucket[0][1], DTensor):
            return self._gather(bucket)
        return [(name, p.detach().to(self.dtype)) for name, p in bucket]

    @torch.no_grad()
    def _gather(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        world = dist.get_world_size()
        sizes = [rows_per_rank(p) * p[0].numel() for _, p in bucket]  # per rank, padded
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
