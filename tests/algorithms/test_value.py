"""The critic's loss and explained variance."""

import math

import pytest
import torch

from minirl.algorithms import explained_variance, value_loss

F64 = torch.float64
VALUES = torch.tensor([[1.0, 2.0, 0.1, 7.0]], dtype=F64)
OLD = torch.tensor([[0.0, 0.0, 0.0, 7.0]], dtype=F64)
RETURNS = torch.tensor([[3.0, -1.0, 2.0, 7.0]], dtype=F64)
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=F64)


def test_value_loss():
    # clipped predictions 0.5, 0.5, 0.1: errors 2 or 2.5, 3 or 1.5, 1.9
    loss, metrics = value_loss(VALUES, OLD, RETURNS, MASK, 0.5)
    expected = torch.tensor([[2.5**2 / 2, 9 / 2, 1.9**2 / 2, 0.0]], dtype=F64)
    torch.testing.assert_close(loss, expected)
    assert metrics["critic/vf_clipfrac"].tolist() == [[1, 0, 0, 0]]
    assert metrics["critic/vpred_mean"].tolist() == [[1.0, 2.0, 0.1, 0.0]]
    unclipped, _ = value_loss(VALUES, OLD, RETURNS, MASK, None)
    torch.testing.assert_close(unclipped, 0.5 * (VALUES - RETURNS).square() * MASK)


def test_value_loss_gradient():
    values = VALUES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, OLD, RETURNS, MASK, 0.5)[0], [values])
    dirty = VALUES.masked_fill(MASK == 0, torch.nan).requires_grad_()
    value_loss(dirty, OLD, RETURNS, MASK, 0.5)[0].sum().backward()
    torch.testing.assert_close(dirty.grad, torch.tensor([[0.0, 3.0, -1.9, 0.0]], dtype=F64))


def test_explained_variance():
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1)
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0)
    # residuals 1, 0, -1 + 1.5: variance of (1, 0, 0.5) is 0.25
    guesses = torch.tensor([0.0, 2.0, 2.5, 0.0])
    assert explained_variance(guesses, returns, mask) == pytest.approx(0.75)
    assert math.isnan(explained_variance(guesses, torch.ones(4), mask))
