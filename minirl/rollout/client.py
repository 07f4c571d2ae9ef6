"""Routing: which server gets a conversation's next turn."""

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from minirl.rollout.server import EngineLostError
from minirl.types import TokenOutput
from minirl.waits import WAITS

JOIN = 16
"""Conversations more than elsewhere for which one still begins where its prompt is cached: about so
many more an engine decodes at the price of one, and as many are the samples of most groups."""


class Generator(Protocol):
    """What routing needs of a server."""

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput: ...


@dataclass
class RoutingStats:
    """Counted since the start of a rollout."""

    num_moves: int = 0
    """Turns that left the server of their conversation because it was overloaded."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that a prefix cache held."""
    generated_tokens: int = 0
    num_preempted: int = 0
    requests_per_server: dict[int, int] = field(default_factory=dict)

    def add(self, other: "RoutingStats") -> None:
        """Count what another router has counted too."""
        self.num_moves += other.num_moves
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generated_tokens += other.generated_tokens
        self.num_preempted += other.num_preempted
        for server, number in other.requests_per_server.items():
            self.requests_per_server[server] = self.requests_per_server.get(server, 0) + number

    @property
    def cache_hit_rate(self) -> float:
        """cached_tokens / prompt_tokens."""
        return self.cached_tokens / max(self.prompt_tokens, 1)


class AsyncLLMServerManager:
    """Sends the first turn of a conversation to the least loaded server, later ones to the same.

    A conversation that begins with the prompt of another, as the samples of a group do, joins it
    unless that server has the load of JOIN conversations more than the least loaded one.

    Load is counted in tokens in flight (prompt + what may be generated). A conversation leaves its
    server, whose prefix cache holds it, only when that carries more than `sticky_imbalance` times
    the load of the least loaded one. A server that is lost is taken out and its loss is raised.

    Of several routers over the same servers each knows its own load only; `first_server` differs
    between them, so that not all begin at the same one.
    """

    def __init__(
        self,
        servers: Sequence[Generator],
        *,
        max_sticky_sessions: int,
        sticky_imbalance: float,
        first_server: int = 0,
    ) -> None:
        self._servers = dict(enumerate(servers))
        self._load = dict.fromkeys(self._servers, 0)
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._homes: dict[int, int] = {}
        """By hash of a first prompt, the server that has it in its prefix cache."""
        self._max_sessions = max_sticky_sessions
        self._imbalance = sticky_imbalance
        # the server that a conversation was last given to
        self._last = (first_server - 1) % len(self._servers)
        self._ids = itertools.count()
        self.stats = RoutingStats()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """One turn of the conversation `request_id`."""
        tokens = len(prompt_ids) + sampling_params.get("max_tokens", 0)
        index = self._route(request_id, prompt_ids, tokens)
        self._load[index] += tokens
        start = time.perf_counter()
        try:
            with WAITS.on(f"generation on engine {index}"):
                output = await self._servers[index].generate(
                    prompt_ids, sampling_params, f"{request_id}#{next(self._ids)}"
                )
        except EngineLostError:
            self._servers.pop(index, None)
            raise
        finally:
            self._load[index] -= tokens
        self._count(index, len(prompt_ids), output)
        end = time.perf_counter()
        return msgspec.structs.replace(output, server=index, start=start, end=end)

    def forget_conversations(self) -> None:
        """None of them goes on."""
        self._sessions.clear()
        self._homes.clear()

    def _route(self, request_id: str, prompt_ids: list[int], tokens: int) -> int:
        if not self._servers:
            raise EngineLostError("no inference server is left")
        if request_id in self._sessions:
            index = self._stay_or_move(self._sessions[request_id], tokens)
        else:
            prompt = hash(tuple(prompt_ids))
            index = self._least_loaded(self._homes.get(prompt), JOIN * tokens)
            self._last = self._homes[prompt] = index
        self._sessions[request_id] = index
        self._sessions.move_to_end(request_id)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return index

    def _stay_or_move(self, index: int, tokens: int) -> int:
        least = self._least_loaded()
        overload = self._imbalance * max(self._load[least], tokens)
        if index in self._servers and self._load[index] <= overload:
            return index
        self.stats.num_moves += index in self._servers
        return least

    def _least_loaded(self, home: int | None = None, bonus: int = 0) -> int:
        """The server with the least load, of which `home` may have `bonus` more than others.

        Ties go round robin: to the next one after the server that got the last conversation.
        """
        return min(
            self._servers,
            key=lambda i: (self._load[i] - bonus * (i == home), i <= self._last, i),
        )

    def _count(self, index: int, num_prompt_tokens: int, output: TokenOutput) -> None:
        stats = self.stats
        stats.prompt_tokens += num_prompt_tokens
        stats.cached_tokens += output.num_cached_tokens
        stats.generated_tokens += len(output.token_ids)
        stats.num_preempted += output.num_preempted
        stats.requests_per_server[index] = stats.requests_per_server.get(index, 0) + 1
