import asyncio
import itertools
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil
import pytest

from minirl.config import Config, ConfigError
from minirl.launch import SOCKETS, SocketFolder, TrainerThread, run_command

USAGE = "usage of the program"


async def succeeds(config: Config) -> None:
    SOCKETS.make()
    print(f"model {config.model.path} in {SOCKETS.path}")


async def fails(config: Config) -> None:
    SOCKETS.make()
    raise FloatingPointError("planted")


async def fails_in_a_group(config: Config) -> None:
    async with asyncio.TaskGroup() as outer:
        outer.create_task(asyncio.sleep(3600))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(fails(config))


async def refuses_its_input(config: Config) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_refuse())


async def _refuse() -> None:
    raise ConfigError("data.train_files: got []; name a file")


async def waits(config: Config) -> None:
    """Ends when it is told to, and closes what it opened; its child would not by itself."""
    SOCKETS.make()
    child = multiprocessing.get_context("fork").Process(target=_ignore_signals)
    child.start()
    try:
        print(f"waiting {child.pid}", flush=True)
        await asyncio.sleep(3600)
    finally:
        print("closed")


def _ignore_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(3600)


async def fails_while_a_thread_is_stuck(config: Config) -> None:
    asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), time.sleep, 3600)
    await fails(config)


def leave_a_thread_stuck() -> None:
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)


async def succeeds_while_a_call_is_stuck(config: Config) -> None:
    leave_a_thread_stuck()
    await succeeds(config)


async def fails_while_a_call_is_stuck(config: Config) -> None:
    leave_a_thread_stuck()
    await fails(config)


async def fails_with_nobody_to_tell(config: Config) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    await fails(config)


async def fails_with_another_rank(config: Config) -> None:
    SOCKETS.join(os.environ["SOCKETS"])
    raise FloatingPointError("planted")


