"""The self-test passes as the code is, and fails when something small is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minirl import credit
from minirl.algorithms import ADV_ESTIMATORS, POLICY_LOSSES
from minirl.selftest import Case, Result, all_cases, compute_score, prepare, run_case
from minirl.trainer import packing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("selftest")
    prepare(folder)
    return folder


GRPO = next(case for case in all_cases() if case.name == "grpo")


def result(success: float) -> Result:
    return Result(case=GRPO, start=0.5, success=success, steps=45, seconds=1.0)


def test_every_estimator_and_every_loss_is_tried() -> None:
    tried = [(case.kind, case.name) for case in all_cases()]
    expected = [("estimator", name) for name in ADV_ESTIMATORS]
    assert tried == expected + [("loss", name) for name in POLICY_LOSSES]


def test_what_passes_is_95_percent_of_the_optimum() -> None:
    assert result(0.95).passed and not result(0.949).passed
    row = {"level": 1.0}
    assert compute_score("selftest", "?t3a3", "3", row, spread=5.0)["score"] == 6
    assert compute_score("selftest", "?t3a2", "3", row)["acc"] == 0


def test_it_passes(folder: Path) -> None:
    found = run_case(GRPO, folder)
    assert 0.3 < found.start < 0.7 and found.passed, found


def wrong_sign(monkeypatch: Any) -> None:
    estimate = credit.estimate

    def negative(*arguments: Any) -> Any:
        advantages, returns = estimate(*arguments)
        return -advantages, returns

    monkeypatch.setattr(credit, "estimate", negative)


def shifted_mask(monkeypatch: Any) -> None:
    pack = packing.pack

    def shifted(*arguments: Any) -> Any:
        batch = pack(*arguments)
        batch.response_mask = batch.response_mask.roll(1)
        return batch

    monkeypatch.setattr(packing, "pack", shifted)


def mixed_groups(monkeypatch: Any) -> None:
    advantage_inputs = credit.advantage_inputs

    def mixed(*arguments: Any, **options: Any) -> Any:
        inputs = advantage_inputs(*arguments, **options)
        order = torch.randperm(len(inputs.group_ids), generator=torch.Generator().manual_seed(0))
        return replace(inputs, group_ids=inputs.group_ids[order])

    monkeypatch.setattr(credit, "advantage_inputs", mixed)


@pytest.mark.parametrize("plant", [wrong_sign, shifted_mask, mixed_groups])
def test_it_fails_with(folder: Path, monkeypatch: Any, plant: Callable[[Any], None]) -> None:
    plant(monkeypatch)
    case = Case(kind="planted", name=plant.__name__, settings=GRPO.settings)
    found = run_case(case, folder)
    assert not found.passed, found
