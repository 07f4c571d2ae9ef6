"""The receiving end of a weight sync, inside vLLM's workers.

The trainer writes a bucket of full tensors into a WeightBuffer; every worker maps the same bytes
and loads from them. vLLM imports this module in its worker processes, where it registers the class.
"""

import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
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

from minirl.rollout.processes import signal_at_end_of_parent, when_gone
from minirl.rollout.weight_buffer import open_cuda, open_shared, view_tensors

BACKEND = "minirl"
LEADER_PID = "MINIRL_LEADER_PID"
"""Variable by which workers know the process that they belong to."""


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


class MinirlTransfer(WeightTransferEngine[MinirlInitInfo, MinirlUpdateInfo]):
    """The worker's end, for CUDA IPC and for shared memory."""

    init_info_cls = MinirlInitInfo
    update_info_cls = MinirlUpdateInfo

    def init_transfer_engine(self, init_info: MinirlInitInfo) -> None:
        """Map the trainer's buffer."""
        if init_info.path is not None:
            self.flat = open_shared(init_info.path, init_info.num_bytes)
        else:
            handle = init_info.ipc_handles[self.parallel_config.rank]
            self.flat = open_cuda(handle, init_info.num_bytes, self.device)

    def start_weight_update(self) -> None:
        """Loading repacks weights: vLLM keeps the originals' storage and copies into it."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MinirlUpdateInfo) -> None:
        """Load the tensors that the buffer holds.

        vLLM keeps a tensor until all parts of its module (q, k and v of one projection) have come;
        buckets therefore hold whole decoder layers, and little is kept beyond this call.
        """
        load: Any = self.model.load_weights  # every vLLM model has it, nn.Module does not
        load(view_tensors(self.flat, vars(update_info)))
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
    """End the engine core, and with it its workers, when the leader is gone, however it ended.

    vLLM's workers end with their engine core, but the core does not notice that the process which
    started it was killed, and would keep the devices' memory for ever. The only worker of an engine
    may be in the core's own process. A process that is stopped needs the kernel to end it.
    """
    signal_at_end_of_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    core = os.getpid() if parent.pid == leader_pid else parent.pid
    when_gone(leader_pid, lambda: os.kill(core, signal.SIGKILL))


if (_leader := os.environ.get(LEADER_PID)) and int(_leader) != os.getpid():  # in a worker
    _end_with(int(_leader))

WeightTransferEngineFactory.register_engine(BACKEND, MinirlTransfer)
