import argparse
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import train_step


def test_it_measures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "--parts packing phases --sequences 8 --length 64 --max-tokens 160 --repetitions 1"
    monkeypatch.setattr(sys, "argv", ["train_step", *arguments.split(), "--out=out.json"])
    train_step.main()
    results = json.loads(Path("out.json").read_text())
    packing, phases = results["packing"], results["phases"]
    assert packing["largest relative difference"] < 1e-5
    assert 0.3 < packing["share of padding"] < 0.9
    assert len(packing["seconds padded"]) == len(packing["time, padded / packed"]) == 1
    [seconds], [rate] = phases["seconds old_log_prob"], phases["tokens/s old_log_prob"]
    assert rate * seconds == pytest.approx(phases["tokens"])
    assert phases["TFLOP/s update_actor"][0] > 0


def test_why_no_peak_was_measured_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho out of memory >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(subprocess.CalledProcessError):
        train_step._peak_of("chunks", argparse.Namespace(words=9, max_tokens=9))
    assert capfd.readouterr().err == "out of memory\n"


def test_the_peak_of_the_phases_is_not_that_of_a_part_before(monkeypatch: Any) -> None:
    peak = [40.0]  # GiB, of all logits at once
    world = SimpleNamespace(device=torch.device("cpu"))

    def interleave(arms: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
        peak.append(3.0)
        return {arm: [1.0] for arm in arms}

    for name, value in {
        "_config": lambda arguments: None,
        "_batch": lambda arguments: SimpleNamespace(num_tokens=8),
        "distributed": lambda config: nullcontext(world),
        "PolicyTrainer": lambda *_: SimpleNamespace(model=None),
        "forward_flops": lambda *_: 1.0,
        "interleave": interleave,
    }.items():
        monkeypatch.setattr(train_step, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", peak.clear)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(peak) * 2**30)
    assert (
        train_step.measure_phases(argparse.Namespace(repetitions=1, two_pools=False))["peak GiB"]
        == 3.0
    )
