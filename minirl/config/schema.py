"""The whole, and what holds between its sections."""

from dataclasses import dataclass, field

from minirl.config.algorithm import AlgorithmConfig
from minirl.config.checks import ConfigError, require
from minirl.config.model import ActorConfig, CriticConfig, DataConfig, ModelConfig, RefConfig
from minirl.config.reward import RewardConfig
from minirl.config.rollout import RolloutConfig
from minirl.config.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig | None = None
    ref: RefConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        require(bool(self.model.path), "model.path", self.model.path, "name a model folder")
        for key, used in (
            ("actor.use_kl_loss", self.actor.use_kl_loss),
            ("algorithm.use_kl_in_reward", self.algorithm.use_kl_in_reward),
        ):
            if used and self.ref is None:
                remedy = f"{key}=true needs a reference policy; write `ref: {{}}`"
                raise ConfigError(f"ref: got null, but {remedy}")
        if check := self.rollout.sync_check:
            require(
                check.probe_length < self.max_model_len,
                "rollout.sync_check.probe_length",
                check.probe_length,
                f"fewer than the {self.max_model_len} tokens that the engine holds",
            )
        sizes = {"actor": self.mini_batch_size}
        if self.critic:
            sizes["critic"] = self.critic.ppo_mini_batch_size or self.mini_batch_size
        for section, mini in sizes.items():
            require(
                self.data.train_batch_size % mini == 0,
                f"{section}.ppo_mini_batch_size",
                mini,
                f"must divide data.train_batch_size={self.data.train_batch_size}",
            )
        if buffer := self.reward.overlong_buffer:
            require(
                buffer.len <= self.rollout.response_length,
                "reward.overlong_buffer.len",
                buffer.len,
                f"at most rollout.response_length={self.rollout.response_length}",
            )

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def max_model_len(self) -> int:
        """Tokens that the engine must hold per conversation."""
        return (
            self.rollout.max_model_len or self.data.max_prompt_length + self.rollout.response_length
        )
