"""Which tokens clip_cov and kl_cov single out."""

from dataclasses import replace

import pytest
import torch

from minirl.algorithms import LossInputs, policy_loss, select_clip_cov, select_kl_cov


@pytest.fixture
def inputs() -> LossInputs:
    """Means are 0, so that the covariance is A x logp': 4, 1, 0, 1, 4 and, masked, 100."""
    mask = torch.tensor([[1.0, 1, 1, 1, 1, 0]])
    centred = torch.tensor([[-2.0, -1, 0, 1, 2, 10]])
    return LossInputs(
        logprobs=centred - 3, old_logprobs=centred - 3, advantages=centred, response_mask=mask
    )


def test_kl_cov_takes_the_largest(inputs):
    assert select_kl_cov(inputs, kl_cov_ratio=0.4).tolist() == [
        [True] + [False] * 3 + [True, False]
    ]
    assert select_kl_cov(inputs, kl_cov_ratio=1e-9).sum() == 1  # at least one
    assert select_kl_cov(inputs, kl_cov_ratio=1.0).tolist() == [[True] * 5 + [False]]


def test_clip_cov_draws_between_the_bounds(inputs):
    bounds = {"clip_cov_lb": 0.5, "clip_cov_ub": 3.0}
    both = select_clip_cov(inputs, clip_cov_ratio=0.4, **bounds)
    assert both.tolist() == [[False, True, False, True, False, False]]
    one = [select_clip_cov(inputs, clip_cov_ratio=0.2, seed=s, **bounds) for s in range(20)]
    assert {tuple(x.flatten().nonzero().flatten().tolist()) for x in one} == {(1,), (3,)}
    again = select_clip_cov(inputs, clip_cov_ratio=0.2, seed=7, **bounds)
    assert torch.equal(again, one[7])
    assert not select_clip_cov(inputs, clip_cov_lb=5.0, clip_cov_ub=9.0).any()
    inputs.old_logprobs[0, 1] += 1.0  # A < 0 and a ratio below 0.8: PPO clips it
    unclipped = select_clip_cov(inputs, clip_cov_ratio=0.4, **bounds)
    assert unclipped.flatten().nonzero().tolist() == [[3]]
    loose = select_clip_cov(inputs, clip_cov_ratio=0.4, clip_ratio_low=0.7, **bounds)
    assert torch.equal(loose, both)


def test_the_draw_ignores_the_global_generator(inputs):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    select_clip_cov(inputs, clip_cov_lb=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_packed_and_rows_choose_alike(loss_inputs, pack):
    for choose in (lambda x: select_clip_cov(x, clip_cov_lb=0.0, seed=4), select_kl_cov):
        rows, packed = choose(loss_inputs), choose(pack(loss_inputs))
        assert rows.any()
        assert torch.equal(rows[:, :-1].flatten(), packed)


def test_without_a_choice_the_loss_makes_its_own(loss_inputs):
    options = {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "seed": 5}
    loss, metrics = policy_loss("clip_cov", loss_inputs, **options)
    plain, plain_metrics = policy_loss("vanilla", loss_inputs, clip_ratio_c=1e9)
    cut = metrics["actor/pg_clipfrac"] > 0
    assert 0 < cut.sum() <= int(0.3 * 17)
    assert not (cut & (plain_metrics["actor/pg_clipfrac"] > 0)).any()  # those are clipped anyhow
    torch.testing.assert_close(loss, plain.masked_fill(cut, 0.0))
    loss, metrics = policy_loss("kl_cov", loss_inputs, kl_cov_ratio=0.2)
    torch.testing.assert_close(
        metrics["actor/kl_cov_frac"] > 0, select_kl_cov(loss_inputs, kl_cov_ratio=0.2)
    )


def test_an_empty_micro_batch_trains_nothing(loss_inputs):
    leaf = loss_inputs.logprobs.clone().requires_grad_()
    empty = replace(
        loss_inputs, logprobs=leaf, response_mask=torch.zeros_like(loss_inputs.response_mask)
    )
    for name in ("clip_cov", "kl_cov"):
        loss, _ = policy_loss(name, empty)
        loss.sum().backward()
        assert (leaf.grad == 0).all()
