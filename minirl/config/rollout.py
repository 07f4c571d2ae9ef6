"""The section `rollout`: engines, agent loops, turns, sampling."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from minirl.config.checks import ConfigError, positive, require, share
from minirl.types import Termination


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation samples."""

    n: int = 1
    """Answers per prompt: enables pass@k for k <= n, and maj@n."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Nucleus."""
    top_k: int = -1
    """Most likely tokens to keep; -1 = all."""

    def __post_init__(self) -> None:
        positive("rollout.val_kwargs", self, "n")
        require(0 < self.top_p <= 1, "rollout.val_kwargs.top_p", self.top_p, "0 < top_p <= 1")
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
        positive("rollout.multi_turn", self, "max_parallel_calls", "max_assistant_turns")
        positive("rollout.multi_turn", self, "max_user_turns", "max_tool_calls", "tool_timeout_s")
        positive("rollout.multi_turn", self, "max_tokens_per_turn", "max_tool_response_length")
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
    worker_timeout_s: float = 300.0
    """A worker process whose event loop does not answer for so many seconds is ended and started
    again, with its conversations."""
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
        positive("rollout.agent", self, "max_sticky_sessions", "worker_timeout_s")
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
    """Tokens that the engine samples."""

    def __post_init__(self) -> None:
        positive("rollout.sync_check", self, "max_logprob_diff", "probe_length")


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """The MLflow store that gets traces, and the metrics of the tracker `mlflow`."""

    tracking_uri: str | None = None
    """A server's address or a database; null = the SQLite file mlflow.db in the run directory."""
    experiment_name: str | None = None
    """null = trainer.experiment_name; of one like `sweep/3` its last part."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Which trajectories are kept to look at, and where: trajectories/*.jsonl, and MLflow."""

    max_samples_per_step: int = 64
    """Trajectories per step and split, as whole groups (one at least); 0 = none, -1 = all."""
    mlflow: MLflowConfig | None = None
    """Write them to MLflow too, a trace per trajectory."""

    def __post_init__(self) -> None:
        require(
            self.max_samples_per_step >= -1,
            "rollout.trace.max_samples_per_step",
            self.max_samples_per_step,
            "a number of trajectories, or -1 for all",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engines, and what they sample."""

    name: str = "vllm"
    """The inference engine: vllm, sglang, transformers, or `package.module:Class`."""
    mode: str = "async"
    """async; or, to compare with, sync (a barrier at every turn) or serial (one after another)."""
    n: int = 8
    """Trajectories per prompt: the group of GRPO."""
    over_sample_rate: float = 0.0
    """Share of further samples that are begun of each prompt; when `n` of them have ended, the
    others are aborted. No waiting for the slowest, but long conversations train less often."""
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
    seeded_sampling: bool = True
    """Every request has its own seed, whatever else the engine does; vLLM's older model runner (on
    a CPU, and in 0.25 for mixtures of experts) then draws for one after the other at every step.
    false = all together, and nothing repeats."""
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
    """Tokens of one engine step; vLLM on a CPU takes a prompt whole, so as many as the longest."""
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
    trace: TraceConfig | None = field(default_factory=TraceConfig)
    """null keeps no trajectories."""

    def __post_init__(self) -> None:
        positive("rollout", self, "n", "temperature", "response_length", "max_model_len")
        positive("rollout", self, "tensor_parallel_size", "max_num_seqs", "cpu_kv_cache_gb")
        positive("rollout", self, "update_weights_bucket_megabytes", "trajectory_timeout_s")
        positive("rollout", self, "max_num_batched_tokens", "stall_warning_s", "engine_timeout_s")
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "0 < top_p <= 1")
        require(self.top_k == -1 or self.top_k > 0, "rollout.top_k", self.top_k, "> 0, or -1")
        require(0 <= self.min_p < 1, "rollout.min_p", self.min_p, "0 <= min_p < 1")
        share("rollout", self, "max_failure_fraction")
        require(
            self.over_sample_rate >= 0, "rollout.over_sample_rate", self.over_sample_rate, ">= 0"
        )
        require(self.max_retries >= 0, "rollout.max_retries", self.max_retries, "0 or more")
        require(
            self.mode == "async" or self.agent.num_workers == 0,
            "rollout.agent.num_workers",
            self.agent.num_workers,
            f"rollout.mode={self.mode} runs in rank 0 only; set 0, or rollout.mode=async",
        )
        require(
            0 < self.gpu_memory_utilization < 1,
            "rollout.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "a share between 0 and 1",
        )
