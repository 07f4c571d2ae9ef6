"""Baselines per position: the group's rewards-to-go, weighted by how much a trajectory has moved.

The weight W of a trajectory at t is a proxy of the squared norm of its score function so far.
"""

import torch

from minirl.algorithms.advantages import (
    ADV_ESTIMATORS,
    Advantages,
    discounted_sum,
    groups_of,
    sampled_first,
    spread_sampled,
)
from minirl.algorithms.requirements import requires
from minirl.algorithms.segments import Segments
from minirl.types import AdvantageInputs


@ADV_ESTIMATORS.register("optimal_token_baseline")
@requires(needs=("logprob_stats",), min_group_size=2)
def optimal_token_baseline(inputs: AdvantageInputs, *, handle_zero_tail: bool = True) -> Advantages:
    """A_t = G_t - sum_j G_jt W_jt / sum_j W_jt, W_t = sum_{s<=t} (1 - 2 pi_s + sum_v pi_{s,v}^2).

    G is the reward-to-go, j runs over the group's trajectories that sampled a token at position t.
    `handle_zero_tail`: where one conversation has outlived all others the baseline is 0, not its
    own G. The term in W is `inputs.logprob_stats`.

    Paper: Li et al., The optimal token baseline, 2026.
    """
    assert inputs.logprob_stats is not None
    mask, groups = inputs.response_mask, groups_of(inputs)
    rewards_to_go = discounted_sum(inputs.token_rewards * mask, 1.0)
    weight = inputs.logprob_stats.cumsum(1) * mask * groups.shares[:, None]
    baseline = groups.spread(groups.sum(rewards_to_go * weight) / (groups.sum(weight) + 1e-8))
    if handle_zero_tail:
        to_come = discounted_sum(mask, 1.0)  # tokens of the conversation, in any of its stretches
        if inputs.sample_ids is not None:
            samples = Segments.of_groups(inputs.sample_ids)
            to_come = samples.spread(samples.sum(to_come))
        alive = groups.sum((to_come > 0) * groups.shares[:, None]).round()
        baseline = torch.where(groups.spread(alive) > 1, baseline, 0.0)
    alone = groups.spread(groups.size()) == 1
    baseline = torch.where(alone[:, None], rewards_to_go, baseline)
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
