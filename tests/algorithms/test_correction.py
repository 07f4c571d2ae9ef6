"""Importance weights, rejection and metrics, by hand and by enumeration."""

import itertools
import math

import pytest
import torch

from minirl.algorithms import probs_diff_metrics, rollout_correction

F64 = torch.float64
NAN = math.nan
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=F64)
RHO = torch.tensor([[2.0, 0.5, 1.0, 3.0], [0.4, 1.0, 1.0, 1.0], [1.0] * 4], dtype=F64)
ROLLOUT = torch.tensor([[-2.0, -1.0, NAN, -3.0], [-1.5, -0.5, NAN, NAN], [NAN] * 4], dtype=F64)
OLD = ROLLOUT + RHO.log()


def correct(**options):
    return rollout_correction(OLD, ROLLOUT, MASK, **options)


def test_off_is_metrics_only():
    result = correct()
    assert result.weights is None and torch.equal(result.response_mask, MASK)
    logs = [math.log(r) for r in (2, 0.5, 3, 0.4, 1)]
    ks = [math.exp(x) - 1 - x for x in logs]
    first, second = sum(logs[:3]) / 3, sum(logs[3:]) / 2  # mean log rho of the two sequences
    expected = {
        "kl": -sum(logs) / 5,
        "k3_kl": sum(ks) / 5,
        "training_ppl": (math.exp(2 - first) + math.exp(1 - second)) / 2,
        "training_log_ppl": (2 - first + 1 - second) / 2,
        "rollout_ppl": (math.exp(2) + math.exp(1)) / 2,
        "rollout_log_ppl": 1.5,
        "log_ppl_diff": -(first + second) / 2,
        "log_ppl_abs_diff": (abs(first) + abs(second)) / 2,
        "log_ppl_diff_max": max(-first, -second),
        "log_ppl_diff_min": min(-first, -second),
        "ppl_ratio": (math.exp(-first) + math.exp(-second)) / 2,
        "chi2_token": (4 + 0.25 + 9 + 0.16 + 1) / 5 - 1,
        "chi2_seq": (3.0**2 + 0.4**2) / 2 - 1,
    }
    assert result.metrics == pytest.approx({f"rollout_corr/{k}": v for k, v in expected.items()})


def test_a_small_mismatch_is_no_rounding():
    x = torch.full((1, 3), 1e-4)
    result = rollout_correction(x, torch.zeros(1, 3), torch.ones(1, 3))
    assert result.metrics["rollout_corr/k3_kl"] == pytest.approx(5e-9, rel=1e-3)


def test_truncated_token_weights():
    result = correct(rollout_is="token", rollout_is_threshold=1.5)
    expected = torch.tensor([[1.5, 0.5, 0, 1.5], [0.4, 1, 0, 0], [0] * 4], dtype=F64)
    torch.testing.assert_close(result.weights, expected)
    metrics = {k.removeprefix("rollout_corr/rollout_is_"): v for k, v in result.metrics.items()}
    applied = [1.5, 0.5, 1.5, 0.4, 1.0]
    squares = sum(w * w for w in applied) / 5
    assert metrics["mean"] == pytest.approx(0.98)
    assert (metrics["max"], metrics["min"]) == pytest.approx((1.5, 0.4))
    assert metrics["std"] == pytest.approx(math.sqrt(squares - 0.98**2))
    assert metrics["eff_sample_size"] == pytest.approx(0.98**2 / squares)
    assert metrics["ratio_fraction_high"] == pytest.approx(2 / 5)
    assert metrics["ratio_fraction_low"] == pytest.approx(2 / 5)  # below 1 / 1.5
    assert metrics["seq_mean"] == pytest.approx((3.5 / 3 + 0.7) / 2)
    assert metrics["seq_max_deviation"] == pytest.approx(0.3)
    assert metrics["seq_fraction_high"] == pytest.approx(1 / 2)  # (2 + 0.5 + 3) / 3 before the cut


def test_sequence_weights():
    result = correct(rollout_is="sequence", rollout_is_threshold=2.0)
    expected = torch.tensor([[2.0, 2, 0, 2], [0.4, 0.4, 0, 0], [0] * 4], dtype=F64)
    torch.testing.assert_close(result.weights, expected)


@pytest.mark.parametrize(("threshold", "size"), [(2.0, 1.0), ("0.5_2.0", 0.0)])
def test_equal_tiny_weights_are_a_whole_sample_and_none_is_an_empty_one(threshold, size):
    options = {"rollout_is": "sequence", "rollout_is_threshold": threshold}
    result = rollout_correction(
        -torch.ones(2, 30), torch.zeros(2, 30), torch.ones(2, 30), **options
    )
    name = "rollout_corr/rollout_is_eff_sample_size"
    assert result.metrics[name] == pytest.approx(size)


@pytest.mark.parametrize("threshold", ["0.45_2.0", (0.45, 2.0), [0.45, 2.0]])
def test_icepop_drops_what_is_outside(threshold):
    result = correct(rollout_is="token", rollout_is_threshold=threshold)
    expected = torch.tensor([[2.0, 0.5, 0, 0], [0, 1, 0, 0], [0] * 4], dtype=F64)
    torch.testing.assert_close(result.weights, expected)
    assert result.metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 5)


def test_batch_normalize():
    token = correct(rollout_is="token", rollout_is_batch_normalize=True, rollout_is_threshold=10)
    torch.testing.assert_close(token.weights, RHO * MASK / (6.9 / 5))
    sequence = correct(
        rollout_is="sequence", rollout_is_batch_normalize=True, rollout_is_threshold=10
    )
    assert sequence.weights[:2, 0].tolist() == pytest.approx([3 / 1.7, 0.4 / 1.7])
    assert sequence.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.7)


