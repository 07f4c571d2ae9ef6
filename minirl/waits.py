"""Who waits for what since when: what a rollout says when it seems to stand still."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

CONVERSATION: ContextVar[str] = ContextVar("conversation", default="")
"""Prompt and sample of the conversation that the running task belongs to: `12-3/0`."""
NUM_NAMED = 3  # conversations of each kind of wait that a report names


@dataclass(eq=False, slots=True)
class Wait:
    """One wait that has not ended."""

    what: str
    conversation: str
    since: float = field(default_factory=time.monotonic)


class Waits:
    """The waits of a process.

    >>> with WAITS.on("tool 'search'"):
    ...     answer = await search(query)
    """

    def __init__(self) -> None:
        self._waits: set[Wait] = set()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """The running conversation waits for `what` inside."""
        wait = Wait(what, CONVERSATION.get())
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def report(self, longer_than_s: float) -> str:
        """Every wait that has lasted for so long, by what is waited for; "" if there is none."""
        now = time.monotonic()
        kinds: dict[str, list[Wait]] = defaultdict(list)
        for wait in sorted(self._waits, key=lambda wait: wait.since):
            if now - wait.since >= longer_than_s:
                kinds[wait.what].append(wait)
        lines = []
        for what, waits in kinds.items():
            named = [f"{w.conversation} ({now - w.since:.0f} s)" for w in waits[:NUM_NAMED]]
            named += ["..."] if len(waits) > NUM_NAMED else []
            lines.append(f"{len(waits)} for {what}: {', '.join(named)}")
        return "\n  ".join(lines)

    @asynccontextmanager
    async def explained(self, after_s: float) -> AsyncIterator[None]:
        """Log what has been waited for longer than `after_s`, every so often, while inside."""

        async def explain() -> None:
            while True:
                await asyncio.sleep(after_s)
                if waiting := self.report(after_s):
                    logger.warning(
                        "conversations that have waited for more than %g s "
                        "(rollout.stall_warning_s):\n  %s",
                        after_s,
                        waiting,
                    )

        task = asyncio.create_task(explain())
        try:
            yield
        finally:
            task.cancel()


WAITS = Waits()
"""Of this process."""
