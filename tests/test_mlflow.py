"""MLflow, the package itself, on a SQLite file: metrics and traces, in one run."""

import importlib.util
import json
import math
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from minirl.config import Config, ConfigError, load_config
from minirl.mlflow_writer import TraceWriter, store_options
from minirl.tracing import Traces, TrajectoryWriter, check_traces
from minirl.tracking import Tracking
from minirl.types import RewardRecord, TokenOutput, ToolCallRecord, Trajectory

missing = [p for p in ("mlflow", "alembic", "sqlalchemy") if not importlib.util.find_spec(p)]
NAME = "bob's"
"""Of the run. What tells its traces apart is in MLflow's queries, which have quotes."""
needs_mlflow = pytest.mark.skipif(bool(missing), reason="needs pip install 'minirl[mlflow]'")


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


def make_config(folder: Path, *overrides: str) -> Config:
    return load_config(
        ["model.path=m", f"trainer.default_local_dir={folder}", f"trainer.experiment_name={NAME}",
         "rollout.trace.mlflow={}", *overrides]
    )  # fmt: skip


def make_trajectory(index: int, zero: float) -> Trajectory:
    """Two turns with a call between them; the second sample fails in its tool."""
    error = "Traceback: LookupError" if index else None
    trajectory = Trajectory(
        prompt_ids=[104, 105], uid="p0", sample_index=index, reward=None if error else 1.0,
        reward_breakdown={"acc": 1.0}, termination="error" if error else "stop", error=error,
        start=zero + 0.5, end=zero + 9.0,
    )  # fmt: skip
    for token, start in ((65, 1.0), (66, 6.0)):
        trajectory.append_sampled(
            TokenOutput(
                token_ids=[token], logprobs=[-0.5], finish_reason="stop", server=index,
                start=zero + start, end=zero + start + 0.5, num_cached_tokens=3, weight_version=4,
            )
        )  # fmt: skip
        if token == 65:
            trajectory.append_observation([67])
    trajectory.tool_calls.append(
        ToolCallRecord(
            turn=0, name="add", arguments='{"a": 1}', result="3",
            status="error" if error else "ok", start=zero + 3, seconds=2,
        )
    )  # fmt: skip
    if not error:
        record = RewardRecord(name="outcome", value=1.0, start=zero + 7, end=zero + 8)
        trajectory.rewards.append(record)
    return trajectory


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def lose_what_comes(traces: Traces, database: Path) -> None:
    """The store takes traces from now on, and does not keep them."""
    assert traces._mlflow
    while traces._mlflow._pending:
        time.sleep(0.05)
    delete = "DELETE FROM trace_info WHERE request_id = NEW.request_id"
    with sqlite3.connect(database) as connection:
        connection.execute(f"CREATE TRIGGER lose AFTER INSERT ON trace_info BEGIN {delete}; END")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, float, Traces]:
    """A run that logged steps 1 and 2, stopped, and began again after step 1."""
    config = make_config(tmp_path_factory.mktemp("runs"))
    run_dir, zero = config.trainer.run_dir, time.perf_counter()
    metrics = [{"critic/score/mean": step / 4, "acc/mean@8": math.nan} for step in range(4)]
    with Tracking(["mlflow"], run_dir, asdict(config)) as tracking:
        tracking.log(1, metrics[1])
        tracking.log(2, metrics[2])
    tracking = Tracking(["mlflow"], run_dir, asdict(config), resumed_at=1)
    with tracking, Traces(config, decode) as traces:
        for step in (1, 2, 2):  # the last one as after a resumption
            trajectories = [make_trajectory(index, zero) for index in range(2)]
            traces.write(step, "train", trajectories, zero)
        lose_what_comes(traces, run_dir / "mlflow.db")
        traces.write(3, "train", trajectories, zero)
        tracking.log(2, metrics[2])
        tracking.log(3, metrics[3])
    assert tracking.num_failures == 0
    return config, time.time() - time.perf_counter() + zero, traces


def client_of(config: Config) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{config.trainer.run_dir.resolve()}/mlflow.db")


def traces_of(config: Config) -> list[Any]:
    client = client_of(config)
    experiment = client.get_experiment_by_name(NAME)
    found = client.search_traces(locations=[experiment.experiment_id], include_spans=True)
    for trace in found:
        trace.data.spans.sort(key=lambda span: span.start_time_ns)
    return sorted(found, key=lambda trace: (trace.info.tags["step"], trace.data.spans[0].name))


