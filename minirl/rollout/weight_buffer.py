"""One flat piece of memory that the trainer and the engine's workers see at once.

Shared memory on a CPU, CUDA IPC on a GPU. Made once, used for every bucket of every sync.

    trainer: WeightBuffer.write(bucket) ── description ──▶ worker: view_tensors(flat, description)
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

ALIGNMENT = 64  # bytes; a multiple of every dtype's size


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up so that the next tensor starts at a multiple of ALIGNMENT."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


class WeightBuffer:
    """The trainer's end: a flat buffer that other processes can map.

    On a CPU it is an anonymous file (memfd), which vanishes with its last user, however that ends.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._fd: int | None = None
        if device.type == "cpu":
            self._fd = os.memfd_create("minirl-weights")
            os.ftruncate(self._fd, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
        else:
            with _no_expandable_segments():
                self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def path(self) -> str | None:
        """Opens the same memory in another process of the same user."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, bucket: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Copy full tensors in; returns where they are, for `view_tensors`: parallel lists."""
        info: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "offsets": []}
        offset = 0
        for name, tensor in bucket:
            _view(self.bytes, offset, tensor.dtype, tensor.shape).copy_(tensor)
            info["names"].append(name)
            info["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
            info["shapes"].append(list(tensor.shape))
            info["offsets"].append(offset)
            offset = aligned(offset + tensor.numel() * tensor.element_size())
        if self.bytes.is_cuda:
            torch.cuda.synchronize(self.bytes.device)
        return info

    def close(self) -> None:
        """Give the memory back; the workers have let go of it, or are gone."""
        is_cuda = self.bytes.is_cuda
        del self.bytes
        if is_cuda:
            torch.cuda.ipc_collect()  # also removes torch's reference counters from /dev/shm
        if self._fd is not None:
            os.close(self._fd)


@contextmanager
def _no_expandable_segments() -> Iterator[None]:
    """What is allocated inside can be mapped by a child. Memory of expandable segments travels as a
    file descriptor of its owner, which most systems do not let a child take (torch's issue 165685).
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = [s for s in map(os.environ.get, names) if s and "expandable_segments:True" in s]
    if settings:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        for all_of_them in settings:  # what is not named falls back to its default
            torch._C._accelerator_setAllocatorSettings(all_of_them)


CUDA_HANDLE_FIELDS = (
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


def cuda_handle(tensor: Tensor) -> dict[str, Any]:
    """A CUDA tensor's IPC handle as plain numbers and bytes (no pickle)."""
    arguments = reduce_tensor(tensor)[1]  # cls, size, stride, offset, storage cls, dtype, *fields
    return dict(zip(CUDA_HANDLE_FIELDS, arguments[6:], strict=True))


def open_cuda(handle: dict[str, Any], num_bytes: int, device: torch.device) -> Tensor:
    """The bytes of another process's tensor of which `handle` is the `cuda_handle`."""
    values = [handle[name] for name in CUDA_HANDLE_FIELDS]
    values[0] = device.index or 0  # the same device may have another number in this process
    return rebuild_cuda_tensor(
        Tensor, (num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, *values
    )


def open_shared(path: str, num_bytes: int) -> Tensor:
    """The bytes of another process's buffer on a CPU; `path` is WeightBuffer.path."""
    fd = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def view_tensors(flat: Tensor, info: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors that `WeightBuffer.write` put into the buffer, without a copy."""
    dtypes = [getattr(torch, name) for name in info["dtypes"]]
    parts = zip(info["names"], info["offsets"], dtypes, info["shapes"], strict=True)
    return [(name, _view(flat, offset, dtype, shape)) for name, offset, dtype, shape in parts]


def _view(flat: Tensor, offset: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    shape = list(shape)
    size = math.prod(shape) * dtype.itemsize
    return flat[offset : offset + size].view(dtype).view(shape)
