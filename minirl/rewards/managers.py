"""Reward managers: who calls the reward function, and where its result goes."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, SupportsFloat, TypeGuard

from minirl.config import OverlongBufferConfig
from minirl.registry import Registry, nearest
from minirl.rewards.functions import RewardFunction
from minirl.types import Trajectory


class RewardManager(Protocol):
    """Sets `reward` and `reward_breakdown` of a finished trajectory."""

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None: ...


REWARD_MANAGERS: Registry[Callable[..., RewardManager]] = Registry("reward manager")
"""Made of a RewardFunction, and of what minirl/rewards/load.py has under the names of their
keyword-only parameters."""


@REWARD_MANAGERS.register("naive")
class NaiveRewardManager:
    """Scores each trajectory by itself, as soon as it is finished."""

    def __init__(self, compute_score: RewardFunction) -> None:
        self.compute_score = compute_score

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None:
        """Score `solution_str`, the text of the response, against the row's ground truth.

        ValueError when there is no finite score; what the reward function raises passes through.
        """
        arguments = score_arguments(trajectory, row, solution_str)
        record_score(trajectory, await self.compute_score(*arguments))


@REWARD_MANAGERS.register("dapo")
class DapoRewardManager(NaiveRewardManager):
    """Scores like `naive` and punishes, softly, what comes near the length limit.

    With the limit L, the buffer b and the factor f, a response of n tokens (all turns and
    observations) is punished by f (n - (L - b)) / b, from 0 at L - b tokens to f at L.

    Paper: Yu et al., DAPO, 2025.
    """

    def __init__(
        self,
        compute_score: RewardFunction,
        *,
        response_length: int,
        overlong_buffer: OverlongBufferConfig | None = None,
    ) -> None:
        super().__init__(compute_score)
        self.response_length = response_length
        self.overlong_buffer = overlong_buffer

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None:
        """As `naive`; the breakdown keeps `score`, before the penalty, and `overlong_reward`."""
        await super().__call__(trajectory, row, solution_str)
        assert trajectory.reward is not None
        trajectory.reward_breakdown["score"] = trajectory.reward
        if buffer := self.overlong_buffer:
            exceeding = len(trajectory.response_ids) - (self.response_length - buffer.len)
            penalty = max(0.0, exceeding / buffer.len * buffer.penalty_factor)
            trajectory.reward_breakdown["overlong_reward"] = -penalty
            trajectory.reward -= penalty


def score_arguments(
    trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
) -> tuple[str, str, Any, dict[str, Any]]:
    """(data_source, solution_str, ground_truth, extra_info) for the reward function.

    extra_info is the row's and three facts of the trajectory: `num_turns` (turns that the policy
    took), `num_tool_calls` (calls that a tool answered: malformed and failed ones do not count) and
    `response_length` (tokens of all turns and observations).
    """
    facts = {
        "num_turns": trajectory.num_turns,
        "num_tool_calls": sum(call.status == "ok" for call in trajectory.tool_calls),
        "response_length": len(trajectory.response_ids),
    }
    ground_truth = (row.get("reward_model") or {}).get("ground_truth")
    extra_info = {**(row.get("extra_info") or {}), **facts}
    return row.get("data_source") or "", solution_str, ground_truth, extra_info


def record_score(trajectory: Trajectory, result: Any) -> None:
    """Set the reward of a trajectory to what the reward function returned.

    Of a mapping, `score` is the reward, `pred` what the solution says in the end, and every other
    number goes into the breakdown. ValueError when there is no finite score, or an `acc`, which
    validation counts as successes, that is none from 0 to 1.
    """
    details = dict(result) if isinstance(result, Mapping) else {"score": result}
    reward = details.pop("score", None)
    if not _is_number(reward) or not math.isfinite(reward):
        raise ValueError(
            f"the reward function returned {result!r}; expected a finite number, or a mapping "
            "with one as `score`"
        )
    answer = details.pop("pred", None)
    numbers = {key: float(value) for key, value in details.items() if _is_number(value)}
    if not 0 <= numbers.get("acc", 0.0) <= 1:
        raise ValueError(f"the reward function returned {result!r}; `acc` must be from 0 to 1")
    if answer is not None:  # a lone surrogate (of the solution's JSON) could not be written
        answer = str(answer).encode("utf-8", "replace").decode()
    trajectory.answer = answer
    trajectory.reward = float(reward)
    trajectory.reward_breakdown.update(numbers)


def reward_number(trajectory: Trajectory, name: str) -> float:
    """`reward`, or the number `name` that the reward function returned beside it.

    Raises ValueError, which names the trajectory, when it has none of that name.
    """
    value = trajectory.reward if name == "reward" else trajectory.reward_breakdown.get(name)
    if value is None:
        known = ["reward", *trajectory.reward_breakdown]
        raise ValueError(
            f"trajectory {trajectory.sample_index} of prompt {trajectory.uid!r} has no reward "
            f"component {name!r}{nearest(name, known)}; the reward function must return it for "
            "every answer"
        )
    return value


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
