"""The trackers that are packages of others: what they wrote, read back from their own files."""

import importlib.util
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minirl.config import ConfigError
from minirl.tracking import Tracking, check_trackers

METRICS = [(1, 0.25), (2, 0.5), (3, 0.75)]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs pip install 'minirl[{package}]'")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))  # their settings, and where they would put more


def run_twice(name: str, run_dir: Path) -> None:
    """Three steps; the run stopped after the second, whose checkpoint is that of the first."""
    config = {"trainer": {"seed": 7}}
    for resumed_at, steps in [(None, METRICS[:2]), (1, METRICS[1:])]:
        with Tracking([name], run_dir, config, resumed_at=resumed_at) as tracking:
            for step, value in steps:
                tracking.log(step, {"critic/score/mean": value})
        assert tracking.num_failures == 0
        second = int(time.time())
        while int(time.time()) == second:  # both name their folders by it
            time.sleep(0.05)


def records(file: Path) -> Iterator[bytes]:
    """Of a log in LevelDB's framing, behind a header of seven bytes."""
    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@needs("wandb")
def test_wandb_writes_every_step_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    run_twice("wandb", tmp_path / "run")
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for file in sorted(
        (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime
    ):
        rows, header = [], None
        for content in records(file):
            record = Record.FromString(content)
            if record.HasField("run"):
                header = record.run
            if record.HasField("history"):
                items = record.history.item
                row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items}
                rows.append((row["step"], row["critic/score/mean"]))
        runs.append(rows)
        assert header and header.display_name == "run"
        assert header.run_id == (tmp_path / "run" / "wandb_run_id").read_text()
        assert {u.key: json.loads(u.value_json) for u in header.config.update}["trainer"] == {
            "seed": 7
        }
    assert runs == [METRICS[:2], METRICS[1:]]


@needs("swanlab")
def test_swanlab_writes_every_step_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    run_twice("swanlab", tmp_path / "run")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    runs = []
    for file in sorted(
        (tmp_path / "run" / "swanlab").glob("run-*/*.swanlab"), key=os.path.getmtime
    ):
        found = [Record.FromString(content) for content in records(file)]
        [start] = [record.start for record in found if record.HasField("start")]
        assert start.name == "run"
        assert start.id == (tmp_path / "run" / "swanlab_run_id").read_text()
        scalars = [record.scalar for record in found if record.HasField("scalar")]
        assert {scalar.key for scalar in scalars} == {"critic/score/mean"}
        runs.append([(scalar.step, scalar.value.number) for scalar in scalars])
    assert runs == [METRICS[:2], METRICS[1:]]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "swanlab"])
def test_a_tracker_that_is_not_installed_says_what_to_type(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == name else real(n))
    with pytest.raises(ConfigError) as caught:
        check_trackers(["jsonl", name])
    assert str(caught.value) == (
        f"trainer.logger: got {name!r}, but it is not installed; pip install 'minirl[{name}]'"
    )


class Broken:
    """A service that is gone."""

    def __init__(self, *_: Any) -> None: ...

    def log(self, step: int, metrics: Any) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = Tracking(["jsonl"], tmp_path, {})
    tracking._factories = {"broken": Broken, **tracking._factories}
    with tracking:
        tracking.log(1, {"loss": 1.0})
        tracking.log(2, {"loss": 0.5})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [1.0, 0.5]
    assert [row.get("tracking/failures") for row in rows] == [None, 1]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == [
        "trainer.logger: broken could not take step 1: ConnectionError('no route to host')",
        "trainer.logger: broken could not take step 2: ConnectionError('no route to host')",
        "trainer.logger: broken could not be closed: ConnectionError('no route to host')",
    ]
