"""The world of ranks: set-up from torchrun's variables (or a world of one), device, small
collectives.

Every collective here runs on CPU tensors over gloo, so it works while an engine holds the GPU.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.config import Config, ConfigError
from minirl.ranks import RANKS, RankLostError
from minirl.types import MicroBatch
from minirl.waits import INNERMOST, WAITS

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Tells machines apart, and not what runs on one of them."""


def collective(method: Callable[P, R]) -> Callable[P, R]:
    """A wait for the other ranks: each rank's log says in which it has been for long, and what for
    (`the trainer's Dist.broadcast_batch, where it waits for other ranks in broadcast_batch`)."""

    @wraps(method)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = INNERMOST.get()
        place = f"{outer.what}, where it waits for" if outer else "the"
        with (
            WAITS.on(f"{place} other ranks in {method.__name__}", logging.INFO),
            RANKS.operation(method.__name__),
        ):
            return method(*args, **kwargs)

    return named


@dataclass(frozen=True, kw_only=True)
class Dist:
    """This process's place among the ranks.

    With W = 4 ranks and tensor_parallel_size T = 2, ranks 0 and 1 are group 0 (leader 0), ranks 2
    and 3 are group 1 (leader 2). The leader holds the group's engine.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tensor_parallel_size: int = 1

    @property
    def is_main(self) -> bool:
        """Rank 0 hosts the agent loops."""
        return self.rank == 0

    @property
    def num_groups(self) -> int:
        """W / T: the number of engines."""
        return self.world_size // self.tensor_parallel_size

    @property
    def group(self) -> int:
        """Index of this rank's group."""
        return self.rank // self.tensor_parallel_size

    @property
    def leader(self) -> int:
        """The rank that holds this group's engine."""
        return self.group * self.tensor_parallel_size

    @property
    def group_devices(self) -> list[int]:
        """CUDA devices of the group's ranks, which its engine shares with them."""
        first = self.local_rank - self.rank + self.leader
        return list(range(first, first + self.tensor_parallel_size))

    @property
    def is_leader(self) -> bool:
        """True where the engine lives."""
        return self.rank == self.leader

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum_floats([0.0])  # dist.barrier() would use the GPU, and need a device for it

    def release_memory(self) -> None:
        """Return what torch has cached of the GPUs to the driver, on every rank, before an engine
        takes it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.barrier()

    @collective
    def sum_floats(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks; every rank passes the same number of values."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    @collective
    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @collective
    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place, of a CPU tensor."""
        dist.all_reduce(tensor)
        return tensor

    def share_path(self, path: str) -> str:
        """Rank 0's path on every rank, after `require_one_machine`."""
        path = self.gather(path)[0]
        self.require_one_machine(Path(path))
        return path

    def require_one_machine(self, folder: Path) -> None:
        """ConfigError, on every rank, unless each runs on rank 0's machine and sees its `folder`.

        Nodes (torchrun --nnodes) may be containers or network namespaces of one machine.
        """
        machines = self.gather(BOOT_ID.read_text())
        sees = self.gather(folder.exists())
        if away := [rank for rank, machine in enumerate(machines) if machine != machines[0]]:
            raise ConfigError(
                f"torchrun --nnodes: ranks {away} run on another machine than rank 0; an engine "
                "shares memory with the trainer, so start all ranks on one machine"
            )
        if blind := [rank for rank, seen in enumerate(sees) if not seen]:
            raise ConfigError(
                f"torchrun --nnodes: ranks {blind} cannot see rank 0's {folder}; give all nodes "
                "the same folder for temporary files (TMPDIR)"
            )

    @collective
    def broadcast_batch(self, batch: MicroBatch | None) -> MicroBatch:
        """Rank 0's batch (CPU tensors) on every rank; the others pass None."""
        mine = {} if batch is None else batch.tensors()
        kinds = [{name: (value.shape, value.dtype) for name, value in mine.items()}]
        dist.broadcast_object_list(kinds, src=0)
        tensors = mine or {name: torch.empty(s, dtype=d) for name, (s, d) in kinds[0].items()}
        for tensor in tensors.values():
            dist.broadcast(tensor, src=0)
        return MicroBatch(**tensors)


