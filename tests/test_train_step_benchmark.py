import argparse
import json
import subprocess
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


def test_why_no_peak_was_measured_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho out of memory >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(subprocess.CalledProcessError):
        train_step._peak_of("chunks", argparse.Namespace(words=9, max_tokens=9))
    assert capfd.readouterr().err == "out of memory\n"
