"""Policy losses that single out tokens by the covariance of log-probability and advantage.

Which tokens those are is a matter of the whole mini-batch. A loss sees a micro-batch: the trainer
chooses beforehand with `select_*` and hands each micro-batch its part as `selected`.
"""

import torch
from torch import Tensor

from minirl.algorithms.policy_losses import (
    POLICY_LOSSES,
    Loss,
    clip_sides,
    clipped_objective,
    log_ratio,
)
from minirl.algorithms.requirements import requires
from minirl.types import LossInputs


@torch.no_grad()
def select_clip_cov(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """Draw max(1, clip_cov_ratio x tokens) of the tokens with clip_cov_lb < cov < clip_cov_ub that
    PPO does not clip anyhow.

    Give it the whole mini-batch; before the first update of a step, `old_logprobs` may stand for
    `logprobs`. Returns a bool per token.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    _, was_clipped = clipped_objective(log_ratio(inputs).exp(), inputs.advantages, low, high)
    covariance = _covariance(inputs)
    inside = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & (inputs.response_mask > 0)
    candidates = (inside & ~was_clipped).flatten().nonzero().squeeze(1)
    count = max(int(clip_cov_ratio * float(inputs.response_mask.sum())), 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(candidates.numel(), generator=generator)[:count]
    return _flags(candidates[drawn.to(candidates.device)], inputs)


@torch.no_grad()
def select_kl_cov(
    inputs: LossInputs, *, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 1.0, seed: int = 0
) -> Tensor:
    """Choose the max(1, kl_cov_ratio x tokens) tokens with the largest cov. Bool per token.

    Give it the whole mini-batch; before the first update of a step, `old_logprobs` may stand for
    `logprobs`. It draws nothing, so that `seed` says nothing, nor does the weight of the penalty.
    """
    num_tokens = int(inputs.response_mask.sum())
    count = min(max(int(num_tokens * kl_cov_ratio), 1), num_tokens)
    covariance = _covariance(inputs).masked_fill(inputs.response_mask == 0, -torch.inf)
    return _flags(covariance.flatten().topk(count).indices, inputs)


@POLICY_LOSSES.register("clip_cov")
@requires(select=select_clip_cov)
def clip_cov(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int = 0,
    selected: Tensor | None = None,
) -> Loss:
    """max(-A ratio, -A clip(ratio)), 0 at tokens drawn from those with lb < cov(logp, A) < ub.

    `selected` (bool, one per token) is the draw of `select_clip_cov` over the whole mini-batch.
    With None it is drawn, with `seed`, from this input: the same thing only when that is all of it.

    Paper: Cui et al., The entropy mechanism of RL for reasoning language models, 2025.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    loss, _ = clipped_objective(log_ratio(inputs).exp(), inputs.advantages, low, high)
    if selected is None:
        selected = select_clip_cov(
            inputs,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_cov_ratio=clip_cov_ratio,
            clip_cov_lb=clip_cov_lb,
            clip_cov_ub=clip_cov_ub,
            seed=seed,
        )
    return loss.masked_fill(selected, 0.0), {"actor/pg_clipfrac": selected}


@POLICY_LOSSES.register("kl_cov")
@requires(select=select_kl_cov)
def kl_cov(
    inputs: LossInputs,
    *,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 1.0,
    selected: Tensor | None = None,
) -> Loss:
    """-A ratio, + ppo_kl_coef |logp - logp_old| at the tokens with the largest cov(logp, A).

    `selected` (bool, one per token) is the choice of `select_kl_cov` over the whole mini-batch.
    With None it is made from this input: the same thing only when that is all of it.

    Paper: Cui et al., The entropy mechanism of RL for reasoning language models, 2025.
    """
    if selected is None:
        selected = select_kl_cov(inputs, kl_cov_ratio=kl_cov_ratio)
    x = log_ratio(inputs)
    penalty = torch.where(selected, ppo_kl_coef * x.abs(), 0.0)
    return -inputs.advantages * x.exp() + penalty, {"actor/kl_cov_frac": selected}


def _covariance(inputs: LossInputs) -> Tensor:
    """(A - mean A)(logp - mean logp) at each token, means over the sampled ones."""
    mask = inputs.response_mask
    count = mask.sum().clamp(min=1)
    centred = [x - (x * mask).sum() / count for x in (inputs.advantages, inputs.logprobs)]
    return centred[0] * centred[1]


def _flags(positions: Tensor, inputs: LossInputs) -> Tensor:
    """True at the given positions of the flattened tokens."""
    flags = torch.zeros_like(inputs.response_mask, dtype=torch.bool)
    flags.view(-1)[positions] = True
    return flags
