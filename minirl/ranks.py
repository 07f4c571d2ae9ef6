"""What each rank is at, known to the others also when it hangs or is gone.

All ranks of the machine map one file, in which each has a slot: its phase (`step 3, update_actor`),
the operation of the trainer in it, and since when. The file has no name, so nothing of it stays.
"""

import asyncio
import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PID_NAMESPACE = os.readlink("/proc/self/ns/pid")
SLOT_BYTES = 8192
MAX_WORDS = 600
"""Characters of a failure; escaped in JSON they still fit into a slot."""
POLL_S = 1.0
GONE_S = 10.0
"""A process that is killed closes its connections first, and is seen to be gone a moment later."""


class RankLostError(RuntimeError):
    """Another rank hangs, or is gone without a word."""


class RankFailedError(RuntimeError):
    """Another rank failed; the message is its own."""


def first_cause(error: BaseException) -> BaseException:
    """The first error in a group of errors, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is."""

    rank: int
    pid: int
    """In its own namespace."""
    since: float
    """By time.monotonic(), which is the same for all processes."""
    state: Literal["running", "ending", "failed"] = "running"
    phase: str = "the start"
    operation: str = ""
    words: str = ""
    """Why it failed."""
    pid_namespace: str = PID_NAMESPACE

    @property
    def process(self) -> Literal["runs", "is stopped", "is gone"]:
        """What the kernel says; a zombie is gone. Of a node that is a container nothing is known:
        processes have other numbers there."""
        if self.pid_namespace != PID_NAMESPACE:
            return "runs"
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "is gone"
        if letter in "ZX":
            return "is gone"
        return "is stopped" if letter in "Tt" else "runs"

    def __str__(self) -> str:
        what = f"{self.phase} ({self.operation})" if self.operation else self.phase
        seconds = time.monotonic() - self.since
        who = f"rank {self.rank} (process {self.pid} {self.process})"
        return f"{who}, which has been in {what} for {seconds:.0f} s"


class Ranks:
    """The places of all ranks. In a world of one, and before `join`, there are no others."""

    def __init__(self) -> None:
        self._place = Place(rank=0, pid=os.getpid(), since=time.monotonic())
        self._lock = threading.Lock()
        self._size = 1
        self._slots: mmap.mmap | None = None
        self.timeout_s = float("inf")

    def join(self, rank: int, size: int, timeout_s: float, share: Callable[[str], str]) -> None:
        """Map the file that rank 0 makes; `share(path)` gives every rank rank 0's path, if all see
        it, and `timeout_s` is trainer.collective_timeout_s. Every rank calls it."""
        if size == 1:
            return
        with tempfile.NamedTemporaryFile(prefix="minirl-") if rank == 0 else nullcontext() as own:
            if own:
                own.truncate(size * SLOT_BYTES)
            with open(share(own.name if own else ""), "r+b") as file:
                self._slots = mmap.mmap(file.fileno(), size * SLOT_BYTES)
            self._size, self.timeout_s = size, timeout_s
            self._update(rank=rank, pid=os.getpid(), since=time.monotonic())
            share(own.name if own else "")  # when it returns all have opened the file

    def leave(self) -> None:
        """There are no others any more."""
        self._slots, self._size, self.timeout_s = None, 1, float("inf")
        self._update(rank=0, state="running", phase="the start", operation="", words="")

    def phase(self, name: str) -> None:
        """From now on this rank is in `name`."""
        self._update(phase=name, since=time.monotonic())

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """This rank is in `name` inside."""
        outer = self._place.operation
        self._update(operation=name, since=time.monotonic())
        try:
            yield
        finally:
            self._update(operation=outer)

    def run(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`function(*args, **kwargs)`, an operation of the trainer. Where it fails because another
        rank does, RankFailedError or RankLostError names that one."""
        start = time.monotonic()
        with self.operation(name):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if isinstance(error, RuntimeError):  # what collectives raise
                    self._blame(error, time.monotonic() - start)
                self.failed(error)
                raise

    @contextmanager
    def told(self) -> Iterator[None]:
        """The others are told that, and how, it ends inside."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise
        finally:
            if self._place.state == "running":
                self._update(state="ending")

    def failed(self, error: Exception) -> None:
        """This rank fails of itself; the first reason counts."""
        because_of_another = isinstance(error, RankFailedError | RankLostError)
        if self._place.state == "running" and not because_of_another:
            cause = first_cause(error)
            words = f"rank {self._place.rank}: {type(cause).__name__}: {cause}"[:MAX_WORDS]
            self._update(state="failed", words=words)

    async def watch(self) -> None:
        """RankLostError when a rank is gone without a word, or stopped for longer than
        trainer.collective_timeout_s. For every rank, all along."""
        stopped_s: dict[int, float] = {}
        while True:
            await asyncio.sleep(POLL_S)
            for place in self._others():
                if place.state == "running" and place.process == "is gone":
                    raise RankLostError(f"lost {place}")
                is_stopped = place.process == "is stopped"
                # counted, not measured: this process may have been stopped with the others
                stopped_s[place.rank] = stopped_s.get(place.rank, 0.0) + POLL_S if is_stopped else 0
                if stopped_s[place.rank] > self.timeout_s:
                    raise RankLostError(f"lost {place} {self._limit}")

    @property
    def _limit(self) -> str:
        return f"(trainer.collective_timeout_s={self.timeout_s:g})"

    def _blame(self, error: RuntimeError, waited_s: float) -> None:
        """Raise what names the rank why `error` came up here, if it is another one's fault."""
        deadline = time.monotonic() + GONE_S
        while True:
            others = self._others()
            failed = [place for place in others if place.state == "failed"]
            lost = [place for place in others if place.process != "runs" or place.state == "ending"]
            if failed or lost or not others or time.monotonic() > deadline:
                break
            time.sleep(GONE_S / 20)
        if failed:
            raise RankFailedError(min(failed, key=lambda place: place.since).words) from error
        here = (self._place.phase, self._place.operation)
        elsewhere = [place for place in others if (place.phase, place.operation) != here]
        remedy = ""
        if not lost and waited_s >= self.timeout_s:
            lost, remedy = elsewhere or others, "; where that may take so long, raise the limit"
        if lost:
            reason = str(error).splitlines()[0]
            raise RankLostError(
                f"waited in {self._place.phase} ({self._place.operation}) {self._limit} for "
                f"{'; '.join(map(str, lost))}{remedy}: {reason}"
            ) from error

    def _others(self) -> list[Place]:
        return [self._read(rank) for rank in range(self._size) if rank != self._place.rank]

    def _read(self, rank: int) -> Place:
        assert self._slots is not None
        start = rank * SLOT_BYTES
        slot = self._slots[start : start + SLOT_BYTES]
        while slot != (again := self._slots[start : start + SLOT_BYTES]):
            slot = again  # it was being written
        return Place(**json.loads(slot.rstrip(b"\0")))

    def _update(self, **changes: Any) -> None:
        """Of this rank's place; the event loop and the trainer's thread both do."""
        with self._lock:
            self._place = replace(self._place, **changes)
            if self._slots is not None:
                start = self._place.rank * SLOT_BYTES
                text = json.dumps(asdict(self._place)).encode()
                self._slots[start : start + SLOT_BYTES] = text.ljust(SLOT_BYTES, b"\0")


RANKS = Ranks()
"""As this process knows them."""
