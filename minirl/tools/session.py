"""The tools of one trajectory, from their first call to their release."""

import asyncio
import contextlib
import logging
import math
import time
import types
import uuid
import weakref
from collections.abc import Coroutine, Generator, Mapping
from typing import Any

import msgspec

from minirl.config import MultiTurnConfig
from minirl.tools.base import BaseTool, ToolCall, ToolError, ToolResponse
from minirl.tools.threads import off_loop
from minirl.tools.truncate import truncate_text
from minirl.types import CallStatus, RewardRecord, ToolCallRecord, Trajectory
from minirl.waits import WAITS

logger = logging.getLogger(__name__)

BLOCKING_S = 0.5
"""A tool that keeps the event loop for longer than this is named in a warning."""
RELEASE_TIMEOUT_S = 10.0
"""Seconds that a release may take; the end of a run waits for it."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    status: CallStatus
    text: str
    reward: float = 0.0
    metrics: dict[str, float] = {}
    seconds: float = 0.0
    start: float | None = None


class ToolSession:
    """Runs the tool calls of one trajectory; `async with` it, so that every tool is released.

    A tool is created at its first call and released exactly once, however the block is left.
    `tools_kwargs` is the row's: `{tool: {create_kwargs, execute_kwargs, calc_reward_kwargs,
    release_kwargs}}`, each optional.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        limits: MultiTurnConfig,
        tokenizer: Any,
        tools_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tools = tools
        self._limits = limits
        self._tokenizer = tokenizer
        self._tools_kwargs = tools_kwargs or {}
        self._id = uuid.uuid4().hex
        """Tells the tools of one server that they serve the same trajectory."""
        self._instances: dict[str, str] = {}
        self._creating = {name: asyncio.Lock() for name in tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, for the prompt."""
        return [tool.tool_schema for tool in self.tools.values()]

    async def __aenter__(self) -> "ToolSession":
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        failures = await _uncancelled(self._release_all()) if self._instances else []
        if failures and error is None:
            raise failures[0]

    async def call(self, trajectory: Trajectory, calls: list[ToolCall]) -> list[dict[str, Any]]:
        """Run the calls of the trajectory's last turn at once; one `tool` message each, in order.

        Whatever goes wrong with a call is told to the model. Records and rewards go into the
        trajectory.
        """
        limit, refusal = self._room(trajectory)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._answer(call, refusal if number >= limit else None))
                for number, call in enumerate(calls)
            ]
        _add(trajectory.metrics, "tool_s", time.perf_counter() - start)
        answers = [task.result() for task in tasks]
        for call, answer in zip(calls, answers, strict=True):
            _record(trajectory, call, answer)
        return [
            {"role": "tool", "name": call.name, "content": answer.text}
            for call, answer in zip(calls, answers, strict=True)
        ]

    async def calc_rewards(self, trajectory: Trajectory) -> None:
        """Ask every tool that was used for its reward of the whole trajectory.

        ValueError when that is not finite; what a tool raises passes through.
        """
        for name, instance in self._instances.items():
            start = time.perf_counter()
            async with asyncio.timeout(self._limits.tool_timeout_s):
                kwargs = self._kwargs(name, "calc_reward")
                with WAITS.on(f"reward of tool {name!r}"):
                    work = self.tools[name].calc_reward(instance, **kwargs)
                    reward = float(await watch_blocking(work, self.tools[name]))
            if not math.isfinite(reward):
                raise ValueError(f"tool {name!r}: calc_reward() returned {reward}")
            key, end = f"tool/{name}", time.perf_counter()
            trajectory.reward_breakdown[key] = reward
            trajectory.rewards.append(RewardRecord(name=key, value=reward, start=start, end=end))

    def _room(self, trajectory: Trajectory) -> tuple[int, str]:
        """How many calls may run now, and what the others are told."""
        per_turn, total = self._limits.max_parallel_calls, self._limits.max_tool_calls
        run = sum(record.status != "not_run" for record in trajectory.tool_calls)
        if total is not None and total - run < per_turn:
            return total - run, f"a conversation may make {total} tool calls"
        return per_turn, f"one turn may make {per_turn} tool calls"

    async def _answer(self, call: ToolCall, refusal: str | None) -> _Answer:
        limits, start = self._limits, time.perf_counter()
        answer = await self._run(call, refusal)
        seconds = time.perf_counter() - start
        text = answer.text.encode("utf-8", "replace").decode()  # no lone surrogates
        length, side = limits.max_tool_response_length, limits.tool_response_truncate_side
        text = await off_loop(len(text), truncate_text, self._tokenizer, text, length, side)
        return msgspec.structs.replace(answer, text=text, seconds=seconds, start=start)

    async def _run(self, call: ToolCall, refusal: str | None) -> _Answer:
        if refusal is not None:
            return _Answer(status="not_run", text=f"Error: this call was not run: {refusal}.")
        if call.problem is not None:
            text = f"Error: this tool call cannot be read: {call.problem}."
            return _Answer(status="malformed", text=text)
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            text = f"Error: there is no tool {call.name!r}. Available tools: {known}."
            return _Answer(status="unknown_tool", text=text)
        try:
            problem = tool.find_problem(call.arguments)
        except Exception as error:  # of a schema with a reference to nowhere
            return _failure(tool, error)
        if problem:
            text = f"Error: the arguments do not fit {call.name!r}: {problem}."
            return _Answer(status="bad_arguments", text=text)
        return await self._execute(tool, call.arguments)

    async def _execute(self, tool: BaseTool, arguments: dict[str, Any]) -> _Answer:
        timeout_s = self._limits.tool_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                instance = await self._instance(tool)
                kwargs = self._kwargs(tool.name, "execute")
                work = tool.execute(instance, arguments, **kwargs)
                with WAITS.on(f"tool {tool.name!r}"):
                    answer = await watch_blocking(work, tool)
            return _ok(answer)
        except ToolError as error:
            return _Answer(status="error", text=f"Error: {error}")
        except BaseException as error:
            if not is_failure(error):
                raise
            if deadline.expired() and isinstance(error, TimeoutError):
                text = f"Error: the tool {tool.name!r} did not answer within {timeout_s:g} s."
                return _Answer(status="timeout", text=text)
            return _failure(tool, error)

    async def _instance(self, tool: BaseTool) -> str:
        async with self._creating[tool.name]:  # calls of one turn share one instance
            if tool.name not in self._instances:
                kwargs = {"instance_id": self._id, **self._kwargs(tool.name, "create")}
                with WAITS.on(f"tool {tool.name!r} to be created"):
                    instance = await watch_blocking(tool.create(**kwargs), tool)
                self._instances[tool.name] = instance
        return self._instances[tool.name]

    async def _release_all(self) -> list[RuntimeError]:
        failures: list[RuntimeError] = []
        while self._instances:
            name, instance = self._instances.popitem()
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    work = self.tools[name].release(instance, **self._kwargs(name, "release"))
                    with WAITS.on(f"tool {name!r} to be released"):
                        await watch_blocking(work, self.tools[name])
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # the others are released all the same
                if _first_time(self.tools[name], "not released"):
                    logger.exception("tool %r could not be released", name)
                failure = RuntimeError(f"tool {name!r} could not be released: {_words(error)}")
                failure.__cause__ = error
                failures.append(failure)
        return failures

    def _kwargs(self, name: str, method: str) -> dict[str, Any]:
        # parquet fills what a row does not have with None
        return (self._tools_kwargs.get(name) or {}).get(f"{method}_kwargs") or {}


@types.coroutine
def watch_blocking(work: Coroutine[Any, Any, Any], tool: BaseTool) -> Generator[Any, Any, Any]:
    """Await `work`; warn, once per tool, when it keeps the event loop for more than BLOCKING_S."""
    value, error = None, None
    blocking = WAITS.blocked_by(f"tool {tool.name!r}")
    while True:
        try:
            with blocking:
                step = work.send(value) if error is None else work.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            seconds = time.monotonic() - blocking.since
            if seconds > BLOCKING_S and _first_time(tool, "blocked"):
                logger.warning(
                    "tool %r blocked the event loop for %.1f s, and with it every conversation; "
                    "run what blocks in `await minirl.tools.threads.run_in_thread(...)`",
                    tool.name,
                    seconds,
                )
        try:
            value, error = (yield step), None
        except BaseException as thrown:  # goes on into `work`, cancellation too
            error = thrown


def _ok(answer: Any) -> _Answer:
    match answer:
        case (ToolResponse() as response, reward, metrics):
            pass
        case _:
            raise TypeError(f"execute() returned {answer!r}, not (ToolResponse, reward, metrics)")
    reward = 0.0 if reward is None else reward
    if not math.isfinite(reward):
        raise ValueError(f"execute() returned the reward {reward}")
    numbers = {key: float(value) for key, value in (metrics or {}).items()}
    return _Answer(status="ok", text=str(response.text), reward=float(reward), metrics=numbers)


def _failure(tool: BaseTool, error: BaseException) -> _Answer:
    if _first_time(tool, "failed"):
        logger.warning("tool %r raised; the model was told so", tool.name, exc_info=error)
    return _Answer(status="error", text=f"Error: the tool {tool.name!r} failed: {_words(error)}")


def _words(error: BaseException) -> str:
    """`KeyError: 'x'`; the type alone where the exception cannot say what it is."""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _record(trajectory: Trajectory, call: ToolCall, answer: _Answer) -> None:
    trajectory.turn_rewards[-1] += answer.reward
    for key, value in answer.metrics.items():
        _add(trajectory.metrics, f"tool/{call.name}/{key}", value)
    trajectory.tool_calls.append(
        ToolCallRecord(
            turn=trajectory.num_turns - 1,
            name=call.name,
            arguments=call.text,
            result=answer.text,
            status=answer.status,
            reward=answer.reward,
            seconds=answer.seconds,
            start=answer.start,
        )
    )


def _add(metrics: dict[str, float], key: str, value: float) -> None:
    metrics[key] = metrics.get(key, 0.0) + value


async def _uncancelled(work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work` to its end; a cancellation meanwhile takes effect after it."""
    task = asyncio.ensure_future(work)
    cancellation = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
    return task.result()


def is_failure(error: BaseException) -> bool:
    """Whether user code has failed: sys.exit(), what extensions raise (pyo3's PanicException is no
    Exception) and a cancellation of its own end no more than itself; Ctrl-C does."""
    if isinstance(error, asyncio.CancelledError):
        return not cancelled_from_outside()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def cancelled_from_outside() -> bool:
    """False for a CancelledError that user code raised by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_warned: weakref.WeakKeyDictionary[BaseTool, set[str]] = weakref.WeakKeyDictionary()


def _first_time(tool: BaseTool, what: str) -> bool:
    """True once per tool and kind of event: a log of thousands of equal lines helps nobody."""
    seen = _warned.setdefault(tool, set())
    new = what not in seen
    seen.add(what)
    return new
