"""The section `reward`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from minirl.config.checks import positive, require


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig:
    """A user's reward function."""

    path: str = ""
    """A Python file or an importable module."""
    name: str = "compute_score"
    """The function in it."""


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft punishment of responses that come near rollout.response_length."""

    len: int = 256
    """Tokens before the limit in which the penalty grows from 0."""
    penalty_factor: float = 1.0
    """Penalty at the limit."""

    def __post_init__(self) -> None:
        positive("reward.overlong_buffer", self, "len", "penalty_factor")


@dataclass(frozen=True, kw_only=True)
class BatchRewardConfig:
    """How trajectories are gathered for one call of the reward function."""

    max_size: int = 256
    """Trajectories per call."""
    max_delay_s: float = 0.05
    """Seconds that the first of a call waits for others."""

    def __post_init__(self) -> None:
        positive("reward.batch", self, "max_size")
        require(self.max_delay_s >= 0, "reward.batch.max_delay_s", self.max_delay_s, ">= 0")


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    """The processes in which a reward function runs."""

    num_processes: int = 4
    """Trajectories that are scored at once; each process is started when it is needed first."""
    timeout_s: float = 30.0
    """Seconds that one trajectory may take; then its process is killed and its reward is 0."""

    def __post_init__(self) -> None:
        positive("reward.pool", self, "num_processes", "timeout_s")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """From a trajectory to its reward."""

    reward_manager: str = "naive"
    """naive, dapo, batch, prime, or `package.module:Class`."""
    custom_reward_function: CustomRewardConfig | None = None
    """null = by the row's data_source."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward function, e.g. `format_score`."""
    tool_reward: Literal["turn", "outcome", "log"] = "turn"
    """Where rewards of tools go: on the last token of the turn, into the outcome, or nowhere."""
    overlong_buffer: OverlongBufferConfig | None = None
    """For `reward_manager: dapo`; null = no penalty."""
    batch: BatchRewardConfig | None = None
    """For `reward_manager: batch`; null = the defaults."""
    pool: RewardPoolConfig | None = None
    """For `reward_manager: prime`; null = the defaults."""
