"""Where the metrics of a run go."""

import importlib.util
import itertools
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

from minirl.config import ConfigError
from minirl.jsonl import replace_lines, to_json
from minirl.mlflow_writer import open_experiment, store_options
from minirl.registry import Registry

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One destination; `TRACKERS.register("name")` on a class with this constructor makes another.

    `resumed_at` is the last step that is part of this run already: what was recorded of later steps
    belongs to a run that stopped before its next checkpoint, and has to go. None = a new run.
    """

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None
    ) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


TRACKERS: Registry[Callable[..., Tracker]] = Registry("tracker")
PACKAGES = {"tensorboard", "wandb", "mlflow", "swanlab"}
"""Trackers that are packages of the same name; the extra that brings each has it, too."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a name of trainer.logger that is not registered or not installed."""
    for name in names:
        try:
            TRACKERS.find(name)
        except ValueError as error:
            raise ConfigError(f"trainer.logger: {error}") from error
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger: got {name!r}, but it is not installed; "
                f"pip install 'minirl[{name}]'"
            )


class Tracking:
    """Every tracker named in `trainer.logger`, open inside `with`.

    Raises ValueError for a name that is not registered, and ConfigError for one that cannot be
    opened. `run_dir` is made if it is not there.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: str | Path,
        config: Mapping[str, Any],
        *,
        resumed_at: int | None = None,
    ) -> None:
        self._factories = {name: TRACKERS.find(name) for name in names}
        self._run_dir, self._config, self._resumed_at = Path(run_dir), config, resumed_at
        self._last_step = -1 if resumed_at is None else resumed_at
        self._trackers: dict[str, Tracker] = {}
        self._stack = ExitStack()
        self.num_failures = 0

    def __enter__(self) -> Self:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for name, factory in self._factories.items():
                try:
                    tracker = factory(self._run_dir, self._config, self._resumed_at)
                except Exception as error:  # of whatever kind a package has
                    raise ConfigError(
                        f"trainer.logger: {name} cannot be opened: {type(error).__name__}: {error}"
                    ) from error
                stack.callback(self._attempt, name, "be closed", tracker.close)
                self._trackers[name] = tracker
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record all of a step at once; ValueError if `step` is not later than the one before.

        A tracker that fails does not end the run: it is named in a warning, and counted in
        `tracking/failures`, which the others get from the next step on.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: log a step once, in order")
        self._last_step = step
        if self.num_failures:
            metrics = {**metrics, "tracking/failures": self.num_failures}
        for name, tracker in self._trackers.items():
            self._attempt(name, f"take step {step}", tracker.log, step, metrics)

    def _attempt(self, name: str, what: str, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # a network, a disk, a service: never worth a run
            self.num_failures += 1
            logger.warning("trainer.logger: %s could not %s: %r", name, what, error)
            logger.info("trainer.logger: %s", name, exc_info=error)


@TRACKERS.register("console")
class ConsoleTracker:
    """One line per step with every metric, as verl's console logger has it; in the log too."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"step:{step}"] + [f"{name}:{value:.4g}" for name, value in metrics.items()]
        line = " - ".join(parts)
        logger.info("%s", line)
        print(line, flush=True)

    def close(self) -> None:
        pass


@TRACKERS.register("jsonl")
class JsonlTracker:
    """`metrics.jsonl`: one strict JSON object per step, on disk when `log` returns.

    `{"step": 12, "seconds": 340.5, "critic/score/mean": 0.5, ...}`; `seconds` is the time that the
    run has been at work, over all resumptions. Numbers that JSON does not have are the strings
    "NaN", "Infinity" and "-Infinity", which Python's `float` and JavaScript's `Number` read.
    `read_metrics` reads it back. A new run keeps the file of an old one as `metrics.1.jsonl`.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        path = run_dir / "metrics.jsonl"
        kept: list[dict[str, Any]] = []
        if resumed_at is not None and path.exists():
            kept = [row for row in read_metrics(run_dir) if row["step"] <= resumed_at]
            replace_lines(path, [to_json(row) for row in kept])
        elif path.exists():
            path.rename(free_name(path))
        self._start = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = round(time.monotonic() - self._start, 3)
        line = to_json({"step": step, "seconds": seconds, **metrics}) + "\n"
        end = self._file.seek(0, os.SEEK_END)
        if self._file.write(line.encode()) < len(line):
            self._file.truncate(end)  # half a line would spoil the next one
            raise OSError("only a part of the line was written: is the disk full?")

    def close(self) -> None:
        self._file.close()


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Event files in `<run_dir>/tensorboard`; the x axis is the step. A new run keeps those of an
    old one in `tensorboard.1`, since TensorBoard draws all of a folder as one curve."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        folder = run_dir / "tensorboard"
        if resumed_at is None and folder.exists():
            folder.rename(free_name(folder))
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._writer.add_text(
            "config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@TRACKERS.register("wandb")
class WandbTracker:
    """Weights & Biases; its own settings (WANDB_MODE, WANDB_PROJECT, ...) hold.

    The x axis is `step`, not wandb's own count, which takes no step twice: a run that is resumed
    from a checkpoint repeats those after it.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            name=run_dir.name,
            dir=str(run_dir),
            id=_run_id(run_dir, "wandb", resumed_at),
            resume="allow",
            config=dict(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("mlflow")
class MlflowTracker:
    """MLflow: the store of rollout.trace.mlflow, whose traces then belong to the same run; without
    it MLflow's own settings (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        trace = (config.get("rollout") or {}).get("trace") or {}
        if trace.get("mlflow"):
            open_experiment(**store_options(run_dir, **trace["mlflow"]))
        id_file = run_dir / "mlflow_run_id"
        known = id_file.read_text() if resumed_at is not None and id_file.exists() else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else run_dir.name)
        self._run_id = run.info.run_id
        if not known:
            id_file.write_text(self._run_id)
            self._mlflow.log_dict(json.loads(to_json(config)), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {_mlflow_name(name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(numbers, step=step, run_id=self._run_id)

    def close(self) -> None:
        self._mlflow.end_run()


@TRACKERS.register("swanlab")
class SwanlabTracker:
    """SwanLab; its own settings (SWANLAB_MODE, SWANLAB_PROJ_NAME, ...) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        self._swanlab = importlib.import_module("swanlab")
        self._swanlab.init(
            name=run_dir.name,
            log_dir=str(run_dir / "swanlab"),
            id=_run_id(run_dir, "swanlab", resumed_at),
            resume="allow",
            config=json.loads(to_json(config)),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, with non-finite numbers as floats again.

    A last line that a crash cut off is left out. Raises ValueError with file and line for others.
    """
    path = Path(run_dir) / "metrics.jsonl"
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error}); delete the line") from error
        rows.append({k: float(v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def free_name(path: Path) -> Path:
    """Beside `path`, for what an earlier run left there: `metrics.1.jsonl`."""
    candidates = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def _run_id(run_dir: Path, tracker: str, resumed_at: int | None) -> str:
    """The id that a resumed run continues under; 21 characters, which is what SwanLab wants."""
    file = run_dir / f"{tracker}_run_id"
    if resumed_at is None or not file.exists():
        file.write_text(uuid.uuid4().hex[:21])
    return file.read_text()


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and `_-./ :` only."""
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"))
