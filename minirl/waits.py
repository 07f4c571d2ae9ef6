"""Who waits for what since when: what a run says when it seems to stand still."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

R = TypeVar("R")

logger = logging.getLogger(__name__)

CONVERSATION: ContextVar[str] = ContextVar("conversation", default="the run")
"""Prompt and sample of the conversation that the running task belongs to: `12-3/0`."""
NO_CONVERSATION = "no conversation"
"""Of what asks the policy outside of any: a judge, for one."""
NUM_NAMED = 3  # conversations of each kind of wait that a report names
NUM_FRAMES = 8  # of what blocks an event loop


class Blocking:
    """What stops the event loop while inside; may be entered again and again."""

    __slots__ = ("_among", "conversation", "level", "outer", "since", "what")

    def __init__(self, among: "set[Blocking]", what: str, level: int) -> None:
        self._among = among
        self.what = what
        self.level = level
        self.conversation = CONVERSATION.get()
        self.outer: Blocking | None = None
        """The wait that this one is a part of, and says better."""

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self._among.add(self)

    def __exit__(self, *exc: object) -> None:
        self._among.discard(self)


class Wait(Blocking):
    """One wait of a conversation, as long as inside."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.outer = INNERMOST.get()
        INNERMOST.set(self)
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        INNERMOST.set(self.outer)  # no reset: a generator may be closed in another context
        super().__exit__()


INNERMOST: ContextVar[Blocking | None] = ContextVar("innermost_wait", default=None)


class Waits:
    """The waits of a process, on any thread.

    >>> with WAITS.on("tool 'search'"):
    ...     answer = await search(query)
    """

    def __init__(self) -> None:
        # Threads add and discard, one step each, and only ever look at a copy: no lock.
        self._waits: set[Blocking] = set()

    def on(self, what: str, level: int = logging.WARNING) -> Wait:
        """The running conversation waits for `what` inside; `level` INFO where that may well be
        long, so that it is told in the log only."""
        return Wait(self._waits, what, level)

    def blocked_by(self, what: str) -> Blocking:
        """The event loop, and with it every conversation, waits for `what` inside: a step of a
        coroutine, whose own waits go on after it."""
        words = f"the event loop, which {what} blocks"
        return Blocking(self._waits, words, logging.WARNING)

    def report(self, longer_than_s: float, level: int = logging.WARNING) -> str:
        """Every wait of a level that has lasted for so long, by what is waited for; "" if there is
        none. Of waits within waits the innermost is told."""
        now = time.monotonic()
        waits = self._waits.copy()
        waits = {w for w in waits - {w.outer for w in waits} if w.level == level}
        kinds: dict[str, list[Blocking]] = defaultdict(list)
        for wait in sorted(waits, key=lambda wait: wait.since):
            if now - wait.since >= longer_than_s:
                kinds[wait.what].append(wait)
        lines = []
        for what, found in kinds.items():
            named = [f"{w.conversation} ({now - w.since:.0f} s)" for w in found[:NUM_NAMED]]
            named += ["..."] if len(found) > NUM_NAMED else []
            lines.append(f"{len(found)} for {what}: {', '.join(named)}")
        return "\n  ".join(lines)

    @contextmanager
    def explained(self, after_s: float) -> Iterator[None]:
        """Log what has been waited for longer than `after_s`, every so often, while inside.

        From a thread, so that an event loop that is blocked is told, too: by what. Enter it in the
        thread of the loop.
        """
        loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
        ended, ticked = threading.Event(), threading.Event()

        def explain() -> None:
            ticked.set()
            while not ended.wait(after_s):
                for level in (logging.WARNING, logging.INFO):
                    if waiting := self.report(after_s, level):
                        words = "waits of more than %g s (rollout.stall_warning_s):\n  %s"
                        logger.log(level, words, after_s, waiting)
                if not ticked.is_set():
                    words = "the event loop has been blocked for more than %g s, by\n%s"
                    logger.warning(words, after_s, _stack(loop_thread))
                elif not ended.is_set():
                    ticked.clear()
                    loop.call_soon_threadsafe(ticked.set)

        thread = threading.Thread(target=explain, name="waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


async def within(seconds: float, work: Coroutine[Any, Any, R]) -> R:
    """What `work` returns; TimeoutError, and it is cancelled, when it takes longer.

    Only time in which this process runs counts: when it was itself stopped for a while (Ctrl-Z, a
    debugger), what it waits for has missed no deadline.
    """
    task = asyncio.ensure_future(work)
    try:
        while seconds > 0:
            pause = min(seconds, 1.0)
            if (await asyncio.wait([task], timeout=pause))[0]:
                return task.result()
            seconds -= pause
        raise TimeoutError
    finally:
        task.cancel()


def _stack(thread: int) -> str:
    return "".join(traceback.format_stack(sys._current_frames()[thread])[-NUM_FRAMES:]).rstrip()


WAITS = Waits()
"""Of this process."""
