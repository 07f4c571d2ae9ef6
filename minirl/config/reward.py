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
    """Trajectories that are scored at once, for each process that runs agent loops; a process is
    started when it is needed first."""
    timeout_s: float = 30.0
    """Seconds that one trajectory may take; then its process is killed and its reward is 0."""

    def __post_init__(self) -> None:
        positive("reward.pool", self, "num_processes", "timeout_s")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A model with one output that scores whole conversations. It is sharded over the ranks like
    the policy, and frozen."""

    path: str = ""
    """A folder or hub name of AutoModelForSequenceClassification or AutoModelForTokenClassification
    with num_labels=1. The score is read at the last token."""
    combine: Literal["add", "only"] = "add"
    """add: the reward is what the reward function returned + weight * score. only: it is weight *
    score; a reward function is called only if custom_reward_function names one, to be logged."""
    weight: float = 1.0
    """Of the score."""
    input: Literal["auto", "tokens", "messages"] = "auto"
    """What it reads. tokens: the policy's exact tokens. messages: the conversation by the template
    of its own tokenizer, without tool schemas. auto: tokens where tokenizer and template are the
    policy's, else messages."""
    max_length: int | None = None
    """Tokens that it reads of a conversation; null = all."""
    truncation: Literal["left", "right", "middle"] = "left"
    """Which side of a longer conversation is cut away."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens that go through the model at once, per rank; null = those of the actor."""
    param_offload: bool = False
    """Keep its shards in host memory except while it scores (GPU)."""

    def __post_init__(self) -> None:
        key = "reward.reward_model"
        require(bool(self.path), f"{key}.path", self.path, "name a model folder, or write null")
        positive(key, self, "max_length", "max_tokens_per_micro_batch")


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
    reward_model: RewardModelConfig | None = None
    """null = no model scores."""

    def __post_init__(self) -> None:
        require(  # a function with **kwargs would take it, and nothing be punished
            "overlong_buffer_cfg" not in self.reward_kwargs,
            "reward.reward_kwargs.overlong_buffer_cfg",
            self.reward_kwargs.get("overlong_buffer_cfg"),
            "what verl has there is a section here; write "
            "reward.overlong_buffer={len: ..., penalty_factor: ...}",
        )
        if self.is_model_only:
            require(
                self.reward_manager == "naive",
                "reward.reward_manager",
                self.reward_manager,
                "with reward.reward_model.combine=only it has no reward function to call; write "
                "naive, name one in reward.custom_reward_function, or set combine=add",
            )

    @property
    def is_model_only(self) -> bool:
        """Whether no reward function is called at all."""
        replaced = self.reward_model is not None and self.reward_model.combine == "only"
        return replaced and self.custom_reward_function is None

    @property
    def by_data_source(self) -> bool:
        """Whether the row's data_source chooses the reward function."""
        return self.custom_reward_function is None and not self.is_model_only
