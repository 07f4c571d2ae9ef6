"""Advantage estimators: from a whole step of token rewards [B, T] to advantages and returns [B, T].

Letters: m response_mask; r_i the sum of a trajectory's rewards; g its group (same prompt), n the
group's size, mu_g and sigma_g its mean and unbiased standard deviation; V the critic; `whiten`:
subtract the mean over all sampled tokens, divide by their standard deviation. Outcome estimators
give every sampled token its trajectory's advantage, and return it as `returns` too. A trajectory
without a sampled token counts in no group. The stretches of one conversation (`sample_ids`) are one
member of their group: r_i is their mean, and n, mu_g, sigma_g and B count them once.

The first line of each docstring is the formula and the line `Paper:` its source;
`python -m minirl.algorithms` prints both.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minirl.algorithms.requirements import requirements, requires
from minirl.algorithms.segments import Groups, Segments
from minirl.registry import Registry, nearest
from minirl.types import AdvantageInputs

Advantages = tuple[Tensor, Tensor]
"""(advantages, returns), both [B, T]."""

ADV_ESTIMATORS: Registry[Callable[..., Advantages]] = Registry("advantage estimator")
"""Functions of AdvantageInputs; keyword-only arguments are options."""

STD_EPSILON = 1e-6
OF_SAMPLED_TOKENS = ("values", "logprob_stats", "logprobs", "hinted_logprobs")


def compute_advantages(name: str, inputs: AdvantageInputs, **options: object) -> Advantages:
    """Run the estimator `name` (registered, or `package.module:function`) without gradients.

    The estimator sees 0 where `response_mask` is 0 in all but the rewards. Returns advantages and
    returns [B, T], of the rewards' type (ranks exchange them, whatever the estimator computes in),
    exactly 0 there. Raises ValueError for an unknown name or option, and when an input that the
    estimator declares is missing.
    """
    estimator = ADV_ESTIMATORS.build(name, options)
    needed = requirements(ADV_ESTIMATORS.find(name))
    needed.check_inputs(f"advantage estimator {name!r}", inputs)
    masked, dtype = inputs.response_mask == 0, inputs.token_rewards.dtype
    given = {name: getattr(inputs, name) for name in OF_SAMPLED_TOKENS}
    zeroed = {k: v.masked_fill(masked, 0.0) for k, v in given.items() if v is not None}
    with torch.no_grad():
        advantages, returns = (x.to(dtype) for x in estimator(replace(inputs, **zeroed)))
    return advantages.masked_fill(masked, 0.0), returns.masked_fill(masked, 0.0)


# --- Per token ---


@ADV_ESTIMATORS.register("gae")
@requires(needs=("values",))
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Advantages:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; whitened. R = A + V.

    t counts sampled tokens: those with m = 0 are stepped over, so the value after a tool call's
    last token is that of the next turn's first. V = 0 after the last. R takes A before whitening.

    Paper: Schulman et al., High-dimensional continuous control using GAE, 2015.
    """
    assert inputs.values is not None
    order = sampled_first(inputs.response_mask)
    rewards = (inputs.token_rewards * inputs.response_mask).gather(1, order)
    values = inputs.values.gather(1, order)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    delta = rewards + gamma * next_values - values
    raw = discounted_sum(delta, gamma * lam)
    returns = spread_sampled(raw + values, order, inputs.response_mask)
    advantages = spread_sampled(raw, order, inputs.response_mask)
    return whiten(advantages, inputs.response_mask), returns


@ADV_ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Advantages:
    """A_t = whiten(R_t), R_t = r_t + gamma R_{t+1} the discounted reward-to-go.

    t counts sampled tokens: R is carried through those with m = 0 unchanged.

    Paper: Hu, REINFORCE++, 2025.
    """
    order = sampled_first(inputs.response_mask)
    rewards = (inputs.token_rewards * inputs.response_mask).gather(1, order)
    returns = spread_sampled(discounted_sum(rewards, gamma), order, inputs.response_mask)
    return whiten(returns, inputs.response_mask), returns


@ADV_ESTIMATORS.register("remax")
@requires(needs=("greedy_rewards",))
def remax(inputs: AdvantageInputs) -> Advantages:
    """A_t = sum_{s>=t} r_s - r(greedy rollout of the same prompt).

    Paper: Li et al., ReMax, 2023.
    """
    assert inputs.greedy_rewards is not None
    returns = discounted_sum(inputs.token_rewards * inputs.response_mask, 1.0)
    return returns - inputs.greedy_rewards[:, None], returns


# --- Per trajectory, against its group ---


@ADV_ESTIMATORS.register("grpo")
@requires(min_group_size=2)
def grpo(inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True) -> Advantages:
    """A_i = (r_i - mu_g) / (sigma_g + 1e-6); norm_adv_by_std_in_grpo=false leaves the division out.

    Paper: Shao et al., DeepSeekMath, 2024; without the division Liu et al., Dr. GRPO, 2025.
    """
    groups = groups_of(inputs)
    return _outcome(_group_relative(_scores(inputs), groups, norm_adv_by_std_in_grpo), inputs)


