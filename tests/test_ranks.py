"""Two real gloo ranks, one of which stops, dies, fails, dawdles, or cannot write."""

import asyncio
import json
import mmap
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from minirl.config import Config, load_config
from minirl.distributed import Dist, distributed
from minirl.launch import TrainerThread
from minirl.ranks import RANKS, SLOT_BYTES, Place, Ranks

SECONDS = 1.0
"""trainer.collective_timeout_s where a rank is to miss it, once both are where they should be."""
PATIENCE_S = 300.0


class Trained:
    """A part of a checkpoint: one layer, the same on both ranks."""

    def __init__(self, value: float = 0.0) -> None:
        self.model = torch.nn.Linear(300, 300, bias=False)
        torch.nn.init.constant_(self.model.weight, value)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.num_steps = int(value)

    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        return nullcontext()


async def stops(world: Dist, folder: Path) -> None:
    """Rank 1, in the middle of a step."""
    RANKS.phase("step 3, update_actor")
    if world.is_main:
        _until(lambda: RANKS._others()[0].process == "is stopped")
        expect_the_other_within(SECONDS)
    await TrainerThread()(_stop if world.rank else world.barrier)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(PATIENCE_S)  # this thread may go on for a moment


def expect_the_other_within(seconds: float) -> None:
    """As trainer.collective_timeout_s, which at the start must last for slow machines, too."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), None)
    RANKS.timeout_s = seconds


async def dies(world: Dist, folder: Path) -> None:
    RANKS.phase("step 3, update_actor")
    await TrainerThread()(_die if world.rank else world.barrier)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def dawdles(world: Dist, folder: Path) -> None:
    RANKS.phase("step 3, ref")
    if world.is_main:
        _until(lambda: RANKS._others()[0].operation == "_dawdle")
        expect_the_other_within(SECONDS)
        await TrainerThread()(world.barrier)
    await TrainerThread()(_dawdle, folder)


def _dawdle(folder: Path) -> None:
    """Until the other has given up."""
    _until((folder / "told_0").exists)


async def fails(world: Dist, folder: Path) -> None:
    await TrainerThread()(_fail if world.rank else world.barrier)


def _fail() -> None:
    raise FloatingPointError("planted")


async def stops_while_nobody_waits(world: Dist, folder: Path) -> None:
    """Rank 0 rolls out, and waits in no collective."""
    RANKS.phase("step 1, gen")
    RANKS.timeout_s = SECONDS
    if world.rank:
        _stop()
    await RANKS.watch()


async def has_its_own_temporary_folder(world: Dist, folder: Path) -> None:
    """Rank 1, as in a container: see run_rank. They do not get here."""


async def cannot_write(world: Dist, folder: Path) -> None:
    """Rank 1 finds no room for its part; both say so, and what was there is good."""
    # Here, since the other scenarios do without what this imports.
    from minirl.trainer.checkpoint import CheckpointError, Checkpoints, load

    parts = {"actor": Trained(7.0)}
    checkpoints = Checkpoints(folder / "checkpoints", world)
    checkpoints.save(7, parts, {})
    checkpoints.wait()
    parts = {"actor": Trained(8.0)}
    if world.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    checkpoints.save(8, parts, {})
    try:
        checkpoints.wait()
    except CheckpointError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    world.barrier()
    loaded = Trained()
    assert load(folder / "checkpoints" / "step_000007", {"actor": loaded}, world) == {"step": 7}
    assert loaded.num_steps == 7 and loaded.model.weight.eq(7).all()
    shard = next((folder / "checkpoints" / "step_000007" / "state").glob("__0_*"))
    world.barrier()
    if world.is_main:
        shard.write_bytes(shard.read_bytes()[:-1])
    world.barrier()
    try:
        load(folder / "checkpoints" / "step_000007", {"actor": loaded}, world)
    except ValueError as error:  # ConfigError
        raise RuntimeError(f"{told}\n{error}") from error


def run_rank(
    rank: int, scenario: Callable[[Dist, Path], Any], config: Config, folder: Path, port: int
) -> None:
    """In the new process; what it fails with goes to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if rank and scenario is has_its_own_temporary_folder:
        Path.exists = lambda path: False  # type: ignore[method-assign]
    error: BaseException | None = None
    try:
        with distributed(config) as world:
            (folder / f"pid_{rank}").write_text(str(os.getpid()))
            asyncio.run(scenario(world, folder))
    except BaseException as problem:
        error = problem
    (folder / f"part_{rank}").write_text(f"{type(error).__name__}: {error}")
    (folder / f"part_{rank}").rename(folder / f"told_{rank}")
    os._exit(0)  # as launch._fail


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def told(
    request: pytest.FixtureRequest, forkserver: ForkServerContext, tmp_path: Path
) -> dict[int, str]:
    """By rank, what the scenario ended with; ranks that did not end of themselves are left out."""
    scenario, num_told = request.param
    config = load_config(["model.path=unused", "trainer.device=cpu"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [
        forkserver.Process(target=run_rank, args=(rank, scenario, config, tmp_path, port))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        _until(lambda: all((tmp_path / f"told_{rank}").exists() for rank in range(num_told)))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return {
        rank: (tmp_path / f"told_{rank}").read_text()
        for rank in range(2)
        if (tmp_path / f"told_{rank}").exists()
    }


@pytest.mark.parametrize(
    ("told", "process", "place"),
    [
        ((stops, 1), "is stopped", r"step 3, update_actor \(_stop\)"),
        ((dies, 1), "is gone", r"step 3, update_actor \(_die\)"),
        ((dawdles, 1), "runs", r"step 3, ref \(_dawdle\)"),
        ((stops_while_nobody_waits, 1), "is stopped", "step 1, gen"),
    ],
    indirect=["told"],
    ids=lambda value: getattr(value[0], "__name__", None) if isinstance(value, tuple) else None,
)
def test_a_rank_that_does_not_come_is_named_with_its_phase(
    told: dict[int, str], process: str, place: str
) -> None:
    who = rf"rank 1 \(process \d+ {process}\), which has been in {place} for \d+ s"
    assert told[0].startswith("RankLostError: ")
    assert re.search(who, told[0]), told[0]


@pytest.mark.parametrize("told", [(fails, 2)], indirect=True)
def test_the_rank_that_failed_says_why_for_those_that_wait(told: dict[int, str]) -> None:
    assert told == {
        0: "RankFailedError: rank 1: FloatingPointError: planted",
        1: "FloatingPointError: planted",
    }


@pytest.mark.parametrize("told", [(has_its_own_temporary_folder, 2)], indirect=True)
def test_a_node_with_a_temporary_folder_of_its_own_is_told(told: dict[int, str]) -> None:
    for words in told.values():
        assert re.search(r"^ConfigError: .*ranks \[1\] cannot see .*/minirl-.*TMPDIR", words), words


@pytest.mark.parametrize("told", [(cannot_write, 2)], indirect=True)
def test_a_write_that_fails_on_one_rank_fails_on_all(told: dict[int, str], tmp_path: Path) -> None:
    for words in told.values():
        failed, damaged = words.splitlines()
        assert ".step_000008.partial: the checkpoint could not be written: rank 1: " in failed
        assert f"(the last one is {tmp_path}/checkpoints/step_000007)" in failed
        assert "__0_0.distcp is damaged" in damaged
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000007"]


class BeingWritten:
    """A slot whose first half is already what the other rank writes, when it is read first."""

    def __init__(self, before: Place, after: Place) -> None:
        self.old, self.new = (json.dumps(asdict(place)).encode() for place in (before, after))
        self.num_reads = 0

    def __getitem__(self, place: slice) -> bytes:
        self.num_reads += 1
        return self.new[:64] + self.old[64:] if self.num_reads == 1 else self.new


def test_a_place_that_is_being_written_is_read_again() -> None:
    before = Place(rank=1, pid=1, since=9.0, phase="step 3, update_actor", operation="_dawdle")
    after = Place(rank=1, pid=1, since=10.123456, phase="step 3, ref")
    ranks = Ranks()
    ranks._slots = BeingWritten(before, after)  # type: ignore[assignment]
    assert ranks._read(1) == after


def test_any_words_fit_into_a_slot() -> None:
    ranks = Ranks()
    with mmap.mmap(-1, SLOT_BYTES) as ranks._slots:
        ranks.failed(ValueError("\N{GRINNING FACE}" * 2000))  # twelve bytes each in JSON
        assert ranks._read(0).words.startswith("rank 0: ValueError: \N{GRINNING FACE}")


def test_a_process_that_is_gone() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    place = Place(rank=1, pid=child, since=time.monotonic())
    _until(lambda: place.process == "is gone")  # a zombie
    os.waitpid(child, 0)
    assert place.process == "is gone"
    assert replace(place, pid=os.getpid()).process == "runs"
    assert replace(place, pid_namespace="of a container").process == "runs"  # for all that is known
