"""The five aggregations by hand; test_policy_losses cuts batches with every loss."""

import pytest
import torch

from minirl.algorithms import AGGREGATIONS, aggregate

LOSS = torch.tensor([[1.0, 2.0, 9.0, 3.0], [4.0, 9.0, 9.0, 9.0], [9.0] * 4], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
EXPECTED = {  # sequences: 1 + 2 + 3 over three tokens, 4 over one, nothing
    "token-mean": 10 / 4,
    "token-sum": 10.0,
    "seq-mean-token-sum": (6 + 4) / 2,
    "seq-mean-token-mean": (2 + 4) / 2,
    "seq-mean-token-sum-norm": (6 + 4) / 2 / 8,
}


def test_every_aggregation_is_here():
    assert sorted(EXPECTED) == list(AGGREGATIONS)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_value_rows_and_packed(mode):
    assert aggregate(LOSS, MASK, mode, scale=8.0).item() == pytest.approx(EXPECTED[mode])
    ids = torch.arange(3).repeat_interleave(4)
    packed = aggregate(LOSS.flatten(), MASK.flatten(), mode, scale=8.0, sequence_ids=ids)
    assert packed.item() == pytest.approx(EXPECTED[mode])


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_gradient_and_masked_positions(mode):
    loss = LOSS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, MASK, mode, scale=8.0), [loss])
    dirty = LOSS.masked_fill(MASK == 0, torch.nan).requires_grad_()
    aggregate(dirty, MASK, mode, scale=8.0).backward()
    assert (dirty.grad[MASK == 0] == 0).all() and (dirty.grad[MASK > 0] > 0).all()


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_nothing_to_train_still_runs_backward(mode):
    loss = LOSS.clone().requires_grad_()
    total = aggregate(loss, torch.zeros_like(MASK), mode, scale=8.0)
    total.backward()
    assert total == 0 and (loss.grad == 0).all()


def test_global_denominators():
    assert aggregate(LOSS, MASK, "token-mean", num_tokens=20).item() == pytest.approx(0.5)
    mean = aggregate(LOSS, MASK, "seq-mean-token-mean", num_sequences=torch.tensor(12))
    assert mean.item() == pytest.approx(0.5)


def test_errors():
    with pytest.raises(
        ValueError, match="unknown loss_agg_mode 'token-men'; did you mean 'token-m"
    ):
        aggregate(LOSS, MASK, "token-men")
    with pytest.raises(ValueError, match="scale=None; pass a constant"):
        aggregate(LOSS, MASK, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="sequence_ids: shape"):
        aggregate(LOSS.flatten(), MASK.flatten(), "token-mean", sequence_ids=torch.zeros(3).long())
