"""Tensors that leave the device while nobody computes with them."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Offload:
    """Keeps tensors in host memory, on the device only inside `here()`.

    What moves is their storages: parameters, FSDP's views of them and the optimizer's references
    stay the objects that they are, and bits stay as they were. On a CPU the bytes move from one
    place in memory to another, which saves nothing and lets it be tested.

    `tensors` is asked each time, since optimizers make their state late, or anew.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._host = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._users = 0
        self._send()

    @contextmanager
    def here(self) -> Iterator[None]:
        """The tensors are on their device inside; may be entered again inside."""
        if not self._users:
            self._fetch()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._send()

    def _send(self) -> None:
        storages = [s for tensor in self._tensors() if (s := tensor.untyped_storage()).nbytes()]
        sizes = [storage.nbytes() for storage in storages]
        if sum(sizes) > len(self._host):
            self._host = host_memory(sum(sizes), pinned=storages[0].is_cuda)
        parts = self._host[: sum(sizes)].split(sizes)
        self._away = list(zip(storages, parts, strict=True))
        for storage, on_host in self._away:
            on_host.copy_(_bytes(storage), non_blocking=True)
        _settle(self._away)
        for storage in storages:
            storage.resize_(0)

    def _fetch(self) -> None:
        for storage, on_host in self._away:
            storage.resize_(on_host.numel())
            _bytes(storage).copy_(on_host, non_blocking=True)
        _settle(self._away)
        self._away = []


def host_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """So many bytes [num_bytes]. `pinned` by the driver: what torch allocates pinned has the next
    power of two as its size, for the weights of an 8B model a third more."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if pinned:
        pin_memory(memory.data_ptr(), num_bytes)
        weakref.finalize(memory, unpin_memory, memory.data_ptr()).atexit = False
    return memory


def weights(model: nn.Module) -> Callable[[], Iterable[Tensor]]:
    """For `Offload`: the model's parameters, of FSDP the rank's shards."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()  # it was mapped from a file
    return lambda: map(_local, model.parameters())


def optimizer_state(optimizer: Optimizer) -> Callable[[], Iterable[Tensor]]:
    """For `Offload`: the moments."""
    return lambda: (
        _local(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _settle(moved: list[tuple[torch.UntypedStorage, Tensor]]) -> None:
    """Wait for the copies."""
    if moved and moved[0][0].is_cuda:
        torch.cuda.synchronize(moved[0][0].device)
