"""Policy losses: per-token losses, reduced elsewhere (`aggregate`), of rows [B, T] or packed [T].

Letters: A advantage, logp the policy's log-probability with its gradient, logp_old the one at the
start of the step, x = clamp(logp - logp_old, -20, 20), ratio = exp(x), sg(.) stops the gradient.

The first line of each docstring is the formula and the line `Paper:` its source;
`python -m minirl.algorithms` prints both.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from minirl.algorithms.requirements import requirements, requires
from minirl.algorithms.segments import Segments
from minirl.registry import Registry
from minirl.types import LossInputs

Loss = tuple[Tensor, dict[str, Tensor]]
"""(per-token loss, per-token metrics), all of the shape of `inputs.logprobs`."""

POLICY_LOSSES: Registry[Callable[..., Loss]] = Registry("policy loss")
"""Functions of LossInputs; keyword-only arguments are options."""

SEQUENCE_MEAN = ("seq-mean-token-mean",)


def policy_loss(name: str, inputs: LossInputs, **options: object) -> Loss:
    """Run the loss `name` (registered, or `package.module:function`).

    The loss function sees 0 in every field where `response_mask` is 0. `rollout_is_weights`, where
    given, multiply its result. Returns the loss, exactly 0 (and without gradient) where the mask
    is, and metrics. Every metric is a detached tensor with one number per token: its mean over
    the sampled tokens of all micro-batches and ranks is what is logged, that is, the sum of
    `aggregate(metric, mask, "token-mean", num_tokens=global_count)` over them.

    Raises ValueError for an unknown name or option, and when an input that the loss declares is
    missing.
    """
    loss_function = POLICY_LOSSES.build(name, options)
    declared = requirements(POLICY_LOSSES.find(name))
    declared.check_inputs(f"policy loss {name!r}", inputs)
    inputs = _zero_masked(inputs)
    loss, metrics = loss_function(inputs)
    if inputs.rollout_is_weights is not None and not declared.own_is_weights:
        loss = loss * inputs.rollout_is_weights
    metrics = {"actor/ppo_kl": -log_ratio(inputs)} | metrics
    masked = inputs.response_mask == 0
    detached = {k: v.detach().to(loss.dtype).masked_fill(masked, 0.0) for k, v in metrics.items()}
    return loss.masked_fill(masked, 0.0), detached


def check_agg_mode(name: str, mode: str) -> None:
    """Raise ValueError when the loss `name` is not defined with `actor.loss_agg_mode` = `mode`."""
    requirements(POLICY_LOSSES.find(name)).check_agg_mode(f"policy loss {name!r}", mode)


def log_ratio(inputs: LossInputs) -> Tensor:
    """x = clamp(logp - logp_old, -20, 20)."""
    return (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20)


@POLICY_LOSSES.register("vanilla")
def vanilla(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> Loss:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)); for A < 0 at most -A clip_ratio_c.

    `clip_ratio` sets both sides unless `clip_ratio_low` or `clip_ratio_high` is given.

    Paper: Schulman et al., PPO, 2017; dual clip Ye et al., 2019; clip-higher Yu et al., DAPO, 2025.
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c: got {clip_ratio_c!r}; must be greater than 1")
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    clipped, was_clipped = clipped_objective(log_ratio(inputs).exp(), inputs.advantages, low, high)
    bound = -inputs.advantages * clip_ratio_c
    negative = inputs.advantages < 0
    metrics = {
        "actor/pg_clipfrac": was_clipped,
        "actor/pg_clipfrac_lower": (clipped > bound) & negative,
    }
    return torch.where(negative, torch.minimum(clipped, bound), clipped), metrics


@POLICY_LOSSES.register("gspo")
@requires(agg_modes=SEQUENCE_MEAN)
def gspo(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> Loss:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = sg(exp(mean_t(logp - logp_old))) pi/sg(pi).

    The value is that of the sequence's geometric-mean ratio, the gradient goes through the token.
    log s is cut at 10; no dual clip.

    Paper: Zheng et al., Group sequence policy optimization, 2025.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    sequences = Segments.of_sequences(inputs.response_mask, inputs.sequence_ids)
    difference = (inputs.logprobs - inputs.old_logprobs).detach()
    log_s = sequences.spread(sequences.mean(difference, inputs.response_mask))
    log_s = (log_s + inputs.logprobs - inputs.logprobs.detach()).clamp(max=10)
    loss, was_clipped = clipped_objective(log_s.exp(), inputs.advantages, low, high)
    return loss, {"actor/pg_clipfrac": was_clipped}


@POLICY_LOSSES.register("gpg")
def gpg(inputs: LossInputs) -> Loss:
    """-A logp: the plain policy gradient.

    Paper: Chu et al., GPG: group policy gradient, 2025; Williams, REINFORCE, 1992.
    """
    return -inputs.advantages * inputs.logprobs, {}


@POLICY_LOSSES.register("cispo")
def cispo(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> Loss:
    """-sg(clip(ratio, 1 - low, 1 + high)) A logp: clipped tokens keep their gradient.

    Paper: MiniMax, MiniMax-M1, 2025.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(inputs).exp().detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -clipped * inputs.advantages * inputs.logprobs
    return loss, {"actor/pg_clipfrac": ratio != clipped}


