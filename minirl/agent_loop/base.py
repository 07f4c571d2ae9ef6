"""What an agent loop is made of: an engine (no more than an async `generate`), a chat, tools."""

import hashlib
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from minirl.agent_loop.tool_parser import TOOL_PARSERS, ToolParser
from minirl.config import Config, ConfigError
from minirl.entries import load_entries
from minirl.registry import Registry, locate, nearest, option_names, require_methods
from minirl.tools.base import BaseTool, ToolCall
from minirl.tools.session import ToolSession
from minirl.tools.threads import off_loop
from minirl.tools.truncate import split_kept
from minirl.types import Termination, TokenOutput, Trajectory

if TYPE_CHECKING:
    from minirl.agent_loop.interaction import Interaction
    from minirl.chat import ChatBuilder

AgentLoopOutput = Trajectory
"""What an agent loop returns."""

Messages = list[dict[str, Any]]


class ServerError(Exception):
    """The engine failed. Not a failure of user code: it ends the run, never just a trajectory."""


class Server(Protocol):
    """All that an agent loop knows about engines."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Sample one turn; `request_id` is the conversation's, the parameters have vLLM's names."""
        ...


class Endpoint(Protocol):
    """The policy for whoever speaks OpenAI's protocol: minirl.openai.endpoint.PolicyEndpoint."""

    async def access(self, trajectory: str = "") -> Any: ...
    def serving(self, conversation: Any) -> AbstractAsyncContextManager[Any]: ...
    async def aclose(self) -> None: ...


@dataclass(kw_only=True)
class AgentLoopContext:
    """What all agent loops of a run share; ConfigError when a setting names what does not exist."""

    server: Server
    tokenizer: Any
    chat: "ChatBuilder"
    tools: Mapping[str, BaseTool]
    config: Config
    agent_loops: "Mapping[str, AgentLoopFactory]" = field(default_factory=dict)
    """From rollout.agent.agent_loop_config_path, beside the registered ones."""
    interactions: "Mapping[str, Interaction]" = field(default_factory=dict)
    """From rollout.multi_turn.interaction_config_path."""
    endpoint: "Endpoint" = field(init=False)
    """The policy for whoever speaks OpenAI's protocol; set by what makes the context."""
    parser: ToolParser = field(init=False)
    stop_when: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        settings = self.config.rollout.multi_turn
        try:
            self.parser = TOOL_PARSERS.find(settings.format)()
        except ValueError as error:
            raise ConfigError(f"rollout.multi_turn.format: {error}") from error
        self.stop_when = re.compile(settings.stop_when) if settings.stop_when else None


