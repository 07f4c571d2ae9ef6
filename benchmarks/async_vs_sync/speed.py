"""How fast the engine is, beside the rollouts that are compared with it."""

import asyncio
import itertools
import time
from itertools import pairwise
from statistics import median

from benchmarks.async_vs_sync.bound import EngineSpeed
from minirl.rollout.server import ServerClient

SALTS = itertools.count()
"""Numbers that make a prompt unlike all others, so that no prefix cache helps."""
SHORT, LONG, TOKENS = 8, 256, 32
LEAST_S = 1e-6
"""What a difference of two times is at least, where an engine takes next to none."""
Burst = tuple[int, int, int]
"""Requests at once, tokens of a prompt, tokens sampled for each."""


class SpeedMeter:
    """Gives the engine requests all at once, in rounds between the rollouts: a machine has faster
    and slower minutes, and both are to have the same. The medians count."""

    def __init__(self, client: ServerClient, largest: int) -> None:
        """Of up to `largest` conversations at once."""
        self._client = client
        self._sizes = [4**power for power in range(largest.bit_length()) if 4**power < largest]
        self._sizes.append(largest)
        self._few, self._many = min(16, largest), min(64, largest)
        bursts = [(size, SHORT, tokens) for size in self._sizes for tokens in (1, TOKENS + 1)]
        self._seconds: dict[Burst, list[float]] = {b: [] for b in [*bursts, (self._few, LONG, 1)]}

    async def warm_up(self) -> None:
        """A round that does not count."""
        for shape in self._seconds:
            await self._burst(*shape)

    async def round(self) -> None:
        """One more."""
        for shape, seconds in self._seconds.items():
            seconds.append(await self._burst(*shape))

    def speed(self) -> EngineSpeed:
        """By the rounds so far, at least one."""
        few, many = self._few, self._many
        step_s = {
            size: self._slope((size, SHORT, TOKENS + 1), (size, SHORT, 1), TOKENS)
            for size in self._sizes
        }
        for size, larger in reversed(list(pairwise(self._sizes))):
            step_s[size] = min(step_s[size], step_s[larger])  # fewer never take longer
        prefill_token_s = self._slope((few, LONG, 1), (few, SHORT, 1), few * (LONG - SHORT))
        request_s = 0.0
        if many > few:
            each = self._slope((many, SHORT, 1), (few, SHORT, 1), many - few)
            in_steps = (step_s[many] - step_s[few]) / (many - few) + SHORT * prefill_token_s
            request_s = max(each - in_steps, 0.0)
        return EngineSpeed(step_s=step_s, prefill_token_s=prefill_token_s, request_s=request_s)

    def _slope(self, more: Burst, less: Burst, by: int) -> float:
        return max(median(self._seconds[more]) - median(self._seconds[less]), LEAST_S) / by

    async def _burst(self, number: int, prompt_tokens: int, tokens: int) -> float:
        """Seconds of so many requests at once."""
        params = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(number):
                salt = next(SALTS)
                prompt = [salt % 250, salt // 250 % 250, salt // 250**2] + [1] * prompt_tokens
                given = prompt[:prompt_tokens], params | {"seed": index}, f"speed-{salt}"
                tasks.create_task(self._client.generate(*given))
        return time.perf_counter() - begun
