"""Estimators, losses, KL terms, aggregations and rollout correction: pure functions on tensors.

`python -m minirl.algorithms` lists everything that is registered. All take rows [B, T] with a
response mask; losses, aggregations and corrections also take packed tokens [T] with sequence ids,
through the same code. Where the policy did not sample, advantages, losses and gradients are exactly
0, whatever the inputs hold there.

To add an estimator or a loss, register a function of one argument whose options are keyword-only,
or name it as `package.module:function`:

    @ADV_ESTIMATORS.register("mine")
    @requires(needs=("values",))
    def mine(inputs: AdvantageInputs, *, gamma: float = 1.0): return advantages, returns

Numbers are verl's for the same inputs, except:

| where | minirl | verl |
|---|---|---|
| a group of one | advantage 0 | the raw reward; grpo_passk raises |
| a trajectory without a sampled token | in no baseline | in its group's, with its reward |
| equal rewards in a group | exactly 0 | rounding noise / 1e-6 |
| advantages, returns at mask 0 | 0 | leftovers in gae and reinforce_plus_plus |
| reinforce_plus_plus, observations | the reward-to-go is carried through | cut at the first one |
| whiten, fewer than two tokens | 0 | an error |
| optimal_token_baseline, the tail | after the second-longest's last token | after its token count |
| optimal_token_baseline, IS weights | not used | may scale W |
| gdpo | components must be given | falls back to the reward |
| gspo, sapo with another loss_agg_mode | refused | taken as seq-mean-token-mean |
| geo_mean | global mean over sequences with a token | mean over the micro-batch's rows |
| clip_cov, kl_cov | chosen over the mini-batch, own seed | per micro-batch, global generator |
| log-ratio in clip_cov, kl_cov, geo_mean | cut to +-20 | not cut |
| actor/ppo_kl | the same for every loss | |x| in kl_cov, none in gpg |
| actor/kl_cov_frac | share of penalised tokens | - |
| seq-mean-token-sum-norm | wants a constant | defaults to the padded width |
| seq-mean-token-mean | divides by the length | by the length + 1e-8 |
| metrics | means over the tokens of the mini-batch | means of micro-batch means |
| sequences without a sampled token | left out of rollout_corr/* | counted: perplexity 1 |
| pg_clipfrac_lower where there is no such bound | not there | 0 |
| rollout_is_max, _min by sequence | of the weights as applied | of the raw ones |
| rollout_rs=binary_kl, the loss `up` | not there | there |
| rloo_vectorized, grpo_vectorized | rloo, grpo | names of their own |
"""

from minirl.algorithms.advantages import (
    ADV_ESTIMATORS,
    compute_advantages,
    equal_reward_fraction,
    group_difficulty,
    whiten,
)
from minirl.algorithms.aggregate import AGGREGATIONS, aggregate
from minirl.algorithms.correction import Correction, probs_diff_metrics, rollout_correction
from minirl.algorithms.covariance import select_clip_cov, select_kl_cov
from minirl.algorithms.kl import (
    KL_CONTROLLERS,
    KL_KINDS,
    AdaptiveKL,
    FixedKL,
    apply_kl_penalty,
    kl_estimate,
)
from minirl.algorithms.policy_losses import POLICY_LOSSES, check_agg_mode, policy_loss
from minirl.algorithms.requirements import Requirements, requirements, requires
from minirl.algorithms.segments import Segments
from minirl.algorithms.token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from minirl.algorithms.value import explained_variance, value_loss
from minirl.types import AdvantageInputs, LossInputs

__all__ = [
    "ADV_ESTIMATORS",
    "AGGREGATIONS",
    "KL_CONTROLLERS",
    "KL_KINDS",
    "POLICY_LOSSES",
    "AdaptiveKL",
    "AdvantageInputs",
    "Correction",
    "FixedKL",
    "LossInputs",
    "Requirements",
    "Segments",
    "aggregate",
    "apply_kl_penalty",
    "check_agg_mode",
    "compute_advantages",
    "equal_reward_fraction",
    "explained_variance",
    "group_difficulty",
    "kl_estimate",
    "optimal_token_baseline",
    "policy_loss",
    "probs_diff_metrics",
    "requirements",
    "requires",
    "rollout_correction",
    "select_clip_cov",
    "select_kl_cov",
    "tir_optimal_token_baseline",
    "value_loss",
    "whiten",
]
