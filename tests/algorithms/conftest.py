"""A small batch that has everything: turns, observations, padding, a row without a token."""

from dataclasses import fields, replace

import pytest
import torch

from minirl.types import LossInputs


@pytest.fixture
def mask() -> torch.Tensor:
    return torch.tensor(
        [
            [1, 1, 0, 1, 1, 0, 0],
            [1, 0, 0, 0, 0, 0, 0],
            [0, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 1, 1, 0],
        ],
        dtype=torch.float64,
    )


@pytest.fixture
def loss_inputs(mask: torch.Tensor) -> LossInputs:
    """Ratios from far below to far above the clip range, advantages of both signs; float64."""
    draw = torch.Generator().manual_seed(3)

    def normal() -> torch.Tensor:
        return torch.randn(mask.shape, generator=draw, dtype=torch.float64)

    old = -normal().abs() - 0.5
    return LossInputs(
        logprobs=torch.minimum(old + 0.35 * normal(), torch.tensor(-0.01)),
        old_logprobs=old,
        advantages=normal(),
        response_mask=mask,
        rollout_is_weights=normal().abs() + 0.2,
    )


def per_token_fields(inputs: LossInputs) -> dict[str, torch.Tensor]:
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return {name: value for name, value in values.items() if value is not None}


@pytest.fixture
def pack():
    """Rows [B, T] to packed [T]: the two last, padded columns are left away, masked ones stay."""

    def pack_rows(inputs: LossInputs) -> LossInputs:
        rows, width = inputs.logprobs.shape[0], inputs.logprobs.shape[1] - 1
        flat = {k: v[:, :width].flatten() for k, v in per_token_fields(inputs).items()}
        return replace(inputs, **flat, sequence_ids=torch.arange(rows).repeat_interleave(width))

    return pack_rows


@pytest.fixture
def take_rows():
    def take(inputs: LossInputs, rows: list[int]) -> LossInputs:
        return replace(inputs, **{k: v[rows] for k, v in per_token_fields(inputs).items()})

    return take
