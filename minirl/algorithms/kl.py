"""Estimates of KL(policy || reference) per token, and the coefficient that weighs them.

All are functions of the log-ratio x = logp - logp_ref at a token that the policy sampled.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minirl.registry import Registry, nearest

KL_KINDS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimate")
"""Functions of the log-ratio; each name also takes a `+`."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate the KL divergence at each token; any shape, the two alike.

    A `+` after the name (`k3+`) keeps the value and takes k2's gradient: of these estimates, only
    k2's gradient is in expectation that of the KL. Raises ValueError for an unknown kind.
    """
    x = logprobs - ref_logprobs
    base = kind.removesuffix("+")
    if base not in set(KL_KINDS):
        raise ValueError(f"unknown KL estimate {kind!r}{nearest(base, KL_KINDS)}")
    value = KL_KINDS.find(base)(x)
    if base == kind:
        return value
    surrogate = k2(x)
    return value.detach() + (surrogate - surrogate.detach())


@KL_KINDS.register("k1")
@KL_KINDS.register("kl")
def k1(x: Tensor) -> Tensor:
    """x: unbiased, of high variance, negative at times.

    Paper: Schulman, Approximating KL divergence, 2020.
    """
    return x


@KL_KINDS.register("abs")
def absolute(x: Tensor) -> Tensor:
    """|x|: never negative, biased upwards.

    Paper: none; Schulman, Approximating KL divergence, 2020, for the setting.
    """
    return x.abs()


@KL_KINDS.register("k2")
@KL_KINDS.register("mse")
def k2(x: Tensor) -> Tensor:
    """x^2 / 2: biased but of low variance; its gradient is the KL's in expectation.

    Paper: Schulman, Approximating KL divergence, 2020.
    """
    return 0.5 * x.square()


@KL_KINDS.register("k3")
@KL_KINDS.register("low_var_kl")
def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x, x cut to +-20, the result to 10: unbiased, of low variance, never negative.

    Paper: Schulman, Approximating KL divergence, 2020; the cuts are verl's.
    """
    x = x.clamp(-20, 20)
    return (torch.expm1(-x) + x).clamp(max=10)


def apply_kl_penalty(
    token_rewards: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """Return token_rewards - kl_coef * kl where the policy sampled (`use_kl_in_reward`)."""
    return token_rewards - kl_coef * kl.masked_fill(response_mask == 0, 0.0)


KL_CONTROLLERS: Registry[Callable[..., Any]] = Registry("KL controller")
"""`build(type, options)()` makes one; they differ only in what `update` does."""


@KL_CONTROLLERS.register("fixed")
class FixedKL:
    """coef stays as it is.

    Paper: none.
    """

    def __init__(self, *, kl_coef: float = 0.001) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Take note of the step's mean KL: nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must hold: nothing, the coefficient is the config's."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint: with the coefficient that the config has now."""


@KL_CONTROLLERS.register("adaptive")
class AdaptiveKL(FixedKL):
    """coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) min(n_steps / horizon, 1)).

    Beyond five horizons in one step it would change its sign.

    Paper: Ziegler et al., Fine-tuning language models from human preferences, 2019.
    """

    def __init__(
        self, *, kl_coef: float = 0.001, target_kl: float = 0.1, horizon: int = 10000
    ) -> None:
        super().__init__(kl_coef=kl_coef)
        for name, value in (("target_kl", target_kl), ("horizon", horizon)):
            if value <= 0:
                raise ValueError(f"{name}: got {value!r}; must be greater than 0")
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after `n_steps` trajectories with the mean KL `current_kl`."""
        if math.isnan(current_kl):
            return  # of a step that is not applied; it would stay nan for good
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n_steps / self.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; from that of a fixed coefficient, as at the start."""
        self.value = state.get("value", self.value)
