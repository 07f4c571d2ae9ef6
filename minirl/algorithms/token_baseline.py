"""Baselines per position: the group's rewards-to-go, weighted by how much a trajectory has moved.

The weight W of a trajectory at t is a proxy of the squared norm of its score function so far.
"""

import torch
from torch import Tensor

from minirl.algorithms.advantages import (
    ADV_ESTIMATORS,
    Advantages,
    discounted_sum,
    group_size,
    groups_of,
    sampled_first,
    spread_sampled,
)
from minirl.algorithms.requirements import requires
from minirl.algorithms.segments import Groups
from minirl.types import AdvantageInputs


@ADV_ESTIMATORS.register("optimal_token_baseline")
@requires(needs=("logprob_stats",), min_group_size=2)
def optimal_token_baseline(inputs: AdvantageInputs, *, handle_zero_tail: bool = True) -> Advantages:
    """A_t = G_t - sum_j G_jt W_jt / sum_j W_jt, W_t = sum_{s<=t} (1 - 2 pi_s + sum_v pi_{s,v}^2).

    G is the reward-to-go, j runs over the group's trajectories that sampled a token at position t.
    `handle_zero_tail`: where the longest trajectory has outlived all others the baseline is 0, not
    its own G. The term in W is `inputs.logprob_stats`.

    Paper: Li et al., The optimal token baseline, 2026.
    """
    rewards_to_go = discounted_sum(inputs.token_rewards * inputs.response_mask, 1.0)
    assert inputs.logprob_stats is not None
    energy = (inputs.logprob_stats * inputs.response_mask).cumsum(1)
    groups = groups_of(inputs)
    baseline = _token_baseline(
        rewards_to_go, energy, inputs.response_mask, groups, handle_zero_tail
    )
    return rewards_to_go - baseline, rewards_to_go


@ADV_ESTIMATORS.register("tir_optimal_token_baseline")
@requires(needs=("logprob_stats",), min_group_size=2)
def tir_optimal_token_baseline(
    inputs: AdvantageInputs, *, handle_zero_tail: bool = True
) -> Advantages:
    """As optimal_token_baseline, t counting sampled tokens only: observations are skipped.

    Paper: Li et al., The optimal token baseline, 2026 (tool-integrated reasoning).
    """
    assert inputs.logprob_stats is not None
    order = sampled_first(inputs.response_mask)
    packed = AdvantageInputs(
        token_rewards=(inputs.token_rewards * inputs.response_mask).gather(1, order),
        response_mask=inputs.response_mask.gather(1, order),
        group_ids=inputs.group_ids,
        sample_ids=inputs.sample_ids,
        logprob_stats=inputs.logprob_stats.gather(1, order),
    )
    advantages, returns = optimal_token_baseline(packed, handle_zero_tail=handle_zero_tail)
    mask = inputs.response_mask
    return spread_sampled(advantages, order, mask), spread_sampled(returns, order, mask)


def _token_baseline(
    rewards_to_go: Tensor, energy: Tensor, mask: Tensor, groups: Groups, zero_tail: bool
) -> Tensor:
    """sum(G W) / sum(W) per group and position, [B, T]."""
    weight = energy * mask * groups.shares[:, None]
    baseline = groups.spread(groups.sum(rewards_to_go * weight) / (groups.sum(weight) + 1e-8))
    alone = (group_size(groups, mask.dtype) == 1)[:, None]
    baseline = torch.where(alone, rewards_to_go, baseline)
    if zero_tail and mask.any():  # else there may be no position at all
        positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        ends = (mask * positions).amax(1)  # [B], length up to the last sampled token
        longest = groups.spread(groups.max(ends))
        is_longest = ends == longest
        second = groups.spread(groups.max(ends.masked_fill(is_longest, -torch.inf)))
        tied = groups.spread(groups.sum(is_longest * groups.shares).round()) > 1
        second = torch.where(tied, longest, second)
        baseline = torch.where(~alone & (positions > second[:, None]), 0.0, baseline)
    return baseline
