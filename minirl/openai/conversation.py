"""The requests of one trajectory as token streams: what was sampled is never rendered again.

    request    messages                                tokens
    1          system, user                            prompt(system, user) + A0
    2          system, user, answer 1, tool            ... + A0 + observation(tool) + A1
    3          system, summary of all that, user       prompt(system, summary, user) + A2

Request 2 continues the stream of request 1. Request 3 begins one of its own: a further trajectory.
A request that goes back to an earlier turn (a second try, n > 1, branches) gets a stream whose
prompt is the tokens up to there: what a trajectory trains was sampled in it, and only once.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minirl.agent_loop.base import (
    AgentLoopBase,
    ServerError,
    count_output,
    derive_seed,
    is_reached,
)
from minirl.openai.answers import Completion
from minirl.openai.protocol import ApiError, ChatRequest, Message
from minirl.openai.sampling import (
    Sample,
    answer_message,
    complete,
    for_template,
    render_observation,
    render_prompt,
    sample_choices,
)
from minirl.openai.streams import Place, Stream, Turn, find_place
from minirl.tools.session import cancelled_from_outside
from minirl.types import Termination, ToolCallRecord, Trajectory
from minirl.waits import CONVERSATION


class LimitError(ApiError):
    """A limit of the trajectory forbids the request; `reason` is what the trajectory ends for,
    unless the client finds another way to go on."""

    def __init__(self, reason: Termination, message: str) -> None:
        is_turns = reason in ("max_assistant_turns", "max_user_turns")
        super().__init__(message, code=reason if is_turns else "context_length_exceeded")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request is sampled from."""

    prompt_ids: list[int]
    """All tokens."""
    messages: list[Message]
    """What they stand for."""