@ADV_ESTIMATORS.register("grpo_passk")
@requires(min_group_size=2)
def grpo_passk(inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True) -> Advantages:
    """A_best = (r_max - r_second) / (sigma_g + 1e-6), all others 0.

    Paper: Tang et al., Optimizing language models for inference time objectives, 2025.
    """
    scores, groups = _scores(inputs), groups_of(inputs)
    best = groups.spread(groups.max(scores))
    is_best = scores == best
    second = groups.spread(groups.max(scores.masked_fill(is_best, -torch.inf)))
    num_best = groups.spread(groups.sum(is_best * groups.shares).round())
    alone_on_top = is_best & (num_best == 1) & second.isfinite()
    margin = torch.where(alone_on_top, best - second, 0.0)
    if norm_adv_by_std_in_grpo:
        margin = margin / (_group_std(scores, groups) + STD_EPSILON)
    return _outcome(margin, inputs)


@ADV_ESTIMATORS.register("rloo")
@requires(min_group_size=2)
def rloo(inputs: AdvantageInputs) -> Advantages:
    """A_i = r_i - mean of the others' r = n / (n - 1) (r_i - mu_g).

    Paper: Ahmadian et al., Back to basics, 2024.
    """
    groups = groups_of(inputs)
    n = groups.spread(groups.size())
    return _outcome(n / (n - 1).clamp(min=1) * _centred(_scores(inputs), groups), inputs)


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
@requires(min_group_size=2)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """A = whiten(r_i - mu_g), every sampled token counting once.

    Paper: Hu, REINFORCE++, 2025.
    """
    centred = _centred(_scores(inputs), groups_of(inputs))
    advantages, _ = _outcome(centred, inputs)
    advantages = whiten(advantages, inputs.response_mask)
    return advantages, advantages


@ADV_ESTIMATORS.register("opo")
@requires(min_group_size=2)
def opo(inputs: AdvantageInputs) -> Advantages:
    """A_i = r_i - sum_j len_j r_j / sum_j len_j over the group, len the number of sampled tokens.

    Paper: Hao et al., On-policy RL with optimal reward baseline, 2025.
    """
    groups = groups_of(inputs)
    lengths = inputs.response_mask.sum(1)
    scores = _above_lowest(_scores(inputs), groups)
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return _outcome(scores - groups.spread(baseline), inputs)


@ADV_ESTIMATORS.register("gpg")
@requires(min_group_size=2)
def gpg(inputs: AdvantageInputs, *, f_norm: float = 1.0) -> Advantages:
    """A_i = alpha (r_i - mu_g) / f_norm, alpha = B / number of trajectories with r != 0.

    Paper: Chu et al., GPG: group policy gradient, 2025.
    """
    scores, groups = _scores(inputs), groups_of(inputs)
    counts = groups.shares * (inputs.response_mask.sum(1) > 0)
    alpha = counts.sum().round() / (counts * (scores != 0)).sum().round().clamp(min=1)
    return _outcome(alpha * _centred(scores, groups) / f_norm, inputs)


@ADV_ESTIMATORS.register("gdpo")
@requires(needs=("reward_components",), min_group_size=2)
def gdpo(
    inputs: AdvantageInputs,
    *,
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
) -> Advantages:
    """A = whiten(sum_k w_k GRPO(r_ik)) over the components k of the reward.

    `gdpo_reward_keys` names the components (None = all); `gdpo_reward_weights` are theirs, in that
    order (None = 1 each). The summed reward is not used.

    Paper: Liu et al., GDPO: group reward-decoupled normalization, 2026.
    """
    assert inputs.reward_components is not None
    keys = list(inputs.reward_components if gdpo_reward_keys is None else gdpo_reward_keys)
    weights = [1.0] * len(keys) if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != len(keys):
        raise ValueError(f"gdpo_reward_weights: got {weights}; give one for each of {keys}")
    groups = groups_of(inputs)
    total = torch.zeros_like(_scores(inputs))
    for key, weight in zip(keys, weights, strict=True):
        if key not in inputs.reward_components:
            hint = nearest(key, inputs.reward_components)
            raise ValueError(f"gdpo_reward_keys: no reward component {key!r}{hint}")
        component = _per_sample(inputs.reward_components[key].to(total.dtype), inputs)
        total += weight * _group_relative(component, groups, norm_adv_by_std_in_grpo)
    advantages = whiten(_outcome(total, inputs)[0], inputs.response_mask)
    return advantages, advantages