@contextmanager
def distributed(config: Config) -> Iterator[Dist]:
    """Join the world that torchrun describes, or make a world of one; leave it at the end.

    Raises ConfigError, before anything is opened, when tensor_parallel_size does not divide the
    number of ranks or when the device that is asked for does not exist.
    """
    world = place(config, os.environ)
    torch.set_num_threads(num_threads(os.environ))
    several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size)) < world.world_size
    if several_nodes and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Else gloo takes that of the host's name, which nodes on one machine share.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(os.environ["MASTER_ADDR"])
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(world.device)
    timeout_s = config.trainer.collective_timeout_s
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
            # A world of one needs no address to meet at, so two runs on a machine cannot collide.
            store=None if "RANK" in os.environ else dist.HashStore(),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=world.device if cuda else None,
        )
    except RuntimeError as error:
        raise RankLostError(
            f"not all of the {world.world_size} ranks came within {timeout_s:g} s "
            f"(trainer.collective_timeout_s): {error}"
        ) from error
    RANKS.join(world.rank, world.world_size, timeout_s, world.share_path)
    try:
        with RANKS.told():
            yield world
    except BaseException:
        if not cuda or world.world_size == 1:
            # Else NCCL would wait for collectives that a lost rank never joins.
            dist.destroy_process_group()
        raise
    finally:
        RANKS.leave()
    dist.destroy_process_group()


def num_threads(environment: Mapping[str, str]) -> int:
    """That torch computes with on a rank: OMP_NUM_THREADS, or its share of the cores, which nodes
    of one machine share too."""
    num_ranks = int(environment.get("WORLD_SIZE", 1))
    on_node = int(environment.get("LOCAL_WORLD_SIZE", num_ranks))
    given = environment.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is one per nesting level
    if given.isdigit() and (int(given) > 1 or on_node == 1):  # else the 1 is torchrun's
        return max(1, int(given))
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


async def compute_in(executor: Executor, count: int) -> None:
    """Have torch compute with `count` threads in the executor's one thread and alone in this one.

    libgomp has threads of its own for each that computes with several. With more of them than cores
    they sleep between operations, where else they would wait for the next, and every one takes
    longer (benchmarks/threads.py, two_pools).
    """

    def take() -> None:
        torch.get_num_threads()  # or the first operation would take what this thread is told last
        torch.set_num_threads(count)

    await asyncio.get_running_loop().run_in_executor(executor, take)
    torch.set_num_threads(1)  # also for threads that come


def place(config: Config, environment: Mapping[str, str]) -> Dist:
    """This rank's Dist from torchrun's variables; opens nothing."""
    local_rank = int(environment.get("LOCAL_RANK", 0))
    world_size = int(environment.get("WORLD_SIZE", 1))
    on_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    size = config.rollout.tensor_parallel_size
    if on_node % size:  # an engine's workers are children of one rank
        raise ConfigError(
            f"rollout.tensor_parallel_size: got {size}, which does not divide the {on_node} ranks; "
            f"start a multiple of it on each node, e.g. torchrun --nproc-per-node {size}"
        )
    return Dist(
        rank=int(environment.get("RANK", 0)),
        world_size=world_size,
        local_rank=local_rank,
        device=choose_device(config.trainer.device, local_rank),
        tensor_parallel_size=size,
    )


def choose_device(device: str, local_rank: int) -> torch.device:
    """The device of the rank `local_rank` under `trainer.device` = auto, cpu or cuda."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.device: got {device!r}, but local rank {local_rank} finds "
            f"only {torch.cuda.device_count()} CUDA devices; start fewer ranks, or set "
            "trainer.device=cpu"
        )
    return torch.device("cuda", local_rank)


def interface_towards(host: str) -> str:
    """Name of the network interface by which this process reaches `host`, or has its address."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: looks up the route, sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == family and a.address.split("%")[0] == own for a in addresses):
            return name
    raise RuntimeError(f"no network interface has the address {own}, by which {host} is reached")
