"""Where engine and trainer disagree about sampled tokens: by turn, by place in it, by boundary."""

import torch
from torch import Tensor

from minirl.types import MicroBatch

LATE_TURN = 4
LATE_TOKEN = 16


def turns_of(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """For every token [N]: the turn that sampled it, from 1, and its place in the turn, from 0.

    A turn is a run of tokens with response_mask 1 within a sequence; other tokens get turn 0.
    """
    sampled = batch.response_mask > 0
    same = torch.zeros_like(sampled)
    same[1:] = batch.sequence_ids[1:] == batch.sequence_ids[:-1]
    begins = sampled & ~(sampled.roll(1) & same)
    index = torch.arange(batch.num_tokens)
    begun = torch.cumsum(begins, 0)
    first = torch.cumsum(batch.lengths, 0) - batch.lengths
    before = (begun - begins.long())[first]  # turns of the sequences before
    turn = (begun - before[batch.sequence_ids]) * sampled
    place = index - torch.where(begins, index, 0).cummax(0).values
    return turn, place * sampled


def agreement(batch: MicroBatch) -> dict[str, Tensor]:
    """|log-probability of the trainer - of the engine|, in nats, of the sampled tokens by bucket.

    Needs old_logprobs. Buckets that are empty are left out.
    """
    assert batch.old_logprobs is not None
    turn, place = turns_of(batch)
    difference = (batch.old_logprobs - batch.rollout_logprobs).abs()
    buckets = {f"turn_{n}": turn == n for n in range(1, LATE_TURN)}
    buckets |= {
        f"turn_{LATE_TURN}_on": turn >= LATE_TURN,
        "first_token": (turn > 0) & (place == 0),
        "after_observation": (turn > 1) & (place == 0),
        f"token_2_to_{LATE_TOKEN}": (turn > 0) & (place > 0) & (place < LATE_TOKEN),
        f"token_{LATE_TOKEN + 1}_on": (turn > 0) & (place >= LATE_TOKEN),
    }
    return {name: difference[where] for name, where in buckets.items() if where.any()}


def agreement_metrics(batch: MicroBatch) -> dict[str, float]:
    """`training/logprob_diff_mean/<bucket>` and `training/logprob_diff_max/<bucket>`."""
    metrics = {}
    for name, values in agreement(batch).items():
        metrics[f"training/logprob_diff_mean/{name}"] = float(values.mean())
        metrics[f"training/logprob_diff_max/{name}"] = float(values.max())
    return metrics
