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

Numbers are verl's for the same inputs; README.md in this folder has a table of what is not.
"""

from minirl.algorithms.advantages import (
    ADV_ESTIMATORS,
    compute_advantages,
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
