"""Reward managers: who calls the reward function, and where its result goes."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, SupportsFloat, TypeGuard

from minirl.config import ConfigError, RewardConfig
from minirl.registry import Registry
from minirl.rewards.functions import RewardFunction, load_reward_function
from minirl.types import Trajectory


class RewardManager(Protocol):
    """Sets `reward` and `reward_breakdown` of a finished trajectory."""

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None: ...


REWARD_MANAGERS: Registry[Callable[[RewardFunction], RewardManager]] = Registry("reward manager")


def load_reward_manager(config: RewardConfig) -> RewardManager:
    """The manager of reward.reward_manager, with its reward function; ConfigError names the key."""
    try:
        manager = REWARD_MANAGERS.find(config.reward_manager)
    except ValueError as error:
        raise ConfigError(f"reward.reward_manager: {error}") from error
    return manager(load_reward_function(config))


@REWARD_MANAGERS.register("naive")
class NaiveRewardManager:
    """Scores each trajectory by itself, as soon as it is finished."""

    def __init__(self, compute_score: RewardFunction) -> None:
        self.compute_score = compute_score

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None:
        """Score `solution_str`, the text of the response, against the row's ground truth.

        Of a mapping, `score` is the reward, `pred` what the solution says in the end, and every
        other number goes into the breakdown.
        ValueError when there is no finite score; what the reward function raises passes through.
        """
        result = await self.compute_score(
            row.get("data_source") or "",
            solution_str,
            (row.get("reward_model") or {}).get("ground_truth"),
            row.get("extra_info") or {},
        )
        details = dict(result) if isinstance(result, Mapping) else {"score": result}
        reward = details.pop("score", None)
        if not _is_number(reward) or not math.isfinite(reward):
            raise ValueError(
                f"the reward function returned {result!r}; expected a finite number, or a mapping "
                "with one as `score`"
            )
        answer = details.pop("pred", None)
        trajectory.answer = None if answer is None else str(answer)
        trajectory.reward = float(reward)
        numbers = {key: float(value) for key, value in details.items() if _is_number(value)}
        trajectory.reward_breakdown.update(numbers)


def token_rewards(
    trajectory: Trajectory, tool_reward: Literal["turn", "outcome", "log"]
) -> list[float]:
    """One reward per response token: the outcome on the last sampled token, 0 elsewhere.

    What tools returned goes on the last token of the turn that called them (`turn`), is added to
    the outcome (`outcome`), or is left out (`log`). ValueError when the trajectory has no reward: a
    failed one does not become a zero.
    """
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.uid!r} has no reward; it cannot be trained on")
    rewards = [0.0] * len(trajectory.response_ids)
    if not trajectory.turn_ends:
        return rewards
    rewards[trajectory.turn_ends[-1] - 1] = trajectory.reward
    if tool_reward == "log":
        return rewards
    for end, reward in zip(trajectory.turn_ends, trajectory.turn_rewards, strict=True):
        rewards[(end if tool_reward == "turn" else trajectory.turn_ends[-1]) - 1] += reward
    return rewards


def _is_number(value: Any) -> TypeGuard[SupportsFloat]:
    """Numbers of Python and numpy, and booleans; not text."""
    return not isinstance(value, str) and hasattr(value, "__float__")