@needs_mlflow
def test_metrics_of_a_resumed_run_are_one_run(store: Any) -> None:
    config, _, _ = store
    client = client_of(config)
    [experiment] = [e for e in client.search_experiments() if e.name == NAME]
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (NAME, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert {(m.step, m.value) for m in history} == {(1, 0.25), (2, 0.5), (3, 0.75)}
    assert "acc/mean_at_8" in run.data.metrics
    file = client.download_artifacts(run.info.run_id, "config.json")
    assert json.loads(Path(file).read_text())["trainer"]["experiment_name"] == NAME


@needs_mlflow
def test_a_trace_per_trajectory_with_a_span_for_all_that_took_time(store: Any) -> None:
    config, started_at, _ = store
    good, bad = [t for t in traces_of(config) if t.info.tags["step"] == "1"]
    spans = [(s.name, s.span_type, s.status.status_code.value) for s in good.data.spans]
    assert spans == [
        ("p0/0", "AGENT", "OK"), ("turn 0", "LLM", "OK"), ("add", "TOOL", "OK"),
        ("turn 1", "LLM", "OK"), ("reward outcome", "EVALUATOR", "OK"),
    ]  # fmt: skip
    times = [
        (s.start_time_ns / 1e9 - started_at, s.end_time_ns / 1e9 - started_at)
        for s in good.data.spans
    ]
    expected = [(0.5, 9.0), (1.0, 1.5), (3.0, 5.0), (6.0, 6.5), (7.0, 8.0)]
    assert times == [pytest.approx(pair, abs=0.2) for pair in expected]  # of the clock's own drift
    root, first, call, second, reward = good.data.spans
    assert all(span.parent_id == root.span_id for span in (first, second, call, reward))
    assert (root.inputs, root.outputs["response"]) == ({"prompt": "hi"}, "ACB")
    assert (first.inputs, first.outputs) == ({"text": "hi"}, {"text": "A"})
    assert (second.inputs, second.outputs) == ({"text": "C"}, {"text": "B"})
    assert (call.inputs, call.outputs["result"]) == ({"a": 1}, "3")
    assert reward.outputs == {"value": 1.0, "acc": 1.0}
    assert (first.attributes["num_cached_tokens"], first.attributes["weight_version"]) == (3, 4)
    run_id = (config.trainer.run_dir / "mlflow_run_id").read_text()
    assert good.info.trace_metadata["mlflow.sourceRun"] == run_id
    statuses = {s.name: s.status.status_code.value for s in bad.data.spans}
    assert statuses == {"p0/1": "ERROR", "turn 0": "OK", "turn 1": "OK", "add": "ERROR"}
    assert bad.data.spans[0].outputs["error"] == "Traceback: LookupError"


@needs_mlflow
def test_a_step_that_is_run_again_is_not_there_twice(store: Any) -> None:
    config, _, _ = store
    found = [(t.info.tags["step"], t.data.spans[0].name) for t in traces_of(config)]
    assert found == [(step, f"p0/{i}") for step in "12" for i in range(2)]


@needs_mlflow
def test_runs_of_one_name_keep_their_traces_in_one_store(tmp_path: Path) -> None:
    settings = {"tracking_uri": f"sqlite:///{tmp_path}/shared.db", "experiment_name": None}
    for user in ("anna", "bert"):
        run_dir, zero = tmp_path / user / NAME, time.perf_counter()
        trajectories = [make_trajectory(index, zero) for index in range(2)]
        file = TrajectoryWriter(run_dir, decode).write(1, "train", trajectories, zero)
        writer = TraceWriter(store_options(run_dir, **settings))
        assert writer.write(str(file), 1, "train") == 2
        experiment = writer._client.get_experiment_by_name(NAME)
        found = writer._client.search_traces(locations=[experiment.experiment_id])
    assert len(found) == 4


@needs_mlflow
def test_traces_that_did_not_arrive_are_counted(store: Any) -> None:
    """MLflow at most logs that; what counts is what can be read back."""
    assert store[2].metrics() == {"tracing/mlflow_failures": 2}


def test_a_writer_that_dies_is_told_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Traces(make_config(tmp_path), decode) as traces:
        assert traces._mlflow
        traces._mlflow._process.kill()
        traces._mlflow._process.wait()
        for step in (1, 2):
            traces.write(step, "train", [make_trajectory(0, 0.0)], 0.0)
    assert traces.metrics() == {"tracing/mlflow_failures": 2}
    assert "the process that writes" in caplog.text


@needs_mlflow
def test_a_server_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    check_traces(make_config(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_traces(make_config(tmp_path, "rollout.trace.mlflow.tracking_uri=http://127.0.0.1:9"))
    message = str(caught.value)
    assert message.startswith(
        "rollout.trace.mlflow.tracking_uri: got 'http://127.0.0.1:9', which cannot be used: "
    )
    assert "refused" in message and "\n" not in message


def test_mlflow_that_is_not_installed_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.trace.mlflow: mlflow is not .*minirl\[mlflow]"):
        check_traces(make_config(tmp_path))
    check_traces(load_config(["model.path=m", "rollout.trace=null"]))
