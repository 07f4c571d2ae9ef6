"""Where the metrics of a run go, and the files of trajectories that it leaves behind."""

import importlib.util
import itertools
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from minirl.config import ConfigError
from minirl.registry import Registry
from minirl.types import Trajectory

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
PACKAGES = {"wandb", "mlflow", "swanlab"}
"""Trackers that are packages of the same name, installed by whoever wants them."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a name of trainer.logger that is not registered or not installed."""
    for name in names:
        try:
            TRACKERS.find(name)
        except ValueError as error:
            raise ConfigError(f"trainer.logger: {error}") from error
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise _not_installed(name)


class Tracking:
    """Every tracker named in `trainer.logger`, open inside `with`.

    Opening raises ValueError for a name that is not registered, and ConfigError with the line to
    type when its package is not installed. `run_dir` is made if it is not there.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: str | Path,
        config: Mapping[str, Any],
        *,
        resumed_at: int | None = None,
    ) -> None:
        self._factories = [TRACKERS.find(name) for name in names]
        self._run_dir, self._config, self._resumed_at = Path(run_dir), config, resumed_at
        self._last_step = -1 if resumed_at is None else resumed_at
        self._trackers: list[Tracker] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for factory in self._factories:
                tracker = factory(self._run_dir, self._config, self._resumed_at)
                stack.callback(tracker.close)
                self._trackers.append(tracker)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record all of a step at once; ValueError if `step` is not later than the one before."""
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: log a step once, in order")
        self._last_step = step
        for tracker in self._trackers:
            tracker.log(step, metrics)


@TRACKERS.register("console")
class ConsoleTracker:
    """One log line per step with every metric, as verl's console logger has it."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"step:{step}"] + [f"{name}:{value:.4g}" for name, value in metrics.items()]
        logger.info(" - ".join(parts))

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
            _replace(path, [to_json(row) for row in kept])
        elif path.exists():
            path.rename(_free_name(path))
        self._start = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = round(time.monotonic() - self._start, 3)
        self._file.write(to_json({"step": step, "seconds": seconds, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Event files in `<run_dir>/tensorboard`; the x axis is the step."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)
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
    """Weights & Biases; its own settings (WANDB_MODE, WANDB_PROJECT, ...) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        wandb = _third_party("wandb")
        self._run = wandb.init(
            name=run_dir.name,
            dir=str(run_dir),
            id=_run_id(run_dir, "wandb", resumed_at),
            resume="allow",
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("mlflow")
class MlflowTracker:
    """MLflow; its own settings (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        self._mlflow = _third_party("mlflow")
        id_file = run_dir / "mlflow_run_id"
        if resumed_at is not None and id_file.exists():
            self._mlflow.start_run(run_id=id_file.read_text())
            return
        run = self._mlflow.start_run(run_name=run_dir.name)
        id_file.write_text(run.info.run_id)
        self._mlflow.log_dict(json.loads(to_json(config)), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_mlflow_name(k): v for k, v in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


@TRACKERS.register("swanlab")
class SwanlabTracker:
    """SwanLab; its own settings (SWANLAB_MODE, SWANLAB_PROJ_NAME, ...) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        self._swanlab = _third_party("swanlab")
        self._swanlab.init(
            experiment_name=run_dir.name,
            logdir=str(run_dir / "swanlab"),
            id=_run_id(run_dir, "swanlab", resumed_at),
            resume="allow",
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class TrajectoryWriter:
    """`<run_dir>/trajectories/step_000012.jsonl`: one strict JSON object per trajectory."""

    def __init__(self, run_dir: str | Path) -> None:
        self._dir = Path(run_dir) / "trajectories"

    def write(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        decode: Callable[[list[int]], str],
    ) -> Path:
        """Put the trajectories of a split ("train", "val") into the file of the step.

        Each line holds `step`, `split`, every field of Trajectory, and `prompt` and `response`
        decoded. What the file holds of other splits stays; of the same split it is replaced, so a
        step that is run again after a resumption is not there twice. The file is written beside
        and renamed, so it is always whole.
        """
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"step_{step:06d}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [line for line in lines if json.loads(line)["split"] != split]
        for trajectory in trajectories:
            text = {
                "prompt": decode(trajectory.prompt_ids),
                "response": decode(trajectory.response_ids),
            }
            lines.append(to_json({"step": step, "split": split, **asdict(trajectory), **text}))
        _replace(path, lines)
        return path


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


def to_json(value: Any) -> str:
    """Strict JSON on one line: non-finite floats as in JsonlTracker, arrays as lists, and whatever
    JSON does not know as its `str`."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _replace(path: Path, lines: Sequence[str]) -> None:
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)


def _free_name(path: Path) -> Path:
    candidates = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def _third_party(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # it is installed; something that it imports is not
        raise _not_installed(name) from error


def _not_installed(name: str) -> ConfigError:
    return ConfigError(f"trainer.logger: got {name!r}, but it is not installed; pip install {name}")


def _run_id(run_dir: Path, tracker: str, resumed_at: int | None) -> str:
    """The id that a resumed run continues under; 21 characters, which is what SwanLab wants."""
    file = run_dir / f"{tracker}_run_id"
    if resumed_at is None or not file.exists():
        file.write_text(uuid.uuid4().hex[:21])
    return file.read_text()


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and `_-./ :` only."""
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"))