class Conversation:
    """All requests of one agent loop.

    What shapes the distribution (temperature, top_p, ...) is the run's, as for every agent loop,
    whatever the client asks for: the trainer computes with it. A client's `seed` makes equal
    requests of a trajectory equal samples; without one each has its own.
    """

    def __init__(self, loop: AgentLoopBase, sampling_params: dict[str, Any]) -> None:
        self.loop = loop
        self.limit: Termination | None = None
        """What forbade the latest request, or cut its answer; None when it was answered in full."""
        self._params = sampling_params
        self._streams: list[Stream] = []  # the one with the latest turn last
        self._num_turns = 0  # those that are being sampled too
        self._num_user_turns = 0  # these too
        self._num_samples: Counter[int] = Counter()  # by prompt
        self._answers: dict[bytes, Completion] = {}
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._is_closed = False
        self._label = CONVERSATION.get()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(self, request: ChatRequest, digest: bytes, is_retry: bool) -> Completion:
        """Answer a request; a retry of one that was answered gets the same answer.

        Raises ApiError when it cannot be served, or the trajectory has ended.
        """
        if is_retry and digest in self._answers:
            return self._answers[digest]
        self._answers.pop(digest, None)  # of a request that said the same: not what a retry lacks
        if self._is_closed:
            raise _has_ended()
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        try:
            self._answers[digest] = await task
        except asyncio.CancelledError:
            if cancelled_from_outside():  # the client is gone
                raise
            raise _has_ended() from None
        finally:
            self._tasks.discard(task)
        return self._answers[digest]

    async def run(self, agent: Coroutine[Any, Any, Any]) -> Any:
        """What the agent returns. ServerError: an engine was lost under one of its requests."""
        task = asyncio.create_task(_without_exit(agent))
        try:
            await asyncio.wait([task, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                self._lost.result()
            return await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """End what is under way, and answer nothing any more."""
        self._is_closed = True
        self._lost.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def finish(self) -> list[Trajectory]:
        """End every trajectory; the one with the latest turn is the last of them.

        RuntimeError: there was no request.
        """
        if not self.loop.trajectories:
            raise RuntimeError("the agent made no request; does it use the base_url it is given?")
        for stream in self._streams:
            self.loop.finish(stream.trajectory, stream.refused or stream.turns[-1].reason)
        return self.loop.trajectories

    async def _answer(self, request: ChatRequest) -> Completion:
        CONVERSATION.set(self._label)
        place = find_place(self._streams, request)
        extends = place.stream if place and place.is_free_end else None
        try:
            with self._taking_turns(request, place), _extending(extends):
                plan = await self._plan(request, place)
                room = self._room(plan, extends)
                samples = await self._sample(request, plan, room)
                # The first choice, which most clients take, last: it is the one to go on with.
                for number, sample in reversed(list(enumerate(samples))):
                    reason = _reason(sample, room)
                    self._commit(request, plan, sample, reason, None if number else extends)
                    self.limit = None if reason == "stop" else reason
        except LimitError as error:
            self._refuse(error.reason, extends)
            raise
        except ApiError:  # it was no limit
            self.limit = None
            raise
        except ServerError as error:
            if not self._lost.done():
                self._lost.set_exception(error)
            raise
        return complete(samples, len(plan.prompt_ids))

    @contextmanager
    def _taking_turns(self, request: ChatRequest, place: Place | None) -> Iterator[None]:
        """Count the turns of a request, unless they do not come about."""
        limits = self.loop.config.rollout.multi_turn
        num_turns, num_user_turns = request.num_choices, int(place is not None)
        if is_reached(self._num_turns + num_turns - 1, limit := limits.max_assistant_turns):
            key = "rollout.multi_turn.max_assistant_turns"
            raise LimitError("max_assistant_turns", f"the trajectory has {limit} turns ({key})")
        if place and is_reached(self._num_user_turns, limit := limits.max_user_turns):
            key = "rollout.multi_turn.max_user_turns"
            raise LimitError("max_user_turns", f"the trajectory has {limit} observations ({key})")
        self._num_turns += num_turns
        self._num_user_turns += num_user_turns
        try:
            yield
        except BaseException:
            self._num_turns -= num_turns
            self._num_user_turns -= num_user_turns
            raise

    async def _plan(self, request: ChatRequest, place: Place | None) -> Plan:
        context = self.loop.context
        if place is None:
            prompt_ids = await render_prompt(context, request)
            return Plan(prompt_ids=prompt_ids, messages=request.messages)
        turn = place.turn
        added = await render_observation(context, request, turn.num_messages, turn.is_closed)
        known = place.stream.messages[: turn.num_messages]
        return Plan(
            prompt_ids=place.token_ids + added,
            messages=known + request.messages[turn.num_messages :],
        )

    def _room(self, plan: Plan, extends: Stream | None) -> int:
        """Tokens that may follow, at least one; LimitError when there is no room for any."""
        config, length = self.loop.config, len(plan.prompt_ids)
        reason: Termination
        if extends:
            before = self.loop.room(extends.trajectory)
            room = before - (length - len(extends.trajectory.token_ids))
            reason = "observation_too_long" if before > 0 else "response_length"
        else:
            room, reason = self.loop.room(Trajectory(prompt_ids=plan.prompt_ids)), "prompt_too_long"
            # A later prompt holds history, for which there is rollout.response_length.
            if not self._streams and length > config.data.max_prompt_length:
                room = 0
        if room > 0:
            return room
        raise LimitError(
            reason,
            f"the messages are {length} tokens long, and no turn fits behind them: "
            f"data.max_prompt_length={config.data.max_prompt_length}, "
            f"rollout.response_length={config.rollout.response_length}",
        )

    async def _sample(self, request: ChatRequest, plan: Plan, room: int) -> list[Sample]:
        limits = (room, self.loop.config.rollout.multi_turn.max_tokens_per_turn, request.limit)
        params = {**self._params, "max_tokens": min(x for x in limits if x is not None)}
        if (seed := params.get("seed", request.seed)) is not None:
            prompt = derive_seed(*plan.prompt_ids)
            if request.seed is None:
                params["seed"] = derive_seed(seed, prompt, self._num_samples[prompt])
                self._num_samples[prompt] += 1
            else:
                params["seed"] = derive_seed(seed, prompt, "client", request.seed)
        loop = self.loop
        return await sample_choices(loop.context, request, loop.request_id, plan.prompt_ids, params)

    def _commit(
        self,
        request: ChatRequest,
        plan: Plan,
        sample: Sample,
        reason: Termination,
        extends: Stream | None,
    ) -> None:
        """Append what was sampled to the stream that it extends, or begin one with it."""
        if extends:
            stream, trajectory = extends, extends.trajectory
            self._streams.remove(stream)
            _record_results(trajectory, plan.messages[stream.turns[-1].num_messages - 1 :])
            trajectory.append_observation(plan.prompt_ids[len(trajectory.token_ids) :])
        else:
            trajectory = Trajectory(prompt_ids=plan.prompt_ids)
            stream = Stream(trajectory=trajectory, tools=request.tools)
        self._streams.append(stream)
        trajectory.append_sampled(sample.output)
        count_output(trajectory, sample.output, sample.seconds)
        stream.messages = [*plan.messages, answer_message(sample.choice)]
        trajectory.messages = for_template(stream.messages)
        stream.refused = None
        stream.turns.append(
            Turn(
                num_messages=len(stream.messages),
                num_tokens=len(trajectory.token_ids),
                is_closed=sample.output.token_ids[-1] in self.loop.chat.stop_token_ids,
                reason=reason,
            )
        )
        self.loop.trajectories[:] = [stream.trajectory for stream in self._streams]

    def _refuse(self, reason: Termination, extends: Stream | None) -> None:
        """Remember what a trajectory ends for, should the client give up."""
        self.limit = reason
        if not self._streams:
            self.loop.trajectories[:] = [Trajectory(prompt_ids=[], termination=reason)]
        elif reason == "max_assistant_turns":
            self._streams[-1].refused = reason
        elif extends:
            extends.refused = reason


async def _without_exit(agent: Coroutine[Any, Any, Any]) -> Any:
    """What the agent returns. Out of a task SystemExit ends the program, whoever awaits that."""
    try:
        return await agent
    except SystemExit as error:
        raise RuntimeError(f"the agent raised {error!r}") from error


@contextmanager
def _extending(stream: Stream | None) -> Iterator[None]:
    """Let no other request extend it."""
    if stream is None:
        yield
        return
    stream.is_busy = True
    try:
        yield
    finally:
        stream.is_busy = False


def _reason(sample: Sample, room: int) -> Termination:
    """What a trajectory ends for whose last turn this is."""
    if sample.output.finish_reason != "length":
        return "stop"
    return "response_length" if len(sample.output.token_ids) == room else "turn_length"


def _record_results(trajectory: Trajectory, messages: list[Message]) -> None:
    """The tool calls of the last turn, `messages[0]`, that the client has run."""
    results = [message for message in messages[1:] if message.role == "tool"]
    by_id = {message.tool_call_id: message.text for message in results}
    for number, call in enumerate(messages[0].tool_calls or []):
        if (result := by_id.get(call.id)) is None:  # the client gave it an id of its own
            if number >= len(results):
                continue
            result = results[number].text
        record = ToolCallRecord(
            turn=trajectory.num_turns - 1,
            name=call.function.name,
            arguments=str(call.function.arguments),
            result=result,
            status="ok",
        )
        trajectory.tool_calls.append(record)


def _has_ended() -> ApiError:
    return ApiError("the trajectory has ended", code="trajectory_ended")
