"""The engine sampled, the trainer scores, and the two disagree: weights, rejection, metrics.

Letters: rho = pi_train / pi_rollout at a token, x = log rho = old_logprobs - rollout_logprobs.
Everything here is computed once per step over the whole batch, before it is cut into micro-batches,
so the metrics are final numbers. Sequences without a sampled token count nowhere.

Sources: Yao et al., Your efficient RL framework secretly brings you off-policy RL training, 2025
(TIS); Ling team, Every step evolves, 2025 (IcePop); Liu et al., When speed kills stability, 2025
(sequence level, rejection).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minirl.algorithms.segments import Segments
from minirl.registry import nearest

Threshold = float | str | Sequence[float]
"""An upper bound, or a pair (lower, upper), which may be written "lower_upper"."""

RS_OPTIONS = tuple(
    [f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")]
    + ["seq_max_k2", "seq_max_k3"]
)
"""Names that `rollout_rs` may hold, several with commas between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What `rollout_correction` returns; tensors of the shape of its input."""

    weights: Tensor | None
    """For LossInputs.rollout_is_weights; 0 where the mask is, None without `rollout_is`."""
    response_mask: Tensor
    """The input's, less what was rejected."""
    metrics: dict[str, float]
    """rollout_corr/*, final numbers for the step."""


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    sequence_ids: Tensor | None = None,
    rollout_is: Literal["token", "sequence"] | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
) -> Correction:
    """Correct a step's batch, rows [B, T] or packed [T], for the engine's different probabilities.

    `rollout_is`: weights rho_t (`token`) or prod_t rho_t (`sequence`), at most
    `rollout_is_threshold` (TIS), or 0 outside it when it is a pair (IcePop);
    `rollout_is_batch_normalize` divides them by their mean.

    `rollout_rs`: rejection by RS_OPTIONS. `token_*` drops tokens and `seq_*` whole sequences whose
    k1 = -x, k2 = x^2 / 2 or k3 = exp(x) - 1 - x (its sum, mean or maximum) is outside the
    threshold: an upper bound for k2 and k3; for k1 a pair of ratios whose logs bound it (a single
    u means 1/u and u). Several options take one threshold or, with commas between, one each.

    Metrics on how far the two disagree are always there. Raises ValueError for an unknown option or
    a threshold that does not fit.
    """
    batch = _Batch.of(old_logprobs - rollout_logprobs, response_mask, sequence_ids)
    if not batch.valid.any():
        nothing = None if rollout_is is None else torch.zeros_like(batch.x)
        return Correction(weights=nothing, response_mask=response_mask, metrics={})
    metrics = _mismatch_metrics(batch, old_logprobs, rollout_logprobs)
    weights, kept = None, response_mask
    if rollout_is is not None:
        weights, is_metrics = _importance_weights(
            batch, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= is_metrics
    if rollout_rs is not None:
        kept, rs_metrics = _reject(batch, rollout_rs, rollout_rs_threshold)
        metrics |= rs_metrics
    named = {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
    return Correction(weights=weights, response_mask=kept, metrics=named)


@torch.no_grad()
def probs_diff_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """|pi_train - pi_rollout| where sampled: training/rollout_probs_diff_{mean,max,std}."""
    sampled = response_mask > 0
    diff = (old_logprobs[sampled].exp() - rollout_logprobs[sampled].exp()).abs()
    if not diff.numel():
        return {}
    stats = {"mean": diff.mean(), "max": diff.max(), "std": diff.std(correction=0)}
    return {f"training/rollout_probs_diff_{name}": float(value) for name, value in stats.items()}


@dataclass(frozen=True, slots=True)
class _Batch:
    x: Tensor
    """log rho; 0 where the mask is."""
    mask: Tensor
    sequences: Segments

    @classmethod
    def of(cls, log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor | None) -> "_Batch":
        x = log_ratio.masked_fill(mask == 0, 0.0)
        return cls(x, mask, Segments.of_sequences(mask, sequence_ids))

    @property
    def valid(self) -> Tensor:
        """[S], sequences with a sampled token."""
        return self.sequences.sum(self.mask) > 0

    def mean(self, per_token: Tensor) -> Tensor:
        return (per_token * self.mask).sum() / self.mask.sum()

    def sequence_means(self, per_token: Tensor) -> Tensor:
        """Of the valid sequences."""
        return self.sequences.mean(per_token, self.mask)[self.valid]


def _mismatch_metrics(batch: _Batch, old: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """KL(rollout || train), perplexities, chi^2(train || rollout)."""
    x, masked = batch.x, batch.mask == 0
    train_log_ppl = -batch.sequence_means(old.masked_fill(masked, 0.0))
    rollout_log_ppl = -batch.sequence_means(rollout.masked_fill(masked, 0.0))
    difference = train_log_ppl - rollout_log_ppl
    log_rho = batch.sequences.sum(x)[batch.valid]
    return {
        "kl": batch.mean(-x),
        "k3_kl": batch.mean(x.expm1() - x),
        "training_ppl": train_log_ppl.exp().mean(),
        "training_log_ppl": train_log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": batch.mean((2 * _safe(x)).exp()) - 1,
        "chi2_seq": (2 * _safe(log_rho)).exp().mean() - 1,
    }


def _importance_weights(
    batch: _Batch, level: str, threshold: Threshold, normalize: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    if level not in ("token", "sequence"):
        raise ValueError(f"rollout_is: got {level!r}; one of null, token, sequence")
    lower, upper = _ratio_bounds("rollout_is_threshold", threshold)
    x = batch.x if level == "token" else batch.sequences.spread(batch.sequences.sum(batch.x))
    raw = _safe(x).exp() * batch.mask
    inside = (raw <= upper) & (raw >= (lower or 0.0))
    weights = raw.clamp(max=upper) if lower is None else raw.masked_fill(~inside, 0.0)
    metrics = _weight_metrics(batch, weights, raw, lower or 1 / upper, upper)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = batch.mean((~inside).to(raw.dtype))
    if normalize:
        per_token = level == "token"
        mean = batch.mean(weights) if per_token else batch.sequence_means(weights).mean()
        factor = mean if mean > 1e-8 else torch.ones_like(mean)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _weight_metrics(
    batch: _Batch, weights: Tensor, raw: Tensor, lower: float, upper: float
) -> dict[str, Tensor]:
    applied = weights[batch.mask > 0]
    per_sequence, raw_sequence = batch.sequence_means(weights), batch.sequence_means(raw)
    return {
        "rollout_is_mean": applied.mean(),
        "rollout_is_max": applied.max(),
        "rollout_is_min": applied.min(),
        "rollout_is_std": applied.std(correction=0),
        "rollout_is_eff_sample_size": applied.mean() ** 2 / (applied**2).mean().clamp(min=1e-30),
        "rollout_is_ratio_fraction_high": batch.mean((raw > upper).to(raw.dtype)),
        "rollout_is_ratio_fraction_low": batch.mean((raw < lower).to(raw.dtype)),
        "rollout_is_seq_mean": per_sequence.mean(),
        "rollout_is_seq_max": per_sequence.max(),
        "rollout_is_seq_min": per_sequence.min(),
        "rollout_is_seq_max_deviation": (per_sequence - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_sequence > upper).float().mean(),
        "rollout_is_seq_fraction_low": (raw_sequence < lower).float().mean(),
    }


def _reject(
    batch: _Batch, options: str, thresholds: Threshold | None
) -> tuple[Tensor, dict[str, Tensor]]:
    names = list(dict.fromkeys(name.strip() for name in options.split(",")))
    metrics: dict[str, Tensor] = {}
    kept = batch.mask
    for name, threshold in zip(names, _split_thresholds(names, thresholds), strict=True):
        statistic, prefix = _statistic(batch, name), f"rollout_rs_{name}"
        lower, upper = _rs_bounds(name, threshold)
        keep = (statistic >= lower) & (statistic <= upper)
        kept, values = kept * keep, statistic[batch.mask > 0]
        metrics |= {f"{prefix}_mean": values.mean(), f"{prefix}_max": values.max()}
        metrics |= {f"{prefix}_min": values.min()} | _rejected(prefix, batch, keep)
    return kept, metrics | _rejected("rollout_rs", batch, kept > 0)


def _rejected(prefix: str, batch: _Batch, keep: Tensor) -> dict[str, Tensor]:
    """Shares of tokens that are dropped, and of sequences that lose one."""
    dropped = (~keep).to(batch.x.dtype) * batch.mask
    hit = batch.sequences.sum(dropped)[batch.valid] > 0
    return {
        f"{prefix}_masked_fraction": batch.mean(dropped),
        f"{prefix}_seq_masked_fraction": hit.float().mean(),
    }


def _statistic(batch: _Batch, name: str) -> Tensor:
    """The divergence that the option looks at, at every token."""
    if name not in RS_OPTIONS:
        raise ValueError(f"rollout_rs: no option {name!r}{nearest(name, RS_OPTIONS)}")
    level, _, kind = name.rpartition("_")
    x = _safe(batch.x)
    per_token = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.expm1() - x}[kind]
    if level == "token":
        return per_token
    if level == "seq_sum":
        return batch.sequences.spread(batch.sequences.sum(per_token))
    if level == "seq_mean":
        return batch.sequences.spread(batch.sequences.mean(per_token, batch.mask))
    return batch.sequences.spread(batch.sequences.max(per_token))  # k2, k3 >= 0 = the masked ones


def _split_thresholds(names: list[str], thresholds: Threshold | None) -> list[Threshold]:
    if thresholds is None:
        raise ValueError(
            f"rollout_rs_threshold: got null, but rollout_rs={','.join(names)}; set it"
        )
    parts: list[Threshold] = [thresholds]
    if isinstance(thresholds, str):
        parts = [part.strip() for part in thresholds.split(",")]
    if len(parts) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold: got {thresholds!r}; write one threshold, or one for each of "
            f"{', '.join(names)}"
        )
    return parts * len(names) if len(parts) == 1 else parts


def _rs_bounds(name: str, threshold: Threshold) -> tuple[float, float]:
    if name.endswith("k1"):
        lower, upper = _ratio_bounds("rollout_rs_threshold", threshold)
        return math.log(lower or 1 / upper), math.log(upper)
    lower, upper = _bounds("rollout_rs_threshold", threshold)
    if lower is not None:
        raise ValueError(
            f"rollout_rs_threshold: got {threshold!r}; {name} takes an upper bound only"
        )
    return -math.inf, upper


def _ratio_bounds(key: str, threshold: Threshold) -> tuple[float | None, float]:
    lower, upper = _bounds(key, threshold)
    if upper < 1:
        raise ValueError(
            f"{key}: got {threshold!r}; must be at least 1, which is the ratio where both agree (a "
            "pair needs two points, as in 0.5_5.0: YAML takes 0.5_5 for 0.55)"
        )
    return lower, upper


def _bounds(key: str, threshold: Threshold) -> tuple[float | None, float]:
    """(lower or None, upper)."""
    parts = threshold.split("_") if isinstance(threshold, str) else threshold
    try:
        numbers = [float(p) for p in (parts if isinstance(parts, Sequence) else [parts])]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) <= 0 or numbers != sorted(numbers):
        raise ValueError(
            f"{key}: got {threshold!r}; write a number > 0, or a pair such as '0.5_2.0'"
        )
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _safe(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20)
