"""The data that flows through a step: one typed object per stage."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]

Termination = Literal[
    "stop",
    "turn_length",
    "response_length",
    "max_assistant_turns",
    "max_user_turns",
    "max_tool_calls",
    "observation_too_long",
    "prompt_too_long",
    "timeout",
    "aborted",
    "error",
]

CallStatus = Literal[
    "ok", "unknown_tool", "malformed", "bad_arguments", "error", "timeout", "not_run"
]

GREEDY = -1
"""`sample_index` of the greedy rollout that `remax` compares with; it does not train."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine sampled for one turn."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, under the distribution that was sampled (temperature included)."""
    finish_reason: FinishReason
    """A turn that was cut (`length`) is not one that ended (`stop`); the two are never merged."""
    num_cached_tokens: int = 0
    num_preempted: int = 0
    weight_version: int = 0
    server: int | None = None
    """Index of the engine that sampled it; this and the times are the router's to set."""
    start: float | None = None
    end: float | None = None


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One turn of the policy as it happened, for traces.

    Times here and in the other records are seconds of `time.perf_counter()`, whose zero all
    processes of a machine share; None where nobody measured them.
    """

    finish_reason: FinishReason
    server: int | None = None
    num_cached_tokens: int = 0
    num_preempted: int = 0
    start: float | None = None
    end: float | None = None


class RewardRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part of the reward and when it was computed."""

    name: str
    """`outcome`, `tool/<name>`, or `user` (what a simulated user gave for the turn before)."""
    value: float | None
    """None where it failed."""
    start: float
    end: float


class ToolCallRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tool call as it happened, for traces and metrics."""

    turn: int
    name: str
    arguments: str
    """As the model wrote them."""
    result: str
    """As the model was told, after cutting."""
    status: CallStatus
    reward: float = 0.0
    seconds: float = 0.0
    start: float | None = None


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """A prompt and everything that followed it.

    After a turn that calls a tool (tokens A0), its result (O0) and an answer (A1):

        response_ids      = A0 + O0 + A1
        response_mask     = [1] * len(A0) + [0] * len(O0) + [1] * len(A1)
        response_logprobs = logprobs of A0 + [0.0] * len(O0) + logprobs of A1
        turn_ends         = [len(A0), len(A0 + O0 + A1)]
        turns             = [record of A0, record of A1]

    The three lists have equal length because only the two `append_` methods write to them.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    """1 where the policy sampled the token; 0 where a tool, the user or the template wrote it."""
    response_logprobs: list[float] = field(default_factory=list)
    """The engine's, 0.0 where the mask is 0."""
    turn_ends: list[int] = field(default_factory=list)
    """Per sampled turn, the length of the response up to its last token."""
    turns: list[TurnRecord] = field(default_factory=list)
    """Per sampled turn: when, where, how it ended."""
    turn_rewards: list[float] = field(default_factory=list)
    """Per sampled turn, the sum of what its tool calls returned."""
    weight_versions: list[int] = field(default_factory=list)
    """Per sampled turn; first and last bound the staleness."""
    termination: Termination | None = None
    reward: float | None = None
    """The outcome, on the last sampled token; None until it was computed."""
    reward_breakdown: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    """What it says in the end (`"72"`), where the reward function extracts it: majority votes."""
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    rewards: list[RewardRecord] = field(default_factory=list)
    """What was asked for a reward, in that order."""
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The same conversation as messages, a turn of the policy as its text; the agent loop's methods
    write them. What a reward model with a chat template of its own is given."""
    error: str | None = None
    """Traceback of the exception that ended it."""
    uid: str = ""
    """Of the prompt: the trajectories of a group share it."""
    sample_index: int = 0
    """0 .. rollout.n - 1 within the group; GREEDY for the greedy one."""
    data_source: str = ""
    ground_truth: Any = None
    start: float | None = None
    """Of the conversation; see TurnRecord."""
    end: float | None = None

    def append_sampled(self, output: TokenOutput) -> None:
        """Append a turn of the policy."""
        self._append(output.token_ids, 1, output.logprobs)
        self.weight_versions.append(output.weight_version)
        self.turn_ends.append(len(self.response_ids))
        self.turn_rewards.append(0.0)
        self.turns.append(
            TurnRecord(
                finish_reason=output.finish_reason,
                server=output.server,
                num_cached_tokens=output.num_cached_tokens,
                num_preempted=output.num_preempted,
                start=output.start,
                end=output.end,
            )
        )

    def append_observation(self, token_ids: list[int]) -> None:
        """Append tokens that the policy reads but did not sample."""
        self._append(token_ids, 0, [0.0] * len(token_ids))

    @property
    def token_ids(self) -> list[int]:
        """prompt_ids + response_ids: what the next turn is generated from."""
        return self.prompt_ids + self.response_ids

    @property
    def num_turns(self) -> int:
        """Turns that the policy took."""
        return len(self.turn_ends)

    def _append(self, token_ids: list[int], mask: int, logprobs: list[float]) -> None:
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens but {len(logprobs)} logprobs")
        self.response_ids += token_ids
        self.response_mask += [mask] * len(token_ids)
        self.response_logprobs += logprobs


def conversations(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The last stretch of each conversation, in order: the one that carries its outcome."""
    return list({(t.uid, t.sample_index): t for t in trajectories}.values())


