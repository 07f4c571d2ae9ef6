"""How weights reach vLLM's workers: through shared memory on a CPU, CUDA IPC on a GPU.

The trainer writes a bucket of full tensors into one flat buffer; every worker of the engine maps
the same bytes and loads from them. The buffer is made once and used for every bucket of every sync.

    trainer: WeightBuffer.write(bucket) ── description ──▶ worker: MinirlTransfer.receive_weights

This module is imported in vLLM's worker processes too: there it registers the receiving class.
"""

import math
import mmap
import os
import select
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

BACKEND = "minirl"
LEADER_PID = "MINIRL_LEADER_PID"
"""Variable by which workers know the process that they belong to."""
ALIGNMENT = 64  # bytes; a multiple of every dtype's size


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up so that the next tensor starts at a multiple of ALIGNMENT."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


@dataclass
class MinirlInitInfo(WeightTransferInitInfo):
    """Where the buffer is."""

    num_bytes: int
    path: str | None = None
    """CPU: the buffer's file descriptor as a path that the worker can open."""
    ipc_handles: list[dict[str, Any]] = field(default_factory=list)
    """GPU: per worker of the engine, `cuda_handle` of the trainer rank on the same device."""


@dataclass
class MinirlUpdateInfo(WeightTransferUpdateInfo):
    """What the buffer holds now: parallel lists, one entry per tensor."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


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
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def path(self) -> str | None:
        """Opens the same memory in another process of the same user."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, bucket: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Copy full tensors in; returns the fields of MinirlUpdateInfo."""
        info = MinirlUpdateInfo([], [], [], [])
        offset = 0
        for name, tensor in bucket:
            _view(self.bytes, offset, tensor.dtype, tensor.shape).copy_(tensor)
            info.names.append(name)
            info.dtypes.append(str(tensor.dtype).removeprefix("torch."))
            info.shapes.append(list(tensor.shape))
            info.offsets.append(offset)
            offset = aligned(offset + tensor.numel() * tensor.element_size())
        if self.bytes.is_cuda:
            torch.cuda.synchronize(self.bytes.device)
        return vars(info)

    def close(self) -> None:
        """Give the memory back; the workers have let go of it, or are gone."""
        is_cuda = self.bytes.is_cuda
        del self.bytes
        if is_cuda:
            torch.cuda.ipc_collect()  # also removes torch's reference counters from /dev/shm
        if self._fd is not None:
            os.close(self._fd)


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


def _open_cuda(handle: dict[str, Any], num_bytes: int, device: torch.device) -> Tensor:
    values = [handle[name] for name in CUDA_HANDLE_FIELDS]
    values[0] = device.index or 0  # the same device may have another number in this process
    return rebuild_cuda_tensor(
        Tensor, (num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, *values
    )


def _open_shared(path: str, num_bytes: int) -> Tensor:
    fd = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def _view(flat: Tensor, offset: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    shape = list(shape)
    size = math.prod(shape) * dtype.itemsize
    return flat[offset : offset + size].view(dtype).view(shape)


class MinirlTransfer(WeightTransferEngine[MinirlInitInfo, MinirlUpdateInfo]):
    """The worker's end, for CUDA IPC and for shared memory."""

    init_info_cls = MinirlInitInfo
    update_info_cls = MinirlUpdateInfo

    def init_transfer_engine(self, init_info: MinirlInitInfo) -> None:
        """Map the trainer's buffer."""
        if init_info.path is not None:
            self.flat = _open_shared(init_info.path, init_info.num_bytes)
        else:
            handle = init_info.ipc_handles[self.parallel_config.rank]
            self.flat = _open_cuda(handle, init_info.num_bytes, self.device)

    def start_weight_update(self) -> None:
        """Loading repacks weights: vLLM keeps the originals' storage and copies into it."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MinirlUpdateInfo) -> None:
        """Load the tensors that the buffer holds.

        vLLM keeps a tensor until all parts of its module (q, k and v of one projection) have come;
        buckets therefore hold whole decoder layers, and little is kept beyond this call.
        """
        dtypes = [getattr(torch, name) for name in update_info.dtypes]
        parts = zip(update_info.names, update_info.offsets, dtypes, update_info.shapes, strict=True)
        load: Any = self.model.load_weights  # every vLLM model has it, nn.Module does not
        load([(name, _view(self.flat, at, dtype, shape)) for name, at, dtype, shape in parts])
        self._copy_what_waits()

    def _copy_what_waits(self) -> None:
        """Take out of the buffer what vLLM will load only when the update ends: weights that do not
        fill their parameter, as in a vocabulary that is padded to a multiple of 64."""
        buffer = self.flat.untyped_storage().data_ptr()
        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for name, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == buffer:
                        call.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        """Put the new weights in place."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Let go of the buffer."""
        if hasattr(self, "flat"):
            del self.flat

    # Abstract in vLLM 0.25 only, for a trainer that sends through vLLM's own classes.
    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise RuntimeError("weights are sent by WeightBuffer.write")


def _repack_tied_head(model: torch.nn.Module) -> None:
    """vLLM's CPU build multiplies with a packed copy of lm_head. When it is tied to the embedding,
    reloading renews the embedding only, and logits would come from the old copy."""
    head = getattr(model, "lm_head", None)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if not tied or head is None or not hasattr(head, "cpu_linear"):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class WorkerExtension:
    """Named in the engine's arguments so that every worker process imports this module."""


def _end_with(leader_pid: int) -> None:
    """End the engine core, and with it this worker, when the leader is gone, however it ended.

    vLLM's workers end with their engine core, but the core does not notice that the process which
    started it was killed, and would keep the devices' memory for ever.
    """

    def wait() -> None:
        try:
            leader = os.pidfd_open(leader_pid)
        except ProcessLookupError:
            pass  # gone already
        else:
            select.select([leader], [], [])
        os.kill(os.getppid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with leader", daemon=True).start()


if (_leader := os.environ.get(LEADER_PID)) and int(_leader) != os.getpid():  # in a worker
    _end_with(int(_leader))

WeightTransferEngineFactory.register_engine(BACKEND, MinirlTransfer)
