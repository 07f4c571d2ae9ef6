"""Conversations over several engines, and engines that only model a prefix cache.

A conversation's next turn is cheap on the engine that served the last one, and so is the prompt of
a group where another of its samples has been. Two engines should find as much as one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from minirl.rollout.client import AsyncLLMServerManager, RoutingStats
from minirl.types import TokenOutput

BLOCK = 16
"""Tokens of a block, the unit in which engines cache."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`n` conversations about each of `num_prompts` prompts, all at once."""

    num_prompts: int
    n: int
    num_turns: int
    prompt_length: int = 200
    """Tokens of a prompt's own, behind those that all prompts begin with."""
    system_length: int = 100
    observation: tuple[int, int] = (10, 60)
    """Fewest and most tokens between two turns."""
    tool_s: float = 0.0
    """The longest time between two turns."""
    vocabulary: int = 1000
    sampling_params: tuple[tuple[str, Any], ...] = (("max_tokens", 128),)


class CachingServer:
    """Samples random tokens, and has a prefix cache of its own that forgets nothing."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._blocks: set[tuple[int, ...]] = set()
        """Every prefix of whole blocks that was computed."""

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """As AsyncServerBase.generate; takes as many turns of the event loop as tokens."""
        num_cached = self._num_cached(prompt_ids)
        self._compute(prompt_ids)
        sampled = self._random.randrange(sampling_params["max_tokens"] // 2) + 1
        token_ids = [self._random.randrange(1000) for _ in range(sampled)]
        for _ in token_ids:
            await asyncio.sleep(0)
        self._compute([*prompt_ids, *token_ids[:-1]])  # the last one was never an input
        return TokenOutput(
            token_ids=token_ids,
            logprobs=[0.0] * sampled,
            finish_reason="stop",
            num_cached_tokens=num_cached,
        )

    async def forget(self) -> None:
        """Empty the cache."""
        self._blocks.clear()

    def _num_cached(self, token_ids: Sequence[int]) -> int:
        """Never all of it: the last token has to be computed to sample the next."""
        ends = range(BLOCK, len(token_ids), BLOCK)
        return max((end for end in ends if tuple(token_ids[:end]) in self._blocks), default=0)

    def _compute(self, token_ids: Sequence[int]) -> None:
        self._blocks |= {tuple(token_ids[:end]) for end in range(BLOCK, len(token_ids) + 1, BLOCK)}


async def hold(router: AsyncLLMServerManager, workload: Workload) -> list[list[TokenOutput]]:
    """Hold all conversations; by conversation, what was sampled in each turn."""
    random = Random(0)
    draw = range(workload.vocabulary)
    system = random.choices(draw, k=workload.system_length)

    async def conversation(name: str, prompt_ids: list[int], seed: int) -> list[TokenOutput]:
        random, outputs = Random(seed), []
        for turn in range(workload.num_turns):
            if turn:
                await asyncio.sleep(random.uniform(0, workload.tool_s))
            params = dict(workload.sampling_params)
            output = await router.generate(name, prompt_ids=prompt_ids, sampling_params=params)
            outputs.append(output)
            observation = random.choices(draw, k=random.randint(*workload.observation))
            prompt_ids = [*prompt_ids, *output.token_ids, *observation]
        return outputs

    async with asyncio.TaskGroup() as group:
        tasks = []
        for i in range(workload.num_prompts):
            prompt = system + random.choices(draw, k=workload.prompt_length)
            for k in range(workload.n):
                seed = i * workload.n + k
                tasks.append(group.create_task(conversation(f"{i}/{k}", prompt, seed)))
    return [task.result() for task in tasks]


async def converse(
    num_servers: int, workload: Workload, *, sticky_imbalance: float = 4.0
) -> RoutingStats:
    """The workload through the router over engines that model a cache."""
    router = AsyncLLMServerManager(
        [CachingServer(i) for i in range(num_servers)],
        max_sticky_sessions=10_000,
        sticky_imbalance=sticky_imbalance,
    )
    await hold(router, workload)
    return router.stats
