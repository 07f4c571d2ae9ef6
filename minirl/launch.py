"""How a command begins and ends: one event loop, signals, one readable reason, the right exit status.

0 done    1 failed    2 bad input    130 Ctrl-C    143 SIGTERM
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import uvloop

from minirl.config import Config, ConfigError, load_config

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


class StoppedBySignal(Exception):
    """The user or torchrun asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


class TrainerThread:
    """The one thread in which training steps and collectives run, in the order they were asked for."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function(*args, **kwargs)` there; the event loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))


class SocketFolder:
    """A folder that only the user can open, for sockets; rank 0 makes it and takes it away."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="minirl-"))  # mode 0700

    def remove(self) -> None:
        """Take it away with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


class Reason:
    """Who tells why the run ended: the first rank that fails; the others follow from it.

    The ranks agree through a file in the socket folder, which exists once.
    """

    folder: Path | None = None

    def claim(self) -> bool:
        """True for the first caller of all ranks."""
        if self.folder is None:
            return int(os.environ.get("RANK", 0)) == 0
        try:
            (self.folder / "reason").touch(exist_ok=False)
        except (FileExistsError, FileNotFoundError):  # told already, or rank 0 is gone
            return False
        return True


REASON = Reason()


def run_command(
    main: Callable[[Config], Coroutine[Any, Any, None]], arguments: list[str], usage: str
) -> NoReturn:
    """Load the config from the command line, run `main(config)` to its end and exit the process."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        sys.exit(0 if arguments else 2)
    rank = int(os.environ.get("RANK", 0))
    try:
        config = load_config(arguments)
        uvloop.run(_until_signal(main(config)))
    except BaseException as error:
        _exit(_first_cause(error), rank)
    sys.exit(0)


async def _until_signal(main: Coroutine[Any, Any, None]) -> None:
    """Run `main`; SIGINT and SIGTERM cancel it, so that everything is closed in order."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except BaseException as error:
        if received:
            raise StoppedBySignal(received[0]) from error
        raise


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _exit(error: BaseException, rank: int) -> NoReturn:
    """Say why, once for all ranks, and end at once: a trainer thread may still wait for a dead rank."""
    status = {ConfigError: 2, StoppedBySignal: getattr(error, "exit_status", 1)}.get(type(error), 1)
    logger.debug("rank %d ends", rank, exc_info=error)
    if REASON.claim():
        if isinstance(error, ConfigError):
            print(f"minirl: {error}", file=sys.stderr)
        elif isinstance(error, StoppedBySignal):
            print(f"minirl: {error}", file=sys.stderr)
        else:
            trace = "".join(traceback.format_exception(error))
            logger.error("rank %d failed:\n%s", rank, trace)
            print(f"minirl: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
