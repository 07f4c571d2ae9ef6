"""How a command begins and ends: event loop, signals, one readable reason, exit status.

0 done    1 failed    2 bad input    130 Ctrl-C    143 SIGTERM
"""

import asyncio
import logging
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import uvloop

from minirl.config import Config, ConfigError, load_config
from minirl.ranks import RANKS, RankFailedError, first_cause
from minirl.tools.threads import DaemonThreads
from minirl.waits import WAITS

P = ParamSpec("P")
R = TypeVar("R")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedBySignal(Exception):
    """The user or torchrun asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


class TrainerThread:
    """The one thread in which training steps and collectives run, in the order of the calls."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function(*args, **kwargs)` there; the event loop goes on meanwhile."""
        loop, name = asyncio.get_running_loop(), getattr(function, "__qualname__", str(function))
        with WAITS.on(f"the trainer's {name}", logging.INFO):
            work = partial(RANKS.run, name, function, *args, **kwargs)
            return await loop.run_in_executor(self.executor, copy_context().run, work)


class SocketFolder:
    """A folder that only the user can open, for the sockets of a run; rank 0 makes and removes it.

    A file in it, which can be made once, decides who tells why the run ended: the first rank that
    fails. The others fail because of it. That one removes the folder too, since it may be rank 0
    that is lost.
    """

    path: Path | None = None
    owned = False

    def make(self) -> str:
        """Make the folder, on rank 0; its path, for the others to `join`."""
        self.path, self.owned = Path(tempfile.mkdtemp(prefix="minirl-")), True  # mode 0700
        return str(self.path)

    def join(self, path: str) -> None:
        """Use the folder that rank 0 made."""
        self.path = Path(path)

    def is_first_to_fail(self) -> bool:
        """True for the first caller of all ranks; before there is a folder, for the first rank of
        each node."""
        if self.path is None:
            return int(os.environ.get("LOCAL_RANK", 0)) == 0
        try:
            (self.path / "reason").touch(exist_ok=False)
        except (FileExistsError, FileNotFoundError):  # told already, or rank 0 has left
            return False
        self.owned = True
        return True

    def remove(self) -> None:
        """Take it away with all that is in it, where that is this rank's to do."""
        if self.path is not None and self.owned:
            shutil.rmtree(self.path, ignore_errors=True)


SOCKETS = SocketFolder()
"""Of this process's run."""


def run_command(
    main: Callable[[Config], Coroutine[Any, Any, None]], arguments: list[str], usage: str
) -> NoReturn:
    """Load the config from the command line, run `main(config)` to its end and exit the process."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        sys.exit(0 if arguments else 2)
    try:
        config = load_config(arguments)
        uvloop.run(_until_signal(main(config)))
    except BaseException as error:
        _fail(first_cause(error))
    SOCKETS.remove()
    sys.exit(0)


async def _until_signal(main: Coroutine[Any, Any, None]) -> None:
    """Run `main`; SIGINT and SIGTERM cancel it, so that everything is closed in order."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonThreads())
    task = loop.create_task(main)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except BaseException as error:
        if received:
            raise StoppedBySignal(received[0]) from error
        raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once: for what keeps the event loop, which would hear
    of them only afterwards, and has opened nothing that must be closed."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(error: BaseException) -> NoReturn:
    """Say why, once for all ranks, and end at once.

    Not by sys.exit: that waits for the trainer thread, which may wait for a rank that is dead.
    Engine processes that were still starting are killed; their workers follow them.
    """
    status, words = 1, f"{type(error).__name__}: {error}"
    if isinstance(error, ConfigError):
        status, words = 2, str(error)
    elif isinstance(error, StoppedBySignal):
        status, words = error.exit_status, str(error)
    elif isinstance(error, RankFailedError):
        words = str(error)
    elif "RANK" in os.environ:
        words = f"rank {os.environ['RANK']}: {words}"
    is_first = SOCKETS.is_first_to_fail()
    for child in multiprocessing.active_children():
        child.kill()
    SOCKETS.remove()
    try:
        if is_first:
            print(f"minirl: {words}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        if multiprocessing.parent_process() is None:  # else the folder is that one's
            # What agent-loop workers are started through is in it; only sys.exit would remove it.
            shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    finally:  # though nobody may read: Ctrl-C ends the `tee` behind the run, too
        os._exit(status)
