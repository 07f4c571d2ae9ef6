import json
import sys
from pathlib import Path

import pytest

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
