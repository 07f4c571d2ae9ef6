"""`batch`: one call of the reward function for many trajectories."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minirl.config import BatchRewardConfig, CustomRewardConfig
from minirl.rewards.functions import require_custom
from minirl.rewards.managers import REWARD_MANAGERS, record_score, score_arguments
from minirl.types import Trajectory
from minirl.waits import WAITS


@dataclass(slots=True, eq=False)
class _Item:
    arguments: tuple[str, str, Any, dict[str, Any]]
    result: Any = None
    error: Exception | None = None
    is_scored: bool = False


@REWARD_MANAGERS.register("batch")
class BatchRewardManager:
    """Calls the reward function with lists, as verl does:

        compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list of results

    where a result is what `naive` takes. A whole step is never ready at once, since rewards are
    computed while other trajectories still run; so a call takes what is: everything that came in
    while the call before it ran, or within reward.batch.max_delay_s, up to reward.batch.max_size.
    Calls do not overlap. When one raises, all its trajectories fail.
    """

    def __init__(
        self,
        compute_score: Any,
        *,
        custom_reward_function: CustomRewardConfig | None,
        batch: BatchRewardConfig | None = None,
    ) -> None:
        require_custom(custom_reward_function, "batch")
        self.compute_score = compute_score
        self.batch = batch or BatchRewardConfig()
        self._waiting: list[_Item] = []
        self._turn = asyncio.Lock()

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None:
        """Score `solution_str` in the next call, which the first of its trajectories makes.

        Raises:
            RuntimeError: the reward function raised, or did not return one result each.
            ValueError: it returned no finite score for this one.
        """
        item = _Item(score_arguments(trajectory, row, solution_str))
        self._waiting.append(item)
        try:
            with WAITS.on("reward: the batch before its own"):
                await self._turn.acquire()  # in the order of arrival
            try:
                if not item.is_scored:
                    await self._score_next()
            finally:
                self._turn.release()
        finally:
            self._waiting.remove(item)
        if item.error is not None:
            raise RuntimeError(f"the reward function failed on a batch: {item.error}") from (
                item.error
            )
        record_score(trajectory, item.result)

    async def _score_next(self) -> None:
        """One call. A cancelled one leaves its items to the next."""
        if len(self._waiting) < self.batch.max_size:
            await asyncio.sleep(self.batch.max_delay_s)
        items = self._waiting[: self.batch.max_size]  # the scored ones before them are gone
        columns = map(list, zip(*(item.arguments for item in items), strict=True))
        try:
            with WAITS.on(f"reward: the function, on a batch of {len(items)}"):
                results = _one_each(await self.compute_score(*columns), len(items))
        except Exception as error:  # of user code: the failure of all these trajectories
            for item in items:
                item.error, item.is_scored = error, True
        else:
            for item, result in zip(items, results, strict=True):
                item.result, item.is_scored = result, True


def _one_each(results: Any, count: int) -> list[Any]:
    """The results as a list; arrays will do, mappings and texts will not."""
    if isinstance(results, Mapping | str) or not hasattr(results, "__len__"):
        raise TypeError(f"it returned {results!r}; expected a list of {count} results")
    if len(results) != count:
        raise ValueError(f"it returned {len(results)} results for {count} trajectories")
    return list(results)
