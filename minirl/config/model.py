"""The sections `data`, `model`, `actor`, `critic` and `ref`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from minirl.config.checks import positive, require, share


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
        positive("data", self, "train_batch_size", "max_prompt_length")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = ""
    """A Hugging Face model folder, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine and of the trainer's matrix products; master weights are float32 always."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more time, far less memory."""
    compile: bool = False
    """torch.compile the decoder layers of the trainer, for any number of tokens. It takes time at
    the start; what it gains has not been measured."""
    lora_rank: int = 0
    """Above 0, only a low-rank adapter of this rank is trained (LoRA, by the library peft); the
    engine gets the merged weights, and the model without it is the reference policy."""
    lora_alpha: int = 32
    """The adapter counts lora_alpha / lora_rank times."""
    lora_target_modules: list[str] = field(default_factory=list)
    """Linear modules of the decoder layers that get an adapter (q_proj ...); [] = all of them."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings."""
    chat_template: str | None = None
    """A file with a Jinja chat template to use in place of the tokenizer's."""

    def __post_init__(self) -> None:
        positive("model", self, "lora_alpha")
        require(self.lora_rank >= 0, "model.lora_rank", self.lora_rank, "write 0 for no adapter")


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
        positive(section, self, "lr", "eps")
        share(section, self, "min_lr_ratio")
        require(self.weight_decay >= 0, f"{section}.weight_decay", self.weight_decay, "0 or more")
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
    logprobs_in_tail: bool = False
    """Compute the log-probabilities of what has ended when a quarter of a rollout's conversations
    is left, while these go on: the device has to hold the engine's memory and the trainer's."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is kept in host memory while the trainer does not compute with it, of policy, critic and
    reference: the optimizer's moments (8 bytes per parameter), or the weights (4 bytes) too."""

    def __post_init__(self) -> None:
        positive("actor", self, "ppo_mini_batch_size", "ppo_epochs", "max_tokens_per_micro_batch")
        positive("actor", self, "grad_clip", "loss_scale_factor")
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
        positive("critic", self, "ppo_mini_batch_size", "ppo_epochs", "cliprange_value")
        positive("critic", self, "max_tokens_per_micro_batch", "grad_clip")
        self.optim.check("critic.optim")


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The reference policy: frozen, for KL terms."""

    path: str | None = None
    """A model folder; null = the start policy (model.path)."""