K2 = [math.log(r) ** 2 / 2 for r in (2, 0.5, 3, 0.4, 1)]
KEEP_FIRST = [[1, 1, 0, 1], [0, 0, 0, 0], [0] * 4]
KEEP_SECOND = [[0, 0, 0, 0], [1, 1, 0, 0], [0] * 4]


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("token_k1", 2.1, [[1, 1, 0, 0], [0, 1, 0, 0], [0] * 4]),  # 1/2.1 <= 1/rho <= 2.1
        ("token_k1", "0.3_1.9", [[1, 0, 0, 1], [0, 1, 0, 0], [0] * 4]),  # on 1/rho
        ("token_k2", 0.3, [[1, 1, 0, 0], [0, 1, 0, 0], [0] * 4]),
        ("token_k3", 0.25, [[0, 1, 0, 0], [0, 1, 0, 0], [0] * 4]),  # 2: 0.307, 0.5: 0.193
        ("seq_sum_k1", "0.5_3", KEEP_SECOND),  # 1/3 and 2.5
        ("seq_sum_k2", 0.5, KEEP_SECOND),
        ("seq_sum_k3", 0.4, KEEP_SECOND),
        ("seq_mean_k1", "0.6_1.5", KEEP_FIRST),  # 3^(-1/3) = 0.69 and 2.5^(1/2) = 1.58
        ("seq_mean_k2", 0.3, KEEP_SECOND),
        ("seq_mean_k3", 0.2, KEEP_SECOND),
        ("seq_max_k2", 0.5, KEEP_SECOND),
        ("seq_max_k3", 0.5, KEEP_SECOND),
        ("token_k2, seq_mean_k1", "0.3, 0.6_1.5", [[1, 1, 0, 0], [0, 0, 0, 0], [0] * 4]),
    ],
)
def test_rejection(option, threshold, kept):
    result = correct(rollout_rs=option, rollout_rs_threshold=threshold)
    assert result.response_mask.tolist() == kept
    dropped = 1 - result.response_mask.sum().item() / 5
    name = "rollout_corr/rollout_rs_masked_fraction"
    assert result.metrics[name] == pytest.approx(dropped)
    if option == "token_k2":
        prefix = "rollout_corr/rollout_rs_token_k2_"
        assert result.metrics[prefix + "mean"] == pytest.approx(sum(K2) / 5)
        assert result.metrics[prefix + "max"] == pytest.approx(max(K2))
        assert result.metrics[prefix + "seq_masked_fraction"] == pytest.approx(1.0)


def test_rows_and_packed_agree():
    options = {
        "rollout_is": "sequence",
        "rollout_rs": "seq_max_k3,token_k1",
        "rollout_rs_threshold": "0.9,2.2",
    }
    rows = correct(**options)
    ids = torch.arange(3).repeat_interleave(4)
    packed = rollout_correction(
        OLD.flatten(), ROLLOUT.flatten(), MASK.flatten(), sequence_ids=ids, **options
    )
    assert 0 < packed.response_mask.sum() < 5
    torch.testing.assert_close(packed.weights, rows.weights.flatten())
    assert torch.equal(packed.response_mask, rows.response_mask.flatten())
    assert packed.metrics == pytest.approx(rows.metrics)


def test_sequence_weights_are_unbiased():
    """E under the engine of w f = E under the trainer of f, over all sequences of two tokens."""
    train = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]], dtype=F64)
    engine = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.5, 0.3]], dtype=F64)
    sequences = list(itertools.product(range(3), repeat=2))
    index = torch.tensor(sequences)
    old = torch.stack([train[t, index[:, t]] for t in range(2)], 1)
    rollout = torch.stack([engine[t, index[:, t]] for t in range(2)], 1)
    f = torch.arange(9, dtype=F64) ** 2
    result = rollout_correction(
        old.log(), rollout.log(), torch.ones(9, 2), rollout_is="sequence", rollout_is_threshold=99
    )
    estimate = (rollout.prod(1) * result.weights[:, 0] * f).sum()
    torch.testing.assert_close(estimate, (old.prod(1) * f).sum())


def test_nothing_sampled():
    nothing = torch.zeros_like(MASK)
    result = rollout_correction(
        OLD, ROLLOUT, nothing, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2
    )
    assert (result.weights == 0).all() and result.metrics == {}
    assert probs_diff_metrics(OLD, ROLLOUT, nothing) == {}


def test_probs_diff():
    diffs = [
        math.exp(r) * abs(rho - 1)
        for r, rho in ((-2, 2), (-1, 0.5), (-3, 3), (-1.5, 0.4), (-0.5, 1))
    ]
    mean = sum(diffs) / 5
    expected = {"mean": mean, "max": max(diffs)}
    expected["std"] = math.sqrt(sum((d - mean) ** 2 for d in diffs) / 5)
    named = {f"training/rollout_probs_diff_{k}": v for k, v in expected.items()}
    assert probs_diff_metrics(OLD, ROLLOUT, MASK) == pytest.approx(named)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is: got 'tokens'"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold: got '2_1'"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold: got 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "high"}, "got 'high'; write a number"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "got None; write a number"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.55}, "got 0.55; must be at least 1"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "got 0.5; must be at least 1"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold: got null"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "did you mean 'token_k"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "takes an upper bound only"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}, "one for each of token_k2"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        correct(**options)
