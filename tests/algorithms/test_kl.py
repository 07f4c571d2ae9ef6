"""KL estimates by enumeration over a vocabulary, controllers by hand."""

import math

import pytest
import torch

from minirl.algorithms import (
    KL_CONTROLLERS,
    KL_KINDS,
    AdaptiveKL,
    FixedKL,
    apply_kl_penalty,
    kl_estimate,
)

F64 = torch.float64
X = torch.tensor([-30.0, -1.0, 0.0, 0.5, 3.0], dtype=F64)
VALUES = {
    "k1": X.tolist(),
    "abs": [30.0, 1.0, 0.0, 0.5, 3.0],
    "k2": [450.0, 0.5, 0.0, 0.125, 4.5],
    "k3": [10.0, math.e - 2, 0.0, math.exp(-0.5) - 0.5, math.exp(-3) + 2],
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def value_of(kind: str) -> list[float]:
    return VALUES[ALIASES.get(kind, kind)]


@pytest.mark.parametrize("kind", list(KL_KINDS))
def test_value_with_and_without_plus(kind):
    ref = torch.full_like(X, -2.0)
    assert kl_estimate(X + ref, ref, kind).tolist() == pytest.approx(value_of(kind))
    assert kl_estimate(X + ref, ref, kind + "+").tolist() == pytest.approx(value_of(kind))


def test_k3_of_small_differences_is_no_rounding():
    x = torch.tensor([1e-5, -1e-4, 3e-4])
    torch.testing.assert_close(
        kl_estimate(x, torch.zeros(3), "k3"), x.square() / 2, rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("kind", list(KL_KINDS))
def test_gradient(kind):
    logp = X[1:].clone().requires_grad_()  # where nothing is cut
    ref = torch.full_like(logp, 0.1)
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref, kind), [logp])
    kl_estimate(logp, ref, kind + "+").sum().backward()
    torch.testing.assert_close(logp.grad, logp.detach() - ref)  # of x^2 / 2


def test_which_estimates_are_unbiased():
    """E over the policy's own vocabulary: k1 and k3 give the KL, k2's gradient is the KL's."""
    logits = torch.tensor([0.2, -1.0, 0.7, 0.1], dtype=F64, requires_grad=True)
    ref = torch.tensor([0.5, 0.1, -0.2, 0.0], dtype=F64).log_softmax(0)
    logp = logits.log_softmax(0)
    probs = logp.exp().detach()
    kl = (logp.exp() * (logp - ref)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for kind in ("k1", "k3"):
        assert (probs * kl_estimate(logp, ref, kind)).sum().item() == pytest.approx(kl.item())
    for kind in ("k2", "k1+", "k3+", "abs+"):
        expected = (probs * kl_estimate(logp, ref, kind)).sum()
        (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        torch.testing.assert_close(gradient, exact, msg=kind)
    (biased,) = torch.autograd.grad((probs * (logp - ref)).sum(), logits)
    assert biased.abs().max() < 1e-12  # k1's gradient is 0 in expectation


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown KL estimate 'k33'; did you mean 'k3'"):
        kl_estimate(X, X, "k33")
    with pytest.raises(ValueError, match="unknown KL estimate"):
        kl_estimate(X, X, "package.module:function")


def test_apply_kl_penalty():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    kl = torch.tensor([[0.5, torch.nan, 2.0, torch.inf]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    penalized = apply_kl_penalty(rewards, kl, mask, 0.1)
    torch.testing.assert_close(penalized, torch.tensor([[-0.05, 0.0, 0.8, 0.0]]))


def test_fixed_controller():
    controller = KL_CONTROLLERS.build("fixed", {"kl_coef": 0.3})()
    assert type(controller) is FixedKL
    controller.update(100.0, 64)
    assert controller.value == 0.3
    controller.load_state_dict(FixedKL(kl_coef=0.1).state_dict())  # what the config said then
    assert controller.value == 0.3


def test_a_controller_of_another_type_begins_with_its_own_coefficient():
    """The type was changed before the run was resumed."""
    fixed, adaptive = FixedKL(kl_coef=0.0), AdaptiveKL(kl_coef=0.5)
    states = fixed.state_dict(), adaptive.state_dict()
    adaptive.load_state_dict(states[0])
    fixed.load_state_dict(states[1])
    assert (fixed.value, adaptive.value) == (0.0, 0.5)


def test_adaptive_controller():
    controller = KL_CONTROLLERS.build(
        "adaptive", {"kl_coef": 0.1, "target_kl": 2.0, "horizon": 100}
    )()
    controller.update(2.2, 50)  # error 0.1, half a horizon
    assert controller.value == pytest.approx(0.1 * 1.05)
    controller.update(50.0, 100)  # error cut to 0.2
    assert controller.value == pytest.approx(0.1 * 1.05 * 1.2)
    controller.update(0.0, 100)
    assert controller.value == pytest.approx(0.1 * 1.05 * 1.2 * 0.8)
    controller.update(0.0, 1024)  # as one horizon
    assert controller.value == pytest.approx(0.1 * 1.05 * 1.2 * 0.8 * 0.8)
    controller.update(math.nan, 100)  # a step that is not applied
    assert controller.value == pytest.approx(0.1 * 1.05 * 1.2 * 0.8 * 0.8)
    resumed = AdaptiveKL(kl_coef=9.0, target_kl=2.0, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value
    with pytest.raises(ValueError, match="horizon: got 0"):
        AdaptiveKL(horizon=0)