def start(main: Any, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
    """In the new process: the command, with its output in a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    tempfile.tempdir = str(output.parent)
    os.environ.update(environment)
    run_command(main, arguments, usage=USAGE)


NUMBERS = itertools.count()


class Command:
    """A program that `run_command` runs, in a process of its own."""

    def __init__(
        self,
        forkserver: ForkServerContext,
        folder: Path,
        main: Any,
        *arguments: str,
        **environment: str,
    ) -> None:
        self.output = folder / f"output{next(NUMBERS)}"
        self.temporary = folder
        target = (main, list(arguments), self.output, environment)
        self.process = forkserver.Process(target=start, args=target)
        self.process.start()

    def wait_for(self, word: str) -> str:
        deadline = time.monotonic() + 60
        while not self.output.exists() or word not in (printed := self.output.read_text()):
            assert time.monotonic() < deadline and self.process.is_alive()
            time.sleep(0.01)
        return printed

    def end(self) -> tuple[int | None, str]:
        """Exit status and everything that was printed."""
        self.process.join(60)
        assert self.process.exitcode is not None
        assert not list(self.temporary.glob("minirl-*"))  # no socket folder stays
        return self.process.exitcode, self.output.read_text()


Run = Callable[..., Command]


@pytest.fixture
def run(forkserver: ForkServerContext, tmp_path: Path) -> Run:
    return lambda main, *arguments, **environment: Command(
        forkserver, tmp_path, main, *arguments, **environment
    )


@pytest.mark.parametrize("main", [succeeds, succeeds_while_a_call_is_stuck])
def test_a_program_that_succeeds(run: Run, tmp_path: Path, main: Any) -> None:
    status, printed = run(main, "model.path=m").end()
    assert status == 0 and printed.startswith(f"model m in {tmp_path}/minirl-")


@pytest.mark.parametrize(("arguments", "expected"), [((), 2), (("-h",), 0), (("--help",), 0)])
def test_usage(run: Run, arguments: tuple[str, ...], expected: int) -> None:
    assert run(succeeds, *arguments).end() == (expected, USAGE + "\n")


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (succeeds, ["model.pth=m"], "model.pth: no such key; did you mean 'path'?"),
        (succeeds, ["nothing.yaml"], "nothing.yaml: no such file"),
        (refuses_its_input, ["model.path=m"], "data.train_files: got []; name a file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    run: Run, main: Any, arguments: list[str], message: str
) -> None:
    status, printed = run(main, *arguments).end()
    assert status == 2
    assert printed.startswith(f"minirl: {message}") and printed.count("\n") == 1


@pytest.mark.parametrize(
    "main",
    [fails, fails_in_a_group, fails_while_a_thread_is_stuck, fails_while_a_call_is_stuck],
)
def test_a_failure_is_told_in_one_line(run: Run, main: Any) -> None:
    assert run(main, "model.path=m").end() == (1, "minirl: FloatingPointError: planted\n")


def test_a_failure_that_nobody_reads_ends_all_the_same(run: Run) -> None:
    assert run(fails_with_nobody_to_tell, "model.path=m").end() == (1, "")


FAILS_WITH_WORKERS = """
from multiprocessing.forkserver import ensure_running
from minirl.launch import run_command

async def main(config):
    ensure_running()
    raise FloatingPointError("planted")

run_command(main, ["model.path=m"], usage="")
"""


def test_the_folder_through_which_workers_are_started_does_not_stay(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FAILS_WITH_WORKERS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "minirl: FloatingPointError: planted\n")
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_to_fail_tells_why_for_all(run: Run, tmp_path: Path) -> None:
    (sockets := tmp_path / "sockets").mkdir()
    options = {"SOCKETS": str(sockets), "WORLD_SIZE": "3"}
    ranks = [run(fails_with_another_rank, "model.path=m", RANK=str(r), **options) for r in range(3)]
    ended = [rank.end() for rank in ranks]
    assert [status for status, _ in ended] == [1, 1, 1]
    told = {r: printed for r, (_, printed) in enumerate(ended) if printed}
    [(rank, printed)] = told.items()
    assert printed == f"minirl: rank {rank}: FloatingPointError: planted\n"


def test_before_there_is_a_folder_the_first_rank_of_a_node_tells(run: Run) -> None:
    ranks = [run(succeeds, "model.pth=m", RANK=str(2 + n), LOCAL_RANK=str(n)) for n in range(2)]
    (first, told), (second, silent) = (rank.end() for rank in ranks)
    assert (first, second, silent) == (2, 2, "")
    assert told.startswith("minirl: model.pth: no such key")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_signal_closes_everything(run: Run, number: signal.Signals, status: int) -> None:
    command = run(waits, "model.path=m")
    waiting = command.wait_for("waiting").split()
    child = psutil.Process(int(waiting[-1]))
    assert command.process.pid is not None
    os.kill(command.process.pid, number)
    assert command.end() == (
        status,
        f"{' '.join(waiting)}\nclosed\nminirl: stopped by {number.name}\n",
    )
    child.wait(30)  # killed, although it ignores signals


async def test_the_trainer_thread_keeps_the_order_and_frees_the_loop() -> None:
    on_trainer, order = TrainerThread(), []

    def work(number: int, *, delay_s: float) -> int:
        time.sleep(delay_s)
        order.append(number)
        return number

    calls = [asyncio.create_task(on_trainer(work, n, delay_s=0.03 - n / 100)) for n in range(3)]
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)  # the loop goes on meanwhile
    assert await asyncio.gather(*calls) == order == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await on_trainer(lambda: 1 // 0)


def test_the_socket_folder_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sockets, other = SocketFolder(), SocketFolder()
    other.join(sockets.make())
    assert other.path == sockets.path and other.path is not None
    assert stat.S_IMODE(other.path.stat().st_mode) == 0o700
    other.remove()  # not its own
    assert other.path.exists()
    sockets.remove()
    assert not other.path.exists() and not other.is_first_to_fail()


def test_the_first_rank_that_fails_tells_and_takes_the_socket_folder_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    main, first, later = SocketFolder(), SocketFolder(), SocketFolder()
    path = main.make()
    first.join(path)
    later.join(path)
    assert [folder.is_first_to_fail() for folder in (first, later, main)] == [True, False, False]
    later.remove()
    assert Path(path).exists()
    first.remove()  # rank 0 may be the one that is lost
    assert not Path(path).exists()
    main.remove()
