import json
import logging
import math
import resource

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minirl import jsonl
from minirl.config import ConfigError
from minirl.tracking import (
    TRACKERS,
    Tracking,
    _mlflow_name,
    read_metrics,
    to_json,
)

CONFIG = {"trainer": {"seed": 0}}


def strict_loads(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def log_steps(run_dir, steps, names=("jsonl",), resumed_at=None) -> None:
    with Tracking(names, run_dir, CONFIG, resumed_at=resumed_at) as tracking:
        for step in steps:
            tracking.log(step, {"loss": step + (0.5 if resumed_at else 0.0)})


def test_jsonl_is_on_disk_after_each_step(tmp_path) -> None:
    with Tracking(["jsonl"], tmp_path / "new", CONFIG) as tracking:
        tracking.log(0, {"val-core/x/acc/mean@1": 0.25})
        tracking.log(1, {"loss": 2.0})
        rows = [strict_loads(s) for s in (tmp_path / "new/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["loss"] == 2.0
    assert 0 <= rows[0]["seconds"] <= rows[1]["seconds"]


def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path) -> None:
    with Tracking(["jsonl"], tmp_path, CONFIG) as tracking:
        tracking.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5)})
    row = strict_loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["a"], row["b"], row["c"], row["d"]) == ("NaN", "Infinity", "-Infinity", 0.5)
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back["a"]) and (back["b"], back["c"]) == (math.inf, -math.inf)


def test_what_is_json_already_is_written_as_it_is(monkeypatch) -> None:
    row = {"step": 1, "response_ids": [1, 2], "advantages": [0.5, -1e-8], "error": None}
    monkeypatch.setattr(jsonl, "_plain", None)  # a copy of every token of a trajectory
    assert json.loads(to_json(row)) == row


def test_resume_drops_later_steps_and_time_goes_on(tmp_path) -> None:
    log_steps(tmp_path, range(5))
    rows = [row | {"seconds": 100.0 * row["step"]} for row in read_metrics(tmp_path)]
    (tmp_path / "metrics.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    log_steps(tmp_path, [3, 4, 5], resumed_at=2)
    rows = read_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in rows] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3.5),
        (4, 4.5),
        (5, 5.5),
    ]
    assert 200 <= rows[3]["seconds"] < 300


def test_resume_after_a_line_was_cut_off(tmp_path) -> None:
    log_steps(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    log_steps(tmp_path, [3], resumed_at=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_line_for_which_the_disk_has_no_room_spoils_no_other(tmp_path) -> None:
    many = {f"metric_{i}": i / 7 for i in range(2000)}  # more than a file buffers
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Tracking(["jsonl"], tmp_path, CONFIG) as tracking:
        tracking.log(1, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            tracking.log(2, many)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        tracking.log(3, many)
    rows = read_metrics(tmp_path)
    assert [(row["step"], len(row)) for row in rows] == [(1, 2), (3, 2003)]
    assert rows[1]["tracking/failures"] == 1


def test_a_broken_line_is_named(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(tmp_path)


def test_a_new_run_keeps_the_old_file(tmp_path) -> None:
    for steps in ([1, 2, 3], [1, 2], [1]):
        log_steps(tmp_path, steps)
    counts = {f.name: len(f.read_text().splitlines()) for f in tmp_path.glob("metrics*")}
    assert counts == {"metrics.1.jsonl": 3, "metrics.2.jsonl": 2, "metrics.jsonl": 1}


def test_a_step_is_logged_once(tmp_path) -> None:
    with Tracking(["jsonl"], tmp_path, CONFIG, resumed_at=4) as tracking:
        with pytest.raises(ValueError, match="step 4 after step 4"):
            tracking.log(4, {})
        tracking.log(5, {})


def test_tensorboard_holds_no_step_of_an_earlier_run(tmp_path) -> None:
    log_steps(tmp_path, range(1, 5), ["tensorboard"])
    log_steps(tmp_path, range(1, 3), ["tensorboard"])
    for name, last in (("tensorboard", 2), ("tensorboard.1", 4)):
        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert [event.step for event in events.Scalars("loss")] == list(range(1, last + 1))


def test_tensorboard_holds_each_step_once_after_a_resumption(tmp_path) -> None:
    log_steps(tmp_path, range(1, 5), ["tensorboard"])
    log_steps(tmp_path, [3, 4], ["tensorboard"], resumed_at=2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("loss")]
    assert scalars == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_console_is_one_line_printed_and_logged(tmp_path, caplog, capsys) -> None:
    caplog.set_level(logging.INFO)
    with Tracking(["console"], tmp_path, CONFIG) as tracking:
        tracking.log(3, {"loss": 0.123456, "timing_s/gen": 12.0})
    assert caplog.messages == ["step:3 - loss:0.1235 - timing_s/gen:12"]
    assert capsys.readouterr().out == "step:3 - loss:0.1235 - timing_s/gen:12\n"


def test_unknown_tracker_names_the_nearest(tmp_path) -> None:
    with pytest.raises(
        ValueError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"
    ):
        Tracking(["tensorbord"], tmp_path, CONFIG)


def test_trackers_are_closed_when_a_later_one_does_not_open(tmp_path) -> None:
    closed = []

    class Recording:
        def __init__(self, run_dir, config, resumed_at) -> None: ...
        def log(self, step, metrics) -> None: ...
        def close(self) -> None:
            closed.append(self)

    class Failing(Recording):
        def __init__(self, run_dir, config, resumed_at) -> None:
            raise RuntimeError("no connection")

    tracking = Tracking([], tmp_path, CONFIG)
    tracking._factories = {"recording": Recording, "failing": Failing}
    with pytest.raises(
        ConfigError, match=r"trainer.logger: failing cannot be opened: .*no connection"
    ):
        tracking.__enter__()
    assert len(closed) == 1


def test_registered_trackers() -> None:
    assert list(TRACKERS) == ["console", "jsonl", "mlflow", "swanlab", "tensorboard", "wandb"]


def test_mlflow_gets_names_that_it_takes() -> None:
    name = _mlflow_name("val-core/openai/gsm8k+x/acc/mean@8")
    assert name == "val-core/openai/gsm8k_x/acc/mean_at_8"
