"""The section `algorithm`: from rewards to advantages."""

from dataclasses import dataclass, field
from typing import Any, Literal

from minirl.config.checks import positive, require


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """The weight of the KL term in the reward."""

    type: str = "fixed"
    """fixed, adaptive, or `package.module:Class`."""
    kl_coef: float = 0.001
    """Weight, at the start where it is adaptive."""
    target_kl: float = 0.1
    """adaptive: the KL per token, in nats, that it steers to."""
    horizon: int = 10_000
    """adaptive: trajectories over which it reacts."""

    def __post_init__(self) -> None:
        positive("algorithm.kl_ctrl", self, "target_kl", "horizon")
        require(self.kl_coef >= 0, "algorithm.kl_ctrl.kl_coef", self.kl_coef, ">= 0")


@dataclass(frozen=True, kw_only=True)
class CPOConfig:
    """Curriculum policy optimization: hints for prompts that the policy mostly fails."""

    difficulty: float = 0.5
    """Groups with 1 - mean success above this are hard: they get a hint."""
    weight_clip: float = 2.0
    """A token's weight stays within 1/c and c."""
    hint_fn: str = "ground_truth"
    """`(row, trajectories) -> str`: a registered name or `package.module:function`."""
    judge_fn: str = "verified"
    """`(row, trajectory) -> str`: the remark on a failed answer, for a hint_fn with the keyword
    `judge`; a registered name or `package.module:function`."""

    def __post_init__(self) -> None:
        require(0 <= self.difficulty < 1, "algorithm.cpo.difficulty", self.difficulty, "0 to 1")
        require(self.weight_clip >= 1, "algorithm.cpo.weight_clip", self.weight_clip, ">= 1")


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """What is done about an engine whose probabilities are not the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights per token or per sequence; null = none."""
    rollout_is_threshold: Any = 2.0
    """Upper bound of a weight (TIS), or a pair such as `0.5_2.0` outside of which it is 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection: token_k1, seq_sum_k1, seq_mean_k3, seq_max_k2 ..., several with commas."""
    rollout_rs_threshold: Any = None
    """Bound of that divergence: one, or one per name with commas."""
    bypass_mode: bool = False
    """Take the engine's log-probabilities as the old ones and save the pass that computes them; the
    loss's own ratio then corrects, so rollout_is and rollout_rs must be null."""

    def __post_init__(self) -> None:
        for name in ("rollout_is", "rollout_rs"):
            require(
                not self.bypass_mode or getattr(self, name) is None,
                f"algorithm.rollout_correction.{name}",
                getattr(self, name),
                "with bypass_mode=true old and engine's log-probabilities are the same; write null",
            )
        require(
            self.rollout_rs_threshold is None or self.rollout_rs is not None,
            "algorithm.rollout_correction.rollout_rs_threshold",
            self.rollout_rs_threshold,
            "nothing reads it while rollout_rs is null; set rollout_rs",
        )


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: a group whose answers are all worth the same is replaced."""

    metric: str = "reward"
    """What must differ within a group: `reward`, or a number that the reward function returns."""
    max_num_gen_batches: int = 10
    """Batches of prompts that a step may draw; then it trains on what there is. 0 = no limit."""

    def __post_init__(self) -> None:
        key = "algorithm.filter_groups.max_num_gen_batches"
        require(self.max_num_gen_batches >= 0, key, self.max_num_gen_batches, ">= 0")
        require(  # else told when the first rollout is over
            self.metric not in ("seq_reward", "seq_final_reward"),
            "algorithm.filter_groups.metric",
            self.metric,
            "what verl calls so is `reward` here",
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: str = "grpo"
    """A registered name or `package.module:function`; `python -m minirl.algorithms` lists them."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator which have no key of their own."""
    use_kl_in_reward: bool = False
    """Take kl_coef * KL(policy, ref) away from the reward of every token; needs `ref`."""
    kl_penalty: str = "kl"
    """Its estimator: kl/k1, abs, mse/k2, low_var_kl/k3."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its weight."""
    cpo: CPOConfig | None = None
    """The section of `adv_estimator: cpo`."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """null = metrics only."""
    filter_groups: FilterGroupsConfig | None = None
    """null = every group trains, with advantage 0 where all its rewards are equal."""
