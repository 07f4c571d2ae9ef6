"""From per-token losses to one number: the one place that divides.

The denominators are global: sampled tokens, or sequences, of the whole mini-batch on all ranks. The
parts that micro-batches and ranks contribute then simply add up, and neither the loss nor its
gradient depends on how the batch was cut. Ranks add their gradients: FSDP would average them, and
the trainer tells it not to.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minirl.algorithms.segments import Segments
from minirl.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What an aggregation divides by."""

    segments: Segments
    num_tokens: Tensor | float
    num_sequences: Tensor | float
    scale: float | None


AGGREGATIONS: Registry[Callable[[Tensor, Tensor, Reduction], Tensor]] = Registry("loss_agg_mode")
"""Functions of the per-token loss (0 where the mask is), the mask and a Reduction."""


def aggregate(
    per_token: Tensor,
    response_mask: Tensor,
    mode: str,
    *,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    scale: float | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Reduce a per-token loss [B, T], or packed [T] with `sequence_ids`, to a scalar.

    `num_tokens` and `num_sequences` are the global counts of sampled tokens, and of sequences with
    at least one; None counts this input only. A sequence must not be cut. `scale` is the divisor of
    `seq-mean-token-sum-norm`. An input without a sampled token gives 0 with a gradient of zeros.
    Raises ValueError for an unknown mode, or when `scale` is missing.
    """
    segments = Segments.of_sequences(response_mask, sequence_ids)
    if num_tokens is None:
        num_tokens = response_mask.sum().clamp(min=1)
    if num_sequences is None:
        num_sequences = (segments.sum(response_mask) > 0).sum().clamp(min=1)
    reduction = Reduction(
        segments=segments, num_tokens=num_tokens, num_sequences=num_sequences, scale=scale
    )
    masked = per_token.masked_fill(response_mask == 0, 0.0)
    return AGGREGATIONS.find(mode)(masked, response_mask, reduction)


@AGGREGATIONS.register("token-mean")
def token_mean(loss: Tensor, mask: Tensor, over: Reduction) -> Tensor:
    """sum_i sum_t l_it / number of tokens: every token counts alike.

    Paper: DAPO, Yu et al., 2025.
    """
    return loss.sum() / over.num_tokens


@AGGREGATIONS.register("token-sum")
def token_sum(loss: Tensor, mask: Tensor, over: Reduction) -> Tensor:
    """sum_i sum_t l_it: grows with the batch.

    Paper: none.
    """
    return loss.sum()


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(loss: Tensor, mask: Tensor, over: Reduction) -> Tensor:
    """sum_i sum_t l_it / number of sequences: the policy gradient of whole trajectories.

    Paper: Williams, REINFORCE, 1992.
    """
    return loss.sum() / over.num_sequences


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(loss: Tensor, mask: Tensor, over: Reduction) -> Tensor:
    """sum_i (1 / |o_i|) sum_t l_it / number of sequences: every sequence counts alike.

    Paper: GRPO, Shao et al., DeepSeekMath, 2024.
    """
    return over.segments.mean(loss, mask).sum() / over.num_sequences


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(loss: Tensor, mask: Tensor, over: Reduction) -> Tensor:
    """sum_i sum_t l_it / (number of sequences x scale), scale a constant length.

    Paper: Dr. GRPO, Liu et al., 2025.
    """
    if over.scale is None:
        raise ValueError(
            "seq-mean-token-sum-norm: got scale=None; pass a constant, e.g. rollout.response_length"
        )
    return loss.sum() / over.num_sequences / over.scale
