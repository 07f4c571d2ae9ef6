"""The critic's loss and its explained variance."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_range: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) per token.

    Any shape, all alike; `clip_range` is eps (`critic.cliprange_value`), None does not clip.
    Returns the loss, 0 where the mask is, and per-token metrics as `policy_loss` does.

    Paper: Schulman et al., 2017 (PPO), in the form of OpenAI's baselines.
    """
    masked = response_mask == 0
    values = values.masked_fill(masked, 0.0)
    old_values, returns = old_values.masked_fill(masked, 0.0), returns.masked_fill(masked, 0.0)
    loss = near_loss = (values - returns).square()
    if clip_range is not None:
        near = values.clamp(old_values - clip_range, old_values + clip_range)
        near_loss = (near - returns).square()
    clipped = (near_loss > loss).to(loss.dtype)
    metrics = {"critic/vf_clipfrac": clipped, "critic/vpred_mean": values.detach()}
    return 0.5 * torch.maximum(loss, near_loss), metrics


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the sampled tokens; nan when the returns do not vary."""
    sampled = response_mask > 0
    residual, target = (returns - values)[sampled].double(), returns[sampled].double()
    if target.numel() < 2 or target.max() == target.min():
        return float("nan")
    return float(1 - residual.var() / target.var())