class AgentLoopBase(ABC):
    """One conversation. Subclass it, write `run`, and decorate the class with `@register(name)`.

    An object is made per trajectory, so `self` may hold the state of the conversation. Options of
    a subclass are keyword-only parameters of its `__init__`; it calls `super().__init__(context)`.
    """

    def __init__(self, context: AgentLoopContext) -> None:
        self.context = context
        self.server = context.server
        self.tokenizer = context.tokenizer
        self.chat = context.chat
        self.tools = context.tools
        self.config = context.config
        self.request_id = uuid.uuid4().hex
        """Names the conversation to the engines, so that its turns meet their prefix cache."""
        self.trajectories: list[Trajectory] = []
        """Everything that `start` made."""

    @classmethod  # noqa: B027
    def check_options(cls, **options: Any) -> None:
        """ValueError for options that cannot be used; called before a run starts."""

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Hold the conversation of one dataset row (`raw_prompt` is its message list).

        Every trajectory returned has been finished. An exception ends this conversation only.
        """

    async def start(
        self, messages: Messages, tools: list[dict[str, Any]] | None = None
    ) -> Trajectory:
        """Begin a trajectory with the tokens of `messages`; `tools` are schemas for the template.

        A prompt longer than data.max_prompt_length is cut, or ends the trajectory at once
        (`prompt_too_long`), by data.truncation.
        """
        size = sum(len(str(m.get("content"))) for m in messages)
        prompt_ids = await off_loop(size, self.chat.prompt, messages, tools or None)
        data = self.config.data
        if len(prompt_ids) > data.max_prompt_length and data.truncation != "error":
            head, tail = split_kept(prompt_ids, data.max_prompt_length, data.truncation)
            prompt_ids = head + tail
        trajectory = Trajectory(prompt_ids=prompt_ids, messages=list(messages))
        self.trajectories.append(trajectory)
        if len(prompt_ids) > data.max_prompt_length or self.room(trajectory) <= 0:
            self.finish(trajectory, "prompt_too_long")
        return trajectory

    async def generate(self, trajectory: Trajectory, sampling_params: Mapping[str, Any]) -> str:
        """Sample a turn, append it, and return its text (without end-of-turn tokens).

        A turn that was cut or aborted ends the trajectory. When the trajectory has ended already,
        this does nothing and returns "".
        """
        room = self.room(trajectory)
        if trajectory.termination is None and room <= 0:
            self.finish(trajectory, "response_length")
        if trajectory.termination is not None:
            return ""
        params = self._turn_params(trajectory, sampling_params, room)
        start = time.perf_counter()
        output = await self.server.generate(
            self.request_id, prompt_ids=trajectory.token_ids, sampling_params=params
        )
        count_output(trajectory, output, time.perf_counter() - start)
        if output.token_ids:  # an abort may come before the first one
            trajectory.append_sampled(output)
        if output.finish_reason == "abort":
            self.finish(trajectory, "aborted")
        elif output.finish_reason == "length":
            cut_by_room = params["max_tokens"] == room
            self.finish(trajectory, "response_length" if cut_by_room else "turn_length")
        text = await off_loop(len(output.token_ids), self.chat.decode, output.token_ids)
        if output.token_ids:
            trajectory.messages.append({"role": "assistant", "content": text})
        return text

    def parse_tool_calls(self, text: str) -> list[ToolCall]:
        """The calls in a turn's text, in their order; malformed ones carry a `problem`."""
        schemas = {name: tool.parameters_schema for name, tool in self.tools.items()}
        return self.context.parser.parse(text, schemas).calls

    def reason_to_stop(
        self, trajectory: Trajectory, text: str, calls: list[ToolCall]
    ) -> Termination | None:
        """Why the turn just sampled is the last one; None when its calls are to be run."""
        num_run = sum(record.status != "not_run" for record in trajectory.tool_calls)
        if trajectory.termination is not None:
            return trajectory.termination
        if not calls or self._is_final(text):
            return "stop"
        if reason := self.limit_reached(trajectory):
            return reason
        if is_reached(num_run, self.config.rollout.multi_turn.max_tool_calls):
            return "max_tool_calls"
        return None

    def _is_final(self, text: str) -> bool:
        """Whether a turn ends the conversation by rollout.multi_turn.stop_when."""
        stop_when = self.context.stop_when
        return stop_when is not None and stop_when.search(text) is not None

    def limit_reached(self, trajectory: Trajectory) -> Termination | None:
        """The limit of turns that forbids another observation; None when there may be one."""
        limits = self.config.rollout.multi_turn
        if is_reached(trajectory.num_turns, limits.max_assistant_turns):
            return "max_assistant_turns"
        if is_reached(trajectory.num_turns - 1, limits.max_user_turns):
            return "max_user_turns"
        return None

    def tool_session(self, row: Mapping[str, Any]) -> ToolSession:
        """The tools of one row, to be used with `async with`.

        `extra_info.tool_selection` limits them, `extra_info.tools_kwargs` holds their arguments.
        """
        return ToolSession(
            selected_tools(row, self.tools),
            self.config.rollout.multi_turn,
            self.tokenizer,
            (row.get("extra_info") or {}).get("tools_kwargs"),
        )

    async def append_observation(
        self, trajectory: Trajectory, messages: Messages, tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Append tool or user messages and the start of the next turn, and return True.

        When the trajectory has ended already, append nothing and return False; so too when no token
        would be left for that turn, which ends it (`observation_too_long`).
        """
        if trajectory.termination is not None:
            return False
        size = sum(len(str(m.get("content"))) for m in messages)
        token_ids = await off_loop(size, self.chat.observation, messages, tools or None)
        if len(token_ids) >= self.room(trajectory):
            self.finish(trajectory, "observation_too_long")
            return False
        trajectory.append_observation(token_ids)
        trajectory.messages += messages
        return True

    def finish(self, trajectory: Trajectory, reason: Termination) -> Trajectory:
        """End the trajectory, unless it has ended already, and return it.

        An observation that no turn followed is taken back: the policy's tokens are the last ones.
        """
        if trajectory.termination is None:
            trajectory.termination = reason
            trim(trajectory)
        return trajectory

    def room(self, trajectory: Trajectory) -> int:
        """Tokens that may still follow."""
        return min(
            self.config.rollout.response_length - len(trajectory.response_ids),
            self.config.max_model_len - len(trajectory.prompt_ids) - len(trajectory.response_ids),
        )

    def _turn_params(
        self, trajectory: Trajectory, given: Mapping[str, Any], room: int
    ) -> dict[str, Any]:
        limits = (room, self.config.rollout.multi_turn.max_tokens_per_turn, given.get("max_tokens"))
        params = {
            **given,
            "max_tokens": min(limit for limit in limits if limit is not None),
            "stop_token_ids": list(self.chat.stop_token_ids),
        }
        if given.get("seed") is not None:
            index = next(i for i, t in enumerate(self.trajectories) if t is trajectory)
            params["seed"] = derive_seed(given["seed"], index, trajectory.num_turns)
        return params


AgentLoopFactory = Callable[[AgentLoopContext], AgentLoopBase]

AGENT_LOOPS: Registry[AgentLoopFactory] = Registry("agent loop")

register = AGENT_LOOPS.register


def load_agent_loops(path: str | Path) -> dict[str, AgentLoopFactory]:
    """What makes agent loops of a context, by name, from a YAML list `{name, _target_, **options}`.

    ConfigError names the file, the entry, and what is wrong with it.
    """
    return load_entries(path, "", _agent_loop)


def selected_tools(row: Mapping[str, Any], tools: Mapping[str, BaseTool]) -> dict[str, BaseTool]:
    """Those that a row may call; ValueError when it selects one that is not there."""
    selection = (row.get("extra_info") or {}).get("tool_selection")
    names = list(tools if selection is None else selection)
    for name in names:
        if name not in tools:
            raise ValueError(f"extra_info.tool_selection: no tool {name!r}{nearest(name, tools)}")
    return {name: tools[name] for name in names}


def require_agent_loop(named: str, found: Any) -> None:
    """ValueError for what is no class of agent loops, or lacks a method."""
    if not (isinstance(found, type) and issubclass(found, AgentLoopBase)):
        raise ValueError(f"{named} is not a subclass of AgentLoopBase")
    require_methods(found)


def derive_seed(*parts: int | str) -> int:
    """A seed of 31 bits that depends on all parts and their order, the same in every process."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFF_FFFF


def trim(trajectory: Trajectory) -> None:
    """Take back an observation at the end of the response."""
    end = trajectory.turn_ends[-1] if trajectory.turn_ends else 0
    for values in (
        trajectory.response_ids,
        trajectory.response_mask,
        trajectory.response_logprobs,
    ):
        del values[end:]
    messages = trajectory.messages
    while trajectory.turn_ends and messages and messages[-1]["role"] != "assistant":
        messages.pop()


def _agent_loop(entry: dict[str, Any]) -> Iterator[tuple[str, AgentLoopFactory]]:
    options = dict(entry)
    name, target = options.pop("name", None), options.pop("_target_", None)
    if not isinstance(name, str) or not isinstance(target, str):
        raise ValueError("needs `name` and `_target_: package.module:Class`")
    found = locate(target, "agent loop")
    require_agent_loop(f"_target_: {target!r}", found)
    known = option_names(found)
    for key in options.keys() - known:
        raise ValueError(f"{key}: {target} has no such option{nearest(str(key), known)}")
    found.check_options(**options)
    yield name, partial(found, **options)


def is_reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def count_output(trajectory: Trajectory, output: TokenOutput, seconds: float) -> None:
    for key, value in (
        ("generate_s", seconds),
        ("num_cached_tokens", output.num_cached_tokens),
        ("num_preempted", output.num_preempted),
    ):
        trajectory.metrics[key] = trajectory.metrics.get(key, 0.0) + value
