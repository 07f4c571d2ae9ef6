"""Every loss against a reference in plain Python, its gradient against finite differences of it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from minirl.algorithms import (
    AGGREGATIONS,
    POLICY_LOSSES,
    LossInputs,
    aggregate,
    check_agg_mode,
    policy_loss,
    requirements,
    select_clip_cov,
    select_kl_cov,
)

Row = list[float]
# A reference gets one sequence: logp where the gradient goes, the same numbers where it is stopped,
# logp_old and A; it returns the loss of each token.
Reference = Callable[[Row, Row, Row, Row], Row]
LOW, HIGH = 0.1, 0.3


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(row: Row) -> float:
    return sum(row) / len(row)


def ppo(ratio: float, a: float) -> float:
    return max(-a * ratio, -a * clip(ratio, 1 - LOW, 1 + HIGH))


def ref_vanilla(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    losses = [ppo(math.exp(p - o), a) for p, o, a in zip(logp, old, adv, strict=True)]
    return [min(x, -a * 1.4) if a < 0 else x for x, a in zip(losses, adv, strict=True)]


def ref_gspo(logp: Row, stopped: Row, old: Row, adv: Row) -> Row:
    s = math.exp(mean([p - o for p, o in zip(stopped, old, strict=True)]))
    return [ppo(s * math.exp(p - q), a) for p, q, a in zip(logp, stopped, adv, strict=True)]


def ref_gpg(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    return [-a * p for p, a in zip(logp, adv, strict=True)]


def ref_cispo(logp: Row, stopped: Row, old: Row, adv: Row) -> Row:
    weights = [clip(math.exp(q - o), 1 - LOW, 1 + HIGH) for q, o in zip(stopped, old, strict=True)]
    return [-w * a * p for w, a, p in zip(weights, adv, logp, strict=True)]


def ref_sapo(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    taus = [1.5 if a > 0 else 2.5 for a in adv]
    ratios = [math.exp(p - o) for p, o in zip(logp, old, strict=True)]
    gates = [4 / t / (1 + math.exp(-t * (r - 1))) for t, r in zip(taus, ratios, strict=True)]
    return [-g * a for g, a in zip(gates, adv, strict=True)]


def ref_geo_mean(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    bounded = []
    for p, o, a in zip(logp, old, adv, strict=True):
        d = p - o
        bounded.append(min(d, HIGH) if a > 0 else max(d, -LOW))
    return [-mean(adv) * math.exp(mean(bounded))] * len(logp)


def ref_dppo_tv(logp: Row, stopped: Row, old: Row, adv: Row) -> Row:
    out = []
    for p, q, o, a in zip(logp, stopped, old, adv, strict=True):
        change = math.exp(q) - math.exp(o)
        inside = change <= HIGH if a > 0 else change >= -LOW
        out.append(-a * min(math.exp(q - o), 1.4) * p * inside)
    return out


def ref_dppo_kl(logp: Row, stopped: Row, old: Row, adv: Row) -> Row:
    out = []
    for p, q, o, a in zip(logp, stopped, old, adv, strict=True):
        new_p, old_p = math.exp(q), math.exp(o)
        kl = old_p * math.log(old_p / new_p) + (1 - old_p) * math.log((1 - old_p) / (1 - new_p))
        away = new_p > old_p if a > 0 else new_p < old_p
        inside = not (away and kl > (0.02 if a > 0 else 0.01))
        out.append(-a * min(math.exp(q - o), 1.4) * p * inside)
    return out


def ref_dro(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    return [-(a * p - 0.15 * (p - o) ** 2) for p, o, a in zip(logp, old, adv, strict=True)]


def ref_clip_cov(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    return [ppo(math.exp(p - o), a) for p, o, a in zip(logp, old, adv, strict=True)]


def ref_kl_cov(logp: Row, _: Row, old: Row, adv: Row) -> Row:
    return [-a * math.exp(p - o) for p, o, a in zip(logp, old, adv, strict=True)]


SIDES = {"clip_ratio": 9.0, "clip_ratio_low": LOW, "clip_ratio_high": HIGH}
REFERENCES: dict[str, tuple[Reference, dict]] = {
    "vanilla": (ref_vanilla, SIDES | {"clip_ratio_c": 1.4}),
    "gspo": (ref_gspo, SIDES),
    "gpg": (ref_gpg, {}),
    "cispo": (ref_cispo, SIDES),
    "sapo": (ref_sapo, {"tau_pos": 1.5, "tau_neg": 2.5}),
    "geo_mean": (ref_geo_mean, SIDES),
    "dppo_tv": (ref_dppo_tv, SIDES | {"clip_ratio_c": 1.4}),
    "dppo_kl": (
        ref_dppo_kl,
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.4},
    ),
    "dro": (ref_dro, {"dro_beta": 0.3}),
    "clip_cov": (ref_clip_cov, SIDES),
    "kl_cov": (ref_kl_cov, {"ppo_kl_coef": 0.7}),
}
EVERY_LOSS = sorted(REFERENCES)


def test_every_loss_has_a_reference():
    assert list(POLICY_LOSSES) == EVERY_LOSS


def options_of(name: str, inputs: LossInputs) -> dict:
    """The options of the reference, with the choice of tokens over the whole batch."""
    options = dict(REFERENCES[name][1])
    if name == "clip_cov":
        options["selected"] = select_clip_cov(
            inputs, clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=2.0, seed=1
        )
    if name == "kl_cov":
        options["selected"] = select_kl_cov(inputs, kl_cov_ratio=0.2)
    return options


def rows_of(x: torch.Tensor, mask: torch.Tensor) -> list[Row]:
    return [row[keep > 0].tolist() for row, keep in zip(x, mask, strict=True)]


def reference_losses(name: str, inputs: LossInputs, logprobs: torch.Tensor) -> torch.Tensor:
    """[B, T] of the reference at `logprobs`, stop-gradients held at inputs.logprobs."""
    mask, out = inputs.response_mask, torch.zeros_like(logprobs)
    tensors = (logprobs, inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    for i, rows in enumerate(zip(*(rows_of(x, mask) for x in tensors), strict=True)):
        if rows[0]:
            losses = REFERENCES[name][0](*rows)
            out[i, mask[i] > 0] = torch.tensor(losses, dtype=logprobs.dtype)
    if (selected := options_of(name, inputs).get("selected")) is not None:
        distance = 0.7 * (logprobs - inputs.old_logprobs).abs()
        out = torch.where(selected, torch.zeros(()) if name == "clip_cov" else out + distance, out)
    weights = inputs.rollout_is_weights
    if weights is None:
        return out
    if name == "geo_mean":
        logs = [mean([math.log(w) for w in row]) if row else 0.0 for row in rows_of(weights, mask)]
        return out * torch.tensor(logs, dtype=out.dtype).exp()[:, None]
    return out * weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_value_is_the_papers(name, weighted, loss_inputs):
    inputs = loss_inputs if weighted else replace(loss_inputs, rollout_is_weights=None)
    loss, _ = policy_loss(name, inputs, **options_of(name, inputs))
    torch.testing.assert_close(loss, reference_losses(name, inputs, inputs.logprobs))


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_gradient_is_that_of_the_reference(name, loss_inputs):
    leaf = loss_inputs.logprobs.clone().requires_grad_()
    inputs = replace(loss_inputs, logprobs=leaf)
    coefficients = torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).view_as(leaf)
    loss, _ = policy_loss(name, inputs, **options_of(name, loss_inputs))
    (loss * coefficients).sum().backward()
    step, numeric = 1e-6, torch.zeros_like(leaf)
    for index in loss_inputs.response_mask.nonzero().tolist():
        shift = torch.zeros_like(leaf)
        shift[tuple(index)] = step
        up = reference_losses(name, loss_inputs, loss_inputs.logprobs + shift)
        down = reference_losses(name, loss_inputs, loss_inputs.logprobs - shift)
        numeric[tuple(index)] = ((up - down) * coefficients).sum() / (2 * step)
    torch.testing.assert_close(leaf.grad, numeric, rtol=1e-6, atol=1e-8)
    assert numeric.abs().max() > 0.1


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_what_stands_at_masked_positions_is_irrelevant(name, loss_inputs):
    options = options_of(name, loss_inputs)
    clean, _ = policy_loss(name, loss_inputs, **options)
    masked = loss_inputs.response_mask == 0
    dirty_leaf = loss_inputs.logprobs.masked_fill(masked, torch.nan).requires_grad_()
    dirty = replace(
        loss_inputs,
        logprobs=dirty_leaf,
        old_logprobs=loss_inputs.old_logprobs.masked_fill(masked, -torch.inf),
        advantages=loss_inputs.advantages.masked_fill(masked, torch.nan),
        rollout_is_weights=loss_inputs.rollout_is_weights.masked_fill(masked, torch.inf),
    )
    loss, metrics = policy_loss(name, dirty, **options)
    loss.sum().backward()
    assert torch.equal(loss, clean)
    assert (loss[masked] == 0).all() and (dirty_leaf.grad[masked] == 0).all()
    assert dirty_leaf.grad.isfinite().all()
    assert all((metric[masked] == 0).all() for metric in metrics.values())


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_rows_and_packed_agree(name, loss_inputs, pack):
    """Also padding: the packed form has one column fewer."""
    options = options_of(name, loss_inputs)
    loss, metrics = policy_loss(name, loss_inputs, **options)
    if "selected" in options:
        options["selected"] = options["selected"][:, :-1].flatten()
    packed = pack(loss_inputs)
    packed_loss, packed_metrics = policy_loss(name, packed, **options)
    torch.testing.assert_close(packed_loss, loss[:, :-1].flatten())
    assert metrics.keys() == packed_metrics.keys()
    for key, value in metrics.items():
        torch.testing.assert_close(packed_metrics[key], value[:, :-1].flatten())


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_gradient_and_metrics_do_not_depend_on_the_cut(name, mode, loss_inputs, take_rows):
    allowed = requirements(POLICY_LOSSES.find(name)).agg_modes
    if allowed is not None and mode not in allowed:
        with pytest.raises(ValueError, match=f"got '{mode}'.*set actor.loss_agg_mode=seq-mean"):
            check_agg_mode(name, mode)
        return
    check_agg_mode(name, mode)
    options = options_of(name, loss_inputs)
    counts = {"num_tokens": 17, "num_sequences": 5, "scale": 7.0}
    assert loss_inputs.response_mask.sum() == counts["num_tokens"]

    def run(cut: list[list[int]], **denominators) -> tuple[torch.Tensor, torch.Tensor, dict]:
        leaf = loss_inputs.logprobs.clone().requires_grad_()
        total, sums = torch.zeros(()), {}
        for rows in cut:
            part = take_rows(replace(loss_inputs, logprobs=leaf), rows)
            own = {k: v[rows] if k == "selected" else v for k, v in options.items()}
            loss, metrics = policy_loss(name, part, **own)
            total = total + aggregate(loss, part.response_mask, mode, **denominators)
            for key, value in metrics.items():
                share = aggregate(value, part.response_mask, "token-mean", num_tokens=17)
                sums[key] = sums.get(key, 0.0) + share
        total.backward()
        return total, leaf.grad, sums

    whole = run([[0, 1, 2, 3, 4, 5]], scale=7.0)  # counts for itself
    parts = run([[4], [0, 3], [1, 2, 5], []], **counts)
    torch.testing.assert_close(parts, whole)


def test_vanilla_worked_out():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 5.0, 1.1]], dtype=torch.float64)
    inputs = LossInputs(
        logprobs=ratio.log(),
        old_logprobs=torch.zeros_like(ratio),
        advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0, -2.0, 3.0]], dtype=torch.float64),
        response_mask=torch.ones_like(ratio),
    )
    loss, metrics = policy_loss("vanilla", inputs)
    expected = [[-1.2, 1.5, -0.5, 0.8, 6.0, -3.3]]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    assert metrics["actor/pg_clipfrac"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert metrics["actor/pg_clipfrac_lower"].tolist() == [[0, 0, 0, 0, 1, 0]]
    torch.testing.assert_close(metrics["actor/ppo_kl"], -ratio.log())
    higher, _ = policy_loss("vanilla", inputs, clip_ratio_high=0.28)
    assert higher[0, 0] == pytest.approx(-1.28) and higher[0, 3] == pytest.approx(0.8)


def test_dppo_cuts_only_what_moved_with_the_advantage():
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    new = torch.tensor([[0.8, 0.2, 0.8, 0.2]], dtype=torch.float64)
    inputs = LossInputs(
        logprobs=new.log(),
        old_logprobs=old.log(),
        advantages=torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64),
        response_mask=torch.ones_like(old),
    )
    for name in ("dppo_tv", "dppo_kl"):  # total variation 0.3, KL 0.223
        loss, metrics = policy_loss(name, inputs, clip_ratio=0.2)
        expected = [[0.0, -0.4 * math.log(0.2), 1.6 * math.log(0.8), 0.0]]
        torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
        assert metrics["actor/pg_clipfrac"].tolist() == [[1, 0, 0, 1]]
        loose, _ = policy_loss(name, inputs, clip_ratio=0.31)
        assert (loose != 0).all()


def test_on_policy_losses_share_the_policy_gradient(loss_inputs):
    """With ratio 1 everywhere, all clipped and trust-region losses have the gradient -A."""
    advantages = loss_inputs.advantages[:, :1].expand_as(loss_inputs.advantages)
    for name in set(EVERY_LOSS) - {"geo_mean", "clip_cov", "dro"}:
        leaf = loss_inputs.old_logprobs.clone().requires_grad_()
        inputs = replace(loss_inputs, logprobs=leaf, advantages=advantages, rollout_is_weights=None)
        policy_loss(name, inputs)[0].sum().backward()
        torch.testing.assert_close(leaf.grad, -advantages * inputs.response_mask, msg=name)


def test_huge_ratios_stay_finite(loss_inputs):
    leaf = (loss_inputs.old_logprobs + 1000).requires_grad_()
    inputs = replace(loss_inputs, logprobs=leaf)
    for name in set(EVERY_LOSS) - {"dppo_kl", "dppo_tv"}:  # those look at exp(logp) itself
        leaf.grad = None
        policy_loss(name, inputs)[0].sum().backward()
        assert leaf.grad.isfinite().all(), name


def test_errors(loss_inputs):
    with pytest.raises(ValueError, match="unknown policy loss 'vanila'; did you mean 'vanilla'"):
        policy_loss("vanila", loss_inputs)
    with pytest.raises(ValueError, match="no option 'clip_rati'; did you mean 'clip_ratio'"):
        policy_loss("vanilla", loss_inputs, clip_rati=0.1)
    with pytest.raises(ValueError, match=r"clip_ratio_c: got 1\.0; must be greater than 1"):
        policy_loss("vanilla", loss_inputs, clip_ratio_c=1.0)
    with pytest.raises(ValueError, match="dro_beta: got 0"):
        policy_loss("dro", loss_inputs, dro_beta=0)
    with pytest.raises(ValueError, match="tau_neg: got -1"):
        policy_loss("sapo", loss_inputs, tau_neg=-1)
    with pytest.raises(ValueError, match="without sequence_ids"):
        policy_loss("gspo", LossInputs(**{k: torch.zeros(3) for k in REQUIRED_FIELDS}))


REQUIRED_FIELDS = ("logprobs", "old_logprobs", "advantages", "response_mask")
