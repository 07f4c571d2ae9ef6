"""The whole configuration: dataclasses are the schema; YAML files merge, then `key=value` pairs.

Leaf names are verl's where the knob is the same. A feature that is off is a section that is null.
"""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.registry import nearest
from minirl.types import Termination


class ConfigError(ValueError):
    """Input that cannot run; the message starts with the dotted key or the place in a file."""


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise ConfigError `key: got value; remedy` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{key}: got {value!r}; {remedy}")


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"{section}.{name}", value, "must be greater than 0")


def _share(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 <= value <= 1, f"{section}.{name}", value, "must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    train_files: list[str] = field(default_factory=list)
    """Parquet or JSONL, one row per prompt; see docs in minirl/data.py for the columns."""
    val_files: list[str] = field(default_factory=list)
    """Like train_files; empty switches validation off."""
    train_batch_size: int = 64
    """Prompts per step; each becomes `rollout.n` trajectories."""
    max_prompt_length: int = 1024
    """Tokens. What happens to a longer prompt is decided by the next two keys."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is too long before training starts, and say how many."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt that is too long: refuse to start, or cut that side away."""
    shuffle: bool = True
    """Draw a new seeded order each epoch; false keeps the order of the files."""

    def __post_init__(self) -> None:
        _positive("data", self, "train_batch_size", "max_prompt_length")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = ""
    """A Hugging Face model folder, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine and of the trainer's matrix products; master weights are float32 always."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more time, far less memory."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings."""
    chat_template: str | None = None
    """A file with a Jinja chat template to use in place of the tokenizer's."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Course after the warm-up, down to `min_lr_ratio * lr` at the last step."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a share of `lr`."""
    weight_decay: float = 0.01
    """Decoupled, on matrices only (not on norms and biases)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""

    def check(self, section: str) -> None:
        """Called by the class that has it, which knows the name of the section."""
        _positive(section, self, "lr", "eps")
        _share(section, self, "min_lr_ratio")
        decays = all(0 <= beta < 1 for beta in self.betas)
        require(decays, f"{section}.betas", self.betas, "each must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """Which policy loss, by name."""

    loss_mode: str = "vanilla"
    """A registered name or `package.module:function`; `python -m minirl.algorithms` lists them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function which have no key of their own."""


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """How the policy is updated."""

    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step; null = the whole batch in one."""
    ppo_epochs: int = 1
    """Passes over the batch; the old log-probabilities stay those of the step's start."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens that go through the model at once, per rank: the knob for memory. A longer single
    sequence gets a micro-batch of its own."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_agg_mode: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = "token-mean"
    """How per-token losses become one number; denominators count all ranks and micro-batches."""
    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm`; null = rollout.response_length."""
    clip_ratio: float = 0.2
    """PPO's epsilon, both sides."""
    clip_ratio_low: float | None = None
    """Lower side, null = clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper side, null = clip_ratio; 0.28 is DAPO's clip-higher."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the loss for negative advantages."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, ref) to the loss; needs the section `ref`."""
    kl_loss_coef: float = 0.001
    """Weight of that term."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: kl/k1, abs, mse/k2, low_var_kl/k3, each also with a `+` for k2's gradient."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        _positive("actor", self, "ppo_mini_batch_size", "ppo_epochs", "max_tokens_per_micro_batch")
        _positive("actor", self, "grad_clip", "loss_scale_factor")
        self.optim.check("actor.optim")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value function of `gae`: a model with one output per token instead of the vocabulary."""

    path: str | None = None
    """A model folder to begin with; null = the start policy (model.path). The head begins at 0."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Its own optimizer; lr 1e-5 unless given."""
    cliprange_value: float | None = 0.5
    """How far a value may move from that of the step's start before its loss is cut; null = any."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step; null = that of the actor."""
    ppo_epochs: int | None = None
    """Passes over the batch; null = those of the actor."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens that go through the model at once, per rank; null = those of the actor."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How per-token losses become one number."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        _positive("critic", self, "ppo_mini_batch_size", "ppo_epochs", "cliprange_value")
        _positive("critic", self, "max_tokens_per_micro_batch", "grad_clip")
        self.optim.check("critic.optim")


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The reference policy: frozen, for KL terms."""

    path: str | None = None
    """A model folder; null = the start policy (model.path)."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation samples."""

    n: int = 1
    """Answers per prompt: enables pass@k and maj@k for k <= n."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Nucleus."""
    top_k: int = -1
    """Most likely tokens to keep; -1 = all."""

    def __post_init__(self) -> None:
        _positive("rollout.val_kwargs", self, "n")
        _share("rollout.val_kwargs", self, "top_p")
        require(self.temperature >= 0, "rollout.val_kwargs.temperature", self.temperature, ">= 0")
        require(self.top_k == -1 or self.top_k > 0, "rollout.val_kwargs.top_k", self.top_k, "> 0")
        require(
            self.n == 1 or self.temperature > 0,
            "rollout.val_kwargs.n",
            self.n,
            "greedy answers are all the same: set rollout.val_kwargs.temperature > 0 or n=1",
        )


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Tools, turns and their limits. Lengths are tokens; null = no limit of its own."""

    tool_config_path: str | None = None
    """YAML with `tools: [{class_name, config, tool_schema}]`."""
    interaction_config_path: str | None = None
    """YAML with `interaction: [{name, class_name, config}]`: simulated users, which rows choose by
    extra_info.interaction_kwargs.name."""
    format: str = "hermes"
    """How the model writes tool calls: a parser's name."""
    max_parallel_calls: int = 4
    """Calls of one turn that are run; the model is told that the others were not."""
    max_assistant_turns: int | None = None
    """Turns of the policy."""
    max_user_turns: int | None = None
    """Observations (all tool results of a turn are one)."""
    max_tool_calls: int | None = None
    """Tool calls of one trajectory."""
    max_tokens_per_turn: int | None = None
    """Sampled tokens of one turn; null = what is left of rollout.response_length."""
    max_tool_response_length: int = 1024
    """Tokens of one tool result."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which side of a longer result is cut away; a marker takes its place."""
    tool_timeout_s: float = 60.0
    """Seconds that one tool call may take; after that the model is told so."""
    stop_when: str | None = None
    """A regular expression; a turn that matches ends the conversation even if it calls a tool."""

    def __post_init__(self) -> None:
        _positive("rollout.multi_turn", self, "max_parallel_calls", "max_assistant_turns")
        _positive("rollout.multi_turn", self, "max_user_turns", "max_tool_calls", "tool_timeout_s")
        _positive("rollout.multi_turn", self, "max_tokens_per_turn", "max_tool_response_length")
        try:
            re.compile(self.stop_when or "")
        except re.error as error:
            raise ConfigError(
                f"rollout.multi_turn.stop_when: got {self.stop_when!r}; "
                f"not a regular expression: {error}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Agent loops and how they reach the engines."""

    default_agent_loop: str = "single_turn_agent"
    """For rows without `agent_name`: a registered name or `package.module:Class`."""
    agent_loop_config_path: str | None = None
    """YAML list of `{name, _target_, ...}`: more agent loops, with their options."""
    num_workers: int = 0
    """Processes that run agent loops; 0 = the event loop of rank 0 does."""
    max_sticky_sessions: int = 10_000
    """Conversations whose engine is remembered, least recently used out first."""
    sticky_imbalance: float = 4.0
    """A conversation leaves its engine when that has more than this many times the load of the
    least loaded one."""

    def __post_init__(self) -> None:
        require(
            self.num_workers >= 0,
            "rollout.agent.num_workers",
            self.num_workers,
            "a number of processes, or 0 for the event loop of rank 0",
        )
        _positive("rollout.agent", self, "max_sticky_sessions")
        require(
            self.sticky_imbalance >= 1,
            "rollout.agent.sticky_imbalance",
            self.sticky_imbalance,
            ">= 1",
        )


@dataclass(frozen=True, kw_only=True)
class SyncCheckConfig:
    """The proof, after every weight sync, that the engine has the trainer's weights."""

    max_logprob_diff: float = 0.02
    """Largest mean |difference| of log-probabilities on the probe; 1e-4 is right for float32."""
    probe_length: int = 32
    """Tokens that the engine samples; the prompt is twice as long, to fill blocks of its cache."""

    def __post_init__(self) -> None:
        _positive("rollout.sync_check", self, "max_logprob_diff", "probe_length")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engines, and what they sample."""

    name: str = "vllm"
    """The inference engine: vllm, transformers, or `package.module:Class`."""
    mode: str = "async"
    """async; or, to compare with, sync (a barrier at every turn) or serial (one after another)."""
    n: int = 8
    """Trajectories per prompt: the group of GRPO."""
    temperature: float = 1.0
    """Of training samples; the trainer's log-probabilities use the same."""
    top_p: float = 1.0
    """Nucleus of training samples; below 1 only with allow_truncated_sampling."""
    top_k: int = -1
    """Most likely tokens that training samples keep, -1 = all; else allow_truncated_sampling."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are cut; else as top_p."""
    allow_truncated_sampling: bool = False
    """Train although top_p, top_k or min_p cut the distribution: every ratio of policy to engine is
    then off by the mass that survived."""
    response_length: int = 1024
    """Tokens of everything after the prompt: all turns and observations."""
    max_model_len: int | None = None
    """Tokens the engine must hold per conversation; null = max_prompt_length + response_length."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks whose devices carry one engine; must divide the number of ranks."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU that the engine may use while it is awake."""
    cpu_kv_cache_gb: float = 1.0
    """Key-value cache of an engine on the CPU, GiB."""
    max_num_seqs: int = 256
    """Conversations that one engine decodes at once."""
    max_num_batched_tokens: int = 8192
    """Tokens of one engine step."""
    enforce_eager: bool = False
    """No CUDA graphs, no compilation: quick start, slower decoding."""
    free_cache_engine: bool = True
    """Put the engine to sleep while the trainer works, so that its memory is free (GPU)."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments for the engine, by its own names."""
    update_weights_bucket_megabytes: int = 512
    """Size of the buckets in which weights travel to the engine."""
    sync_check: SyncCheckConfig | None = field(default_factory=SyncCheckConfig)
    """null switches the check off."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    trajectory_timeout_s: float | None = None
    """Seconds that one trajectory may take."""
    stall_warning_s: float = 60.0
    """Waits longer than this are told: which conversations, for what, since when."""
    engine_timeout_s: float = 300.0
    """An engine that has requests and makes no step for so many seconds counts as dead."""
    on_failure: Literal["retry", "mask", "drop_group", "raise"] = "mask"
    """What an exception in an agent loop, a tool or a reward does to its trajectory."""
    max_retries: int = 2
    """Further attempts under on_failure=retry; after them the trajectory is masked."""
    max_failure_fraction: float = 0.5
    """The run ends when more than this share of a step's trajectories failed."""
    mask_terminations: list[Termination] = field(
        default_factory=lambda: ["error", "timeout", "aborted"]
    )
    """Trajectories that ended for one of these reasons do not train."""
    trace: int = 64
    """Trajectories per step that are written to trajectories/*.jsonl; -1 = all."""

    def __post_init__(self) -> None:
        _positive("rollout", self, "n", "temperature", "response_length", "max_model_len")
        _positive("rollout", self, "tensor_parallel_size", "max_num_seqs", "cpu_kv_cache_gb")
        _positive("rollout", self, "update_weights_bucket_megabytes", "trajectory_timeout_s")
        _positive("rollout", self, "max_num_batched_tokens", "stall_warning_s", "engine_timeout_s")
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "0 < top_p <= 1")
        require(self.top_k == -1 or self.top_k > 0, "rollout.top_k", self.top_k, "> 0, or -1")
        require(0 <= self.min_p < 1, "rollout.min_p", self.min_p, "0 <= min_p < 1")
        _share("rollout", self, "max_failure_fraction")
        require(self.max_retries >= 0, "rollout.max_retries", self.max_retries, "0 or more")
        require(
            self.mode == "async" or self.agent.num_workers == 0,
            "rollout.agent.num_workers",
            self.agent.num_workers,
            f"rollout.mode={self.mode} runs in rank 0 only; set 0, or rollout.mode=async",
        )
        require(self.trace >= -1, "rollout.trace", self.trace, "a number, or -1 for all")
        require(
            0 < self.gpu_memory_utilization < 1,
            "rollout.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "a share between 0 and 1",
        )


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
        _positive("algorithm.kl_ctrl", self, "target_kl", "horizon")
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
        _positive("reward.overlong_buffer", self, "len", "penalty_factor")


@dataclass(frozen=True, kw_only=True)
class BatchRewardConfig:
    """How trajectories are gathered for one call of the reward function."""

    max_size: int = 256
    """Trajectories per call."""
    max_delay_s: float = 0.05
    """Seconds that the first of a call waits for others."""

    def __post_init__(self) -> None:
        _positive("reward.batch", self, "max_size")
        require(self.max_delay_s >= 0, "reward.batch.max_delay_s", self.max_delay_s, ">= 0")


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    """The processes in which a reward function runs."""

    num_processes: int = 4
    """Trajectories that are scored at once; each process is started when it is needed first."""
    timeout_s: float = 30.0
    """Seconds that one trajectory may take; then its process is killed and its reward is 0."""

    def __post_init__(self) -> None:
        _positive("reward.pool", self, "num_processes", "timeout_s")


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


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run."""

    experiment_name: str = "minirl"
    """Names the run directory."""
    default_local_dir: str = "runs"
    """Runs are written to `<default_local_dir>/<experiment_name>/`."""
    total_epochs: int = 1
    """Passes over the training data, unless total_training_steps ends the run first."""
    total_training_steps: int | None = None
    """Steps; null = as many as total_epochs need."""
    seed: int = 0
    """Every random draw derives from it."""
    critic_warmup: int = 0
    """Steps at the start that train the critic only."""
    max_bad_steps: int = 3
    """Steps in a row that were not applied, because loss, advantage or gradient was not finite,
    after which the run writes a checkpoint and stops."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda where there is one."""
    val_before_train: bool = True
    """Validate the start policy."""
    test_freq: int = -1
    """Validate every so many steps and after the last; -1 = never."""
    save_freq: int = -1
    """Write a checkpoint every so many steps and after the last; -1 = never."""
    max_ckpt_to_keep: int | None = None
    """Older checkpoints are deleted; null keeps all."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto = go on from the latest checkpoint in the run directory, if there is one."""
    logger: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Trackers, by registered name: jsonl, tensorboard, wandb, mlflow, swanlab, console."""
    collective_timeout_s: float = 1800.0
    """Seconds after which a rank that does not answer ends the run."""

    def __post_init__(self) -> None:
        _positive("trainer", self, "total_epochs", "total_training_steps", "max_ckpt_to_keep")
        _positive("trainer", self, "collective_timeout_s", "max_bad_steps")
        require(self.critic_warmup >= 0, "trainer.critic_warmup", self.critic_warmup, ">= 0")
        for name in ("test_freq", "save_freq"):
            value = getattr(self, name)
            require(
                value == -1 or value > 0,
                f"trainer.{name}",
                value,
                "a number of steps, or -1 for never",
            )

    @property
    def run_dir(self) -> Path:
        """<default_local_dir>/<experiment_name>."""
        return Path(self.default_local_dir) / self.experiment_name


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
                3 * check.probe_length < self.max_model_len,
                "rollout.sync_check.probe_length",
                check.probe_length,
                f"three times as many tokens must fit into the {self.max_model_len} of the engine",
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


def load_config(arguments: list[str]) -> Config:
    """Merge YAML files (left to right), then `key=value` pairs, into a checked Config.

    Raises ConfigError with one line that names the key, the value and what is allowed.
    """
    files = [a for a in arguments if a.endswith((".yaml", ".yml")) and "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if stray := [a for a in arguments if a not in files and a not in overrides]:
        raise ConfigError(f"{stray[0]!r}: expected a .yaml file or key=value")
    updates = [_read_file(file) for file in files] + [_read_override(o) for o in overrides]
    merged: Any = OmegaConf.structured(Config)
    for place, update in zip(files + overrides, updates, strict=True):
        _check_section(OmegaConf.to_container(update), Config, "", place)
        merged = OmegaConf.merge(merged, update)
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # of an interpolation: everything else was checked
        problem = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'config'}: {problem}") from error
    assert isinstance(config, Config)
    return config


def to_yaml(config: Config) -> str:
    """The resolved config, as it can be loaded again."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def leaf_keys(section: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key that holds a value, in the order of the fields."""
    keys = []
    for name, hint in get_type_hints(section).items():
        inner = _section_of(hint)
        keys += leaf_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _read_file(file: str) -> DictConfig:
    if not Path(file).is_file():
        raise ConfigError(f"{file}: no such file")
    try:
        loaded = OmegaConf.load(file)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        sections = ", ".join(f.name for f in fields(Config))
        raise ConfigError(f"{file}: expected sections ({sections}), got a list")
    return loaded


def _read_override(override: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        key, _, value = override.partition("=")
        raise ConfigError(
            f"{key}: got {value!r}; not valid YAML: quote it, {key}='\"...\"'"
        ) from error


def _check_section(content: Any, section: type, prefix: str, place: str) -> None:
    """Raise ConfigError, in our words, for what OmegaConf could not put into `section`."""
    hints = get_type_hints(section)
    for name, value in content.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(f"{key}: no such key{_nearest_key(str(name), hints)} [{place}]")
        inner = _section_of(hints[name])
        if inner and isinstance(value, dict):
            _check_section(value, inner, f"{key}.", place)
        elif not _fits(value, hints[name]):
            raise ConfigError(f"{key}: got {value!r}; must be {_words(hints[name])} [{place}]")


def _nearest_key(name: str, known: Any) -> str:
    """The nearest key of the same section, or those of the same name in other ones."""
    elsewhere = [key for key in leaf_keys() if key.endswith(f".{name}")]
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(name, known)


def _section_of(hint: Any) -> type | None:
    found = [h for h in (hint, *get_args(hint)) if isinstance(h, type) and is_dataclass(h)]
    return found[0] if found else None


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or (isinstance(value, str) and "${" in value):  # resolved in the end
        return True
    if origin in (Union, UnionType):  # the former where a Literal is in it
        return any(_fits(value, h) for h in args)
    if origin is Literal:
        return value in args
    if origin is dict:
        return isinstance(value, dict)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    if origin is tuple:
        return isinstance(value, list) and [*map(_fits, value, args)] == [True] * len(args)
    if hint in (float, str):  # numbers become text where text is wanted
        kinds = (int, float) if hint is float else (int, float, str)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return type(value) is hint


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
}


def _words(hint: Any) -> str:
    """What a type allows, for an error message."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return f"a section ({', '.join(f.name for f in fields(hint))})"
    if origin in (Union, UnionType):  # the former where a Literal is in it
        return " or ".join(map(_words, args))
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is dict:
        return "a mapping {key: value}"
    if origin is list:
        return f"a list [...], each {_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {_words(args[0])}"
    return WORDS[hint]