@dataclass(slots=True, kw_only=True)
class Group:
    """The `rollout.n` trajectories of one prompt, in the order of their `sample_index`."""

    uid: str
    row: dict[str, Any]
    trajectories: list[Trajectory]
    greedy_reward: float | None = None
    """Of the greedy rollout of the same prompt, its tools' included, where the estimator asks for
    one."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Whole sequences (prompt + response) laid end to end: tensors of shape [T], no padding.

    Two sequences, prompt P and response R of (2, 3) and (1, 2) tokens:

        tokens        = P0 P0 R0 R0 R0 P1 R1 R1
        positions     =  0  1  2  3  4  0  1  2
        sequence_ids  =  0  0  0  0  0  1  1  1
        response_mask =  0  0  m  m  m  0  m  m

    Every per-token value (log-probability, advantage, ...) stands at the token it belongs to: the
    one that was sampled, not the position whose logits predicted it. The batch of a whole step is
    one MicroBatch too; `select` cuts it.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    sequence_ids: Tensor  # [T] int64, 0 .. num_sequences - 1, non-decreasing
    response_mask: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32, the engine's
    token_rewards: Tensor  # [T] float32
    lengths: Tensor  # [S] int64, tokens per sequence
    prompt_lengths: Tensor  # [S] int64
    group_ids: Tensor  # [S] int64, sequences of one prompt share it
    sample_ids: Tensor | None = None  # [S] int64, stretches of one conversation share it
    old_logprobs: Tensor | None = None  # [T] float32, the policy's at the start of the step
    ref_logprobs: Tensor | None = None  # [T] float32
    hinted_logprobs: Tensor | None = None  # [T] float32, the policy's behind a hinted prompt
    logprob_stats: Tensor | None = None  # [T] float32, 1 - 2 pi + sum_v pi_v^2
    rollout_is_weights: Tensor | None = None  # [T] float32
    values: Tensor | None = None  # [T] float32, V of the state in which the token was sampled
    advantages: Tensor | None = None  # [T] float32
    returns: Tensor | None = None  # [T] float32
    selected: Tensor | None = None  # [T] bool, by a loss that chooses over the whole mini-batch

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.numel()

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.lengths.numel()

    def select(self, sequences: list[int]) -> "MicroBatch":
        """The named sequences, in the given order, as a batch of their own."""
        rows = torch.tensor(sequences, dtype=torch.int64)
        tokens = self.places(sequences)
        picked = {
            name: value[rows if name in PER_SEQUENCE else tokens]
            for name, value in self.tensors().items()
        }
        return MicroBatch(**picked | {"sequence_ids": torch.repeat_interleave(picked["lengths"])})

    def places(self, sequences: list[int]) -> Tensor:
        """Where the tokens of `select(sequences)` stand in this batch: [n] int64."""
        ends, sizes = torch.cumsum(self.lengths, 0).tolist(), self.lengths.tolist()
        spans = [torch.arange(ends[s] - sizes[s], ends[s]) for s in sequences]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *spans])

    def to(self, device: torch.device) -> "MicroBatch":
        """Every tensor on `device`."""
        return MicroBatch(**{name: value.to(device) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are set, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


PER_SEQUENCE = frozenset({"lengths", "prompt_lengths", "group_ids", "sample_ids"})
"""Fields of MicroBatch of shape [S]; all others are [T]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an advantage estimator sees: a whole step, one row per trajectory, response part only.

    Rows are padded on the right to the longest response, with `response_mask` 0 and reward 0.
    """

    token_rewards: Tensor  # [B, T]
    response_mask: Tensor  # [B, T], 1 where the policy sampled
    group_ids: Tensor  # [B] int64
    sample_ids: Tensor | None = None  # [B] int64; None = every row is a conversation of its own
    values: Tensor | None = None  # [B, T]
    greedy_rewards: Tensor | None = None  # [B], reward of the greedy rollout of the same prompt
    reward_components: dict[str, Tensor] | None = None  # name -> [B]
    logprob_stats: Tensor | None = None  # [B, T], 1 - 2 pi_s + sum_v pi_{s,v}^2
    logprobs: Tensor | None = None  # [B, T]
    hinted_logprobs: Tensor | None = None  # [B, T], behind a hinted prompt; of easy groups anything


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a policy loss sees: rows [B, T], or packed [T] with `sequence_ids`."""

    logprobs: Tensor  # [B, T] or [T], with gradient
    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    sequence_ids: Tensor | None = None  # [T] int64; None when a row is a sequence