@ADV_ESTIMATORS.register("cpo")
@requires(needs=("logprobs", "hinted_logprobs"), min_group_size=2)
def cpo(
    inputs: AdvantageInputs,
    *,
    difficulty: float = 0.5,
    weight_clip: float = 2.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> Advantages:
    """A_t = GRPO x w_t, w_t = clip(exp(logp_hinted - logp), 1/c, c) / mean; in hard groups only.

    Hard are groups whose `group_difficulty` is above `difficulty`; elsewhere w = 1. c is
    `weight_clip`; the mean is over the sampled tokens of the response, so its advantages keep
    their mean.

    Paper: none; minirl's curriculum policy optimization, on GRPO (Shao et al., 2024).
    """
    assert inputs.logprobs is not None and inputs.hinted_logprobs is not None
    if weight_clip < 1:
        raise ValueError(f"weight_clip: got {weight_clip!r}; must be at least 1")
    advantages, _ = grpo(inputs, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    mask = inputs.response_mask
    ratio = (inputs.hinted_logprobs - inputs.logprobs).exp()
    weights = ratio.clamp(1 / weight_clip, weight_clip)
    weights = weights / (
        (weights * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    )
    hard = group_difficulty(inputs) > difficulty
    advantages = torch.where(hard[:, None], advantages * weights, advantages)
    return advantages, advantages


def group_difficulty(inputs: AdvantageInputs) -> Tensor:
    """1 - mean success of the trajectory's group [B], success being the reward cut to 0 .. 1."""
    groups, scores = groups_of(inputs), _scores(inputs)
    return 1 - groups.spread(groups.member_mean(scores.clamp(0, 1)))


# --- Helpers ---


def groups_of(inputs: AdvantageInputs) -> Groups:
    """Trajectories of one prompt; one without a sampled token (it failed) is by itself."""
    failed = inputs.response_mask.sum(1) == 0
    groups = Segments.of_groups(_apart(inputs.group_ids, failed))
    shares = inputs.token_rewards.new_ones(len(failed))
    if inputs.sample_ids is not None:
        samples = Segments.of_groups(_apart(inputs.sample_ids, failed))
        shares = shares / samples.spread(samples.sum(shares))
    return Groups(groups.ids, groups.num, shares)


def _apart(ids: Tensor, alone: Tensor) -> Tensor:
    """`ids` [B], those where `alone` replaced by one of their own each."""
    rows = torch.arange(ids.numel(), device=ids.device)
    return torch.where(alone, ids.amax() + 1 + rows, ids) if rows.numel() else ids


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the elements with mask 1, var unbiased; 0 elsewhere."""
    count = mask.sum()
    mean = (x * mask).sum() / count.clamp(min=1)
    centred = (x - mean) * mask
    return centred * torch.rsqrt(centred.square().sum() / (count - 1).clamp(min=1) + 1e-8)


def _scores(inputs: AdvantageInputs) -> Tensor:
    """r_i [B]; summed in float64, or equal ones would differ by which turns earned them."""
    total = inputs.token_rewards.sum(1, dtype=torch.float64)
    return _per_sample(total.to(inputs.token_rewards.dtype), inputs)


def _per_sample(x: Tensor, inputs: AdvantageInputs) -> Tensor:
    """x [B], for stretches of one conversation their mean over those that train."""
    if inputs.sample_ids is None:
        return x
    samples = Segments.of_groups(inputs.sample_ids)
    trains = (inputs.response_mask.sum(1) > 0).to(x.dtype)
    above = samples.spread(samples.mean(_above_lowest(x, samples), trains))
    return above - samples.spread(samples.max(-x))  # equal ones stay exactly what they are


def _outcome(per_trajectory: Tensor, inputs: AdvantageInputs) -> Advantages:
    """[B] to every sampled token [B, T]."""
    advantages = per_trajectory[:, None] * inputs.response_mask
    return advantages, advantages


def _above_lowest(scores: Tensor, groups: Segments) -> Tensor:
    """r_i - the group's lowest: equal rewards give exactly 0, not rounding noise / 1e-6."""
    return scores + groups.spread(groups.max(-scores))


def _centred(scores: Tensor, groups: Groups) -> Tensor:
    """r_i - mu_g."""
    scores = _above_lowest(scores, groups)
    return scores - groups.spread(groups.member_mean(scores))


def _group_std(scores: Tensor, groups: Groups) -> Tensor:
    """sigma_g at each trajectory; 0 in a group of one."""
    squares = groups.sum(_centred(scores, groups).square() * groups.shares)
    return groups.spread((squares / (groups.size() - 1).clamp(min=1)).sqrt())


def _group_relative(scores: Tensor, groups: Groups, by_std: bool) -> Tensor:
    centred = _centred(scores, groups)
    return centred / (_group_std(scores, groups) + STD_EPSILON) if by_std else centred


def sampled_first(mask: Tensor) -> Tensor:
    """Column order [B, T'] that puts a row's sampled tokens first; T' the most that a row has."""
    width = int(mask.sum(1).max()) if mask.numel() else 0
    return (mask == 0).long().argsort(dim=1, stable=True)[:, :width]


def spread_sampled(x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """Undo `sampled_first`: [B, T'] to [B, T]."""
    return torch.zeros_like(mask, dtype=x.dtype).scatter(1, order, x) * mask


def discounted_sum(x: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor y_{t+1} along dimension 1."""
    if factor == 1:
        return x.flip(1).cumsum(1).flip(1)
    out, running = torch.empty_like(x), x.new_zeros(x.shape[0])
    for t in reversed(range(x.shape[1])):
        running = x[:, t] + factor * running
        out[:, t] = running
    return out
