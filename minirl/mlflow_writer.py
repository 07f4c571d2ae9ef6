"""The program that writes trajectories to MLflow; tracing.py starts it and talks to it.

    python -P mlflow_writer.py STORE [--check]

STORE is JSON: `tracking_uri`, `experiment_name`, `run_dir`. Jobs come on stdin, a line each
(`{"file", "step", "split"}`), and are answered on stdout (`{"step", "num_written", "error"}`). It
imports nothing of minirl, so it is small.
"""

import json
import os
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any, TextIO

PACKAGES = ("mlflow", "sqlalchemy", "alembic")
"""Of the extra `mlflow`."""
END = "end"
"""The last line of the jobs. Where they end without it, their sender has died."""
PAGE = 500  # traces that MLflow lists at once
LONG = {"text", "observation", "arguments", "result"}
"""Of a record: in a span's inputs and outputs, so not in its attributes."""

Row = Mapping[str, Any]


def store_options(
    run_dir: Path, tracking_uri: str | None, experiment_name: str | None
) -> dict[str, str]:
    """STORE, of what rollout.trace.mlflow says."""
    run_dir = run_dir.resolve()
    return {
        "tracking_uri": tracking_uri or f"sqlite:///{run_dir / 'mlflow.db'}",
        "experiment_name": experiment_name or run_dir.name,
        "run_dir": str(run_dir),
    }


def open_experiment(tracking_uri: str, experiment_name: str, run_dir: str) -> str:
    """Use the store from now on, in this process, and return the experiment's id.

    A new experiment in a local database keeps its files in the run directory.
    """
    import mlflow

    mlflow.set_tracking_uri(tracking_uri)
    if tracking_uri.startswith("sqlite") and not mlflow.get_experiment_by_name(experiment_name):
        artifacts = Path(run_dir, "mlflow_artifacts").as_uri()
        mlflow.create_experiment(experiment_name, artifact_location=artifacts)
    return mlflow.set_experiment(experiment_name).experiment_id


class TraceWriter:
    """Writes rows of trajectory files as traces into one experiment."""

    def __init__(self, store: Mapping[str, str]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._client: Any = None
        self._store, self._run_dir = store, Path(store["run_dir"])

    def write(self, file: str, step: int, split: str) -> int:
        """One trace per trajectory of the split, in place of those that the run has of that step;
        how many have arrived."""
        if self._client is None:  # tried again at the next step when it fails
            self._experiment = open_experiment(**self._store)
            self._client = self._mlflow.MlflowClient()
        known = {"minirl_run": str(self._run_dir), "step": str(step), "split": split}
        if old := list(self._find(known)):
            self._client.delete_traces(self._experiment, trace_ids=old)
        tags = known | {"minirl_write": uuid.uuid4().hex}
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["split"] == split:
                self._write_trace(row, tags)
        self._mlflow.flush_trace_async_logging()
        return len(list(self._find(tags)))  # MLflow logs what fails, and does not raise it

    def _find(self, tags: Mapping[str, str]) -> Iterator[str]:
        query = " AND ".join(f"tags.{name} = {_quoted(value)}" for name, value in tags.items())
        page, token = None, None
        while page is None or token:
            page = self._client.search_traces(
                locations=[self._experiment],
                filter_string=query,
                max_results=PAGE,
                include_spans=False,
                page_token=token,
            )
            yield from (trace.info.trace_id for trace in page)
            token = page.token

    def _write_trace(self, row: Row, tags: Mapping[str, str]) -> None:
        start, end = _nanoseconds(row, row)
        run_id = self._run_dir / "mlflow_run_id"  # of the tracker
        root = self._mlflow.start_span_no_context(
            f"{row['uid']}/{row['sample_index']}",
            span_type="AGENT",
            inputs={"prompt": row["prompt"]},
            attributes=_attributes(row, "step", "split", "uid", "sample_index", "data_source"),
            tags={**tags, "uid": row["uid"], "termination": str(row["termination"])},
            metadata={"mlflow.sourceRun": run_id.read_text()} if run_id.exists() else None,
            experiment_id=self._experiment,
            start_time_ns=start,
        )
        for name, kind, part, inputs, outputs, is_ok in spans(row):
            span_start, span_end = _nanoseconds(row, part)
            span = self._mlflow.start_span_no_context(
                name,
                span_type=kind,
                parent_span=root,
                inputs=inputs,
                attributes={k: v for k, v in part.items() if k not in LONG},
                start_time_ns=span_start,
            )
            span.end(outputs=outputs, status="OK" if is_ok else "ERROR", end_time_ns=span_end)
        outcome = _attributes(row, "response", "termination", "reward", "reward_breakdown", "error")
        root.set_attributes(_attributes(row, "metrics", "ground_truth", "answer"))
        root.end(outputs=outcome, status="ERROR" if row["error"] else "OK", end_time_ns=end)


def spans(row: Row) -> Iterator[tuple[str, str, Row, Any, Any, bool]]:
    """(name, type, the record with its times, inputs, outputs, whether it went well) of every turn,
    tool call and reward."""
    heard = row["prompt"]
    for number, turn in enumerate(row["turns"]):
        details = {
            **turn,
            "weight_version": row["weight_versions"][number],
            "reward": row["turn_rewards"][number],
        }
        is_ok = turn["finish_reason"] != "abort"
        yield f"turn {number}", "LLM", details, {"text": heard}, {"text": turn["text"]}, is_ok
        heard = turn["observation"]
    for call in row["tool_calls"]:
        outcome = {key: call[key] for key in ("result", "status", "reward")}
        inputs, is_ok = _parsed(call["arguments"]), call["status"] == "ok"
        yield call["name"] or "(no name)", "TOOL", call, inputs, outcome, is_ok
    for reward in row["rewards"]:
        outcome = {"value": reward["value"]}
        if reward["name"] == "outcome":
            outcome |= row["reward_breakdown"]
        is_ok = reward["value"] is not None
        yield f"reward {reward['name']}", "EVALUATOR", reward, None, outcome, is_ok


def _quoted(value: str) -> str:
    """For MLflow's queries, which know both quotes and no way to write one inside its like."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def _attributes(row: Row, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _nanoseconds(row: Row, part: Row) -> tuple[int, int]:
    """Start and end in Unix nanoseconds; of what was not measured, those of the conversation."""
    timed = row if part["start_s"] is None else part
    start, end = (row["started_at"] + (timed[key] or 0.0) for key in ("start_s", "end_s"))
    return int(start * 1e9), int(end * 1e9)


def _parsed(arguments: str) -> Any:
    """As an object where they are one: MLflow shows it by key."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"arguments": arguments}


def serve(store: Mapping[str, str], answers: TextIO) -> None:
    """Answer every job until END."""
    writer, jobs = TraceWriter(store), Queue[str]()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while (line := jobs.get()) != END:
        job = json.loads(line)
        try:
            answer = {"num_written": writer.write(**job), "error": "MLflow did not take them"}
        except Exception as error:  # whatever a store raises: told, counted, tried at the next job
            traceback.print_exc()
            answer = {"num_written": 0, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"step": job["step"], **answer}), file=answers, flush=True)


def _read(jobs: "Queue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line.strip())
        if line.strip() == END:
            return
    os._exit(1)  # who gives the jobs is gone


def main(store: dict[str, str], check: bool) -> None:
    """The program. What MLflow prints does not get between the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not check:
        serve(store, answers)
        return
    try:
        open_experiment(**store)
    except Exception as error:  # of any kind: the last line is told to the user
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), "--check" in sys.argv)
