"""`rollout.mode`: when conversations may go on. `async` is the real one, the others what it beats.

| mode | |
|---|---|
| `async` | each conversation as fast as it can |
| `sync` | all generate as one batch, then all their tools run: a barrier at every turn |
| `serial` | one conversation after another |

For the same seeds all three sample the same tokens, up to floating-point noise.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Waiting:
    """One turn at the barrier."""

    request_id: str
    call: Callable[[], Coroutine[Any, Any, TokenOutput]]
    output: "asyncio.Future[TokenOutput]"
    context: Context = field(default_factory=copy_context)
    """Of its conversation."""
    task: "asyncio.Task[TokenOutput] | None" = None


class TurnBarrier(Pace):
    """`sync`: no turn begins before every conversation wants one, none returns before all have."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._num_running = 0
        self._round: list[Waiting] = []
        self._rounds: set[asyncio.Task[None]] = set()

    def begin(self, num_conversations: int) -> None:
        """All of them have to come to the barrier."""
        self._num_running = num_conversations

    async def run(self, conversation: Coroutine[Any, Any, T]) -> T:
        """Run it; when it has ended, nobody waits for it any more."""
        try:
            return await conversation
        finally:
            self._num_running -= 1
            self._start_if_complete()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """See Server."""
        call = partial(
            super().generate, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        if CONVERSATION.get() == NO_CONVERSATION:
            return await call()  # a judge's: conversations would wait for it, and it for them
        with WAITS.on("the other conversations (rollout.mode=sync)"):
            return await self._one_of_a_round(request_id, call)

    async def _one_of_a_round(
        self, request_id: str, call: Callable[[], Coroutine[Any, Any, TokenOutput]]
    ) -> TokenOutput:
        turn = Waiting(request_id, call, asyncio.get_running_loop().create_future())
        self._round.append(turn)
        self._start_if_complete()
        try:
            return await turn.output
        except asyncio.CancelledError:
            if turn.task:
                turn.task.cancel()
            elif turn in self._round:
                self._round.remove(turn)
            raise

    def _start_if_complete(self) -> None:
        if not self._round or len(self._round) < self._num_running:
            return  # surely not all: to look whose turns they are, each time, would take long
        if len({turn.request_id for turn in self._round}) >= self._num_running:
            turns, self._round = self._round, []
            for turn in turns:  # at once: what left the round has a task to cancel
                turn.task = asyncio.create_task(turn.call(), context=turn.context)
            task = asyncio.create_task(self._hand_out(turns))
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)

    async def _hand_out(self, turns: list[Waiting]) -> None:
        tasks = [turn.task for turn in turns if turn.task]
        await asyncio.wait(tasks)
        for turn, task in zip(turns, tasks, strict=True):
            if turn.output.done():  # its conversation was cancelled
                continue
            if error := task.exception():
                turn.output.set_exception(error)
            else:
                turn.output.set_result(task.result())


MODES: Registry[type[Pace]] = Registry("rollout mode")
MODES.register("async")(Pace)
MODES.register("sync")(TurnBarrier)
MODES.register("serial")(OneByOne)
