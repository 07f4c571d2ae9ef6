"""`rollout.mode`: when conversations may go on. `async` is the real one, the others what it beats.

| mode | |
|---|---|
| `async` | each conversation as fast as it can |
| `sync` | all generate as one batch, then all their tools run: a barrier at every turn |
| `serial` | one conversation after another |

For the same seeds all three sample the same tokens, up to floating-point noise.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from minirl.agent_loop import Server
from minirl.registry import Registry
from minirl.types import TokenOutput
from minirl.waits import CONVERSATION, NO_CONVERSATION, WAITS

T = TypeVar("T")


class Pace:
    """`async`. Stands between agent loops and engines, and runs the conversations of a rollout."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def begin(self, num_conversations: int) -> None:
        """So many conversations are about to be run."""

    async def run(self, conversation: Coroutine[Any, Any, T]) -> T:
        """Run one conversation to its end."""
        return await conversation

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """See Server."""
        return await self._server.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )


class OneByOne(Pace):
    """`serial`."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._turn = asyncio.Lock()

    async def run(self, conversation: Coroutine[Any, Any, T]) -> T:
        """Run it when those before it have ended."""
        try:
            async with self._turn:
                return await conversation
        finally:
            conversation.close()  # if it never began


class Round:
    """Turns that begin together and return together."""

    def __init__(self) -> None:
        self.turns: Counter[str] = Counter()
        """Those that wait or are sampled, by the id of their conversation."""
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def leave(self, request_id: str) -> None:
        """A turn was sampled, or cancelled."""
        self.turns[request_id] -= 1
        if not self.turns[request_id]:
            del self.turns[request_id]
        if self.begun.is_set() and not self.turns:
            self.ended.set()


class TurnBarrier(Pace):
    """`sync`: no turn begins before every conversation wants one, none returns before all have."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._num_running = 0
        self._round = Round()

    def begin(self, num_conversations: int) -> None:
        """All of them have to come to the barrier."""
        self._num_running = num_conversations

    async def run(self, conversation: Coroutine[Any, Any, T]) -> T:
        """Run it; when it has ended, nobody waits for it any more."""
        try:
            return await conversation
        finally:
            self._num_running -= 1
            self._begin_if_complete()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """See Server."""
        turn = partial(
            super().generate, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        if CONVERSATION.get() == NO_CONVERSATION:
            return await turn()  # a judge's: conversations would wait for it, and it for them
        with WAITS.on("the other conversations (rollout.mode=sync)"):
            return await self._in_round(request_id, turn)

    async def _in_round(
        self, request_id: str, turn: Callable[[], Coroutine[Any, Any, TokenOutput]]
    ) -> TokenOutput:
        this = self._round
        this.turns[request_id] += 1
        # Soon: the last one waits as the others do, and they begin in the order in which they came.
        asyncio.get_running_loop().call_soon(self._begin_if_complete)
        try:
            await this.begun.wait()
            output = await turn()
        finally:
            this.leave(request_id)
        await this.ended.wait()
        return output

    def _begin_if_complete(self) -> None:
        if len(self._round.turns) >= self._num_running:
            self._round.begun.set()
            self._round = Round()


MODES: Registry[type[Pace]] = Registry("rollout mode")
MODES.register("async")(Pace)
MODES.register("sync")(TurnBarrier)
MODES.register("serial")(OneByOne)
