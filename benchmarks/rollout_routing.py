"""How much of a prompt the engine has in its prefix cache, by the number of engines.

A conversation's next turn is cheap on the engine that served the last one, and so is the prompt of
a group where another of its samples has been. Two engines should find as much as one.
"""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from minirl.rollout.client import AsyncLLMServerManager, RoutingStats
from minirl.types import TokenOutput

BLOCK = 16
"""Tokens of a block, the unit in which engines cache."""


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

    def _num_cached(self, token_ids: Sequence[int]) -> int:
        """Never all of it: the last token has to be computed to sample the next."""
        ends = range(BLOCK, len(token_ids), BLOCK)
        return max((end for end in ends if tuple(token_ids[:end]) in self._blocks), default=0)

    def _compute(self, token_ids: Sequence[int]) -> None:
        self._blocks |= {tuple(token_ids[:end]) for end in range(BLOCK, len(token_ids) + 1, BLOCK)}


async def converse(
    num_servers: int,
    *,
    num_prompts: int,
    n: int,
    num_turns: int,
    prompt_length: int = 200,
    sticky_imbalance: float = 4.0,
) -> RoutingStats:
    """`n` conversations about each of the prompts, all at once, through the router."""
    router = AsyncLLMServerManager(
        [CachingServer(i) for i in range(num_servers)],
        max_sticky_sessions=10_000,
        sticky_imbalance=sticky_imbalance,
    )
    random = Random(0)
    system = [random.randrange(1000) for _ in range(100)]

    async def conversation(name: str, prompt_ids: list[int], seed: int) -> None:
        random = Random(seed)
        for _ in range(num_turns):
            output = await router.generate(
                name, prompt_ids=prompt_ids, sampling_params={"max_tokens": 128}
            )
            observation = [random.randrange(1000) for _ in range(random.randrange(10, 60))]
            prompt_ids = [*prompt_ids, *output.token_ids, *observation]

    async with asyncio.TaskGroup() as group:
        for i in range(num_prompts):
            prompt = system + [random.randrange(1000) for _ in range(prompt_length)]
            for k in range(n):
                group.create_task(conversation(f"{i}/{k}", prompt, i * n + k))
    return router.stats