@POLICY_LOSSES.register("sapo")
@requires(agg_modes=SEQUENCE_MEAN)
def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """-A 4 sigmoid(tau (ratio - 1)) / tau: a soft gate; tau = tau_pos where A > 0, else tau_neg.

    Paper: Gao et al., Soft adaptive policy optimization, 2025.
    """
    for name, value in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if value <= 0:
            raise ValueError(f"{name}: got {value!r}; must be greater than 0")
    tau = torch.full_like(inputs.advantages, tau_neg).masked_fill(inputs.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio(inputs).exp() - 1)) * 4 / tau
    return -gate * inputs.advantages, {}


@POLICY_LOSSES.register("geo_mean")
@requires(agg_modes=SEQUENCE_MEAN, own_is_weights=True)
def geo_mean(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> Loss:
    """-mean_t(A) exp(mean_t s min(s d, s clip(d, -low, high))), d the log-ratio x, s = sign(A).

    One number per sequence, given to each of its tokens; the clipping is of log-ratios. Weights of
    `rollout_is_weights` enter by their geometric mean.

    Paper: Zhao et al., Geometric-mean policy optimization, 2025.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    sequences = Segments.of_sequences(inputs.response_mask, inputs.sequence_ids)
    difference = log_ratio(inputs)
    clipped = difference.clamp(-low, high)
    sign = inputs.advantages.sign()
    bounded = sign * torch.minimum(sign * difference, sign * clipped)
    ratio = sequences.mean(bounded, inputs.response_mask).exp()
    loss = -sequences.mean(inputs.advantages, inputs.response_mask) * ratio
    if inputs.rollout_is_weights is not None:
        log_weights = (inputs.rollout_is_weights + 1e-10).log()
        loss = loss * sequences.mean(log_weights, inputs.response_mask).exp()
    outside = difference != clipped
    metrics = {
        "actor/pg_clipfrac": outside & (inputs.advantages > 0),
        "actor/pg_clipfrac_lower": outside & (inputs.advantages < 0),
    }
    return sequences.spread(loss), metrics


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> Loss:
    """-A sg(min(ratio, c)) logp where pi - pi_old <= high (A > 0), >= -low (A <= 0); 0 elsewhere.

    The sides are thresholds of total variation, not of the ratio, and c, which is `clip_ratio_c`,
    is wanted large by the paper, say 20: the usual values of both are not good ones here.

    Paper: Qi et al., Rethinking the trust region in LLM reinforcement learning, 2026.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    change = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    inside = torch.where(inputs.advantages > 0, change <= high, change >= -low)
    return _trust_region(inputs, inside, clip_ratio_c)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(
    inputs: LossInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> Loss:
    """As dppo_tv, with the KL of (pi_old, 1 - pi_old) and (pi, 1 - pi) as the divergence.

    Only tokens that moved in the direction of A are cut: upwards beyond high where A > 0, downwards
    beyond low elsewhere.

    Paper: Qi et al., Rethinking the trust region in LLM reinforcement learning, 2026.
    """
    low, high = clip_sides(clip_ratio, clip_ratio_low, clip_ratio_high)
    logp, old_logp = inputs.logprobs.detach(), inputs.old_logprobs
    p, old_p = logp.exp(), old_logp.exp()
    rest = ((1 - old_p + 1e-8) / (1 - p + 1e-8)).log()
    divergence = old_p * (old_logp - logp) + (1 - old_p) * rest
    upwards = (divergence <= high) | (p <= old_p)
    downwards = (divergence <= low) | (p >= old_p)
    inside = torch.where(inputs.advantages > 0, upwards, downwards)
    return _trust_region(inputs, inside, clip_ratio_c)


@POLICY_LOSSES.register("dro")
def dro(inputs: LossInputs, *, dro_beta: float = 0.05) -> Loss:
    """-(A logp - beta/2 (logp - logp_old)^2): a quadratic pull to the old policy, no ratio.

    Paper: Richemond et al., Offline regularised RL for LLM alignment, 2024.
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta: got {dro_beta!r}; must be greater than 0")
    pull = (inputs.logprobs - inputs.old_logprobs).square()
    return -(inputs.advantages * inputs.logprobs - 0.5 * dro_beta * pull), {}


# --- Helpers ---


def _zero_masked(inputs: LossInputs) -> LossInputs:
    """0 in every field where the policy did not sample, so that nothing there can spread as nan."""
    masked = inputs.response_mask == 0
    per_token = [f.name for f in fields(inputs) if f.name not in ("response_mask", "sequence_ids")]
    values = {name: getattr(inputs, name) for name in per_token}
    zeroed = {k: v.masked_fill(masked, 0.0) for k, v in values.items() if v is not None}
    return replace(inputs, **zeroed)


def clip_sides(both: float, low: float | None, high: float | None) -> tuple[float, float]:
    """(low, high), `both` where one is None."""
    return both if low is None else low, both if high is None else high


def clipped_objective(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic bound, and where it is the clipped side that holds."""
    free, held = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, held), held > free


def _trust_region(inputs: LossInputs, inside: Tensor, clip_ratio_c: float) -> Loss:
    """Truncated importance sampling of the policy gradient at the tokens inside."""
    ratio = log_ratio(inputs).exp().detach()
    weight = ratio.clamp(max=clip_ratio_c) * inside
    metrics = {
        "actor/pg_clipfrac": ~inside,
        "actor/pg_clipfrac_lower": (ratio > clip_ratio_c) & inside,
    }
    return -inputs.advantages * weight * inputs.logprobs, metrics
