"""The trajectories that a run leaves to look at: `trajectories/*.jsonl`, and traces in MLflow."""

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

import msgspec

from minirl import mlflow_writer
from minirl.config import Config, ConfigError
from minirl.jsonl import replace_lines, to_json
from minirl.types import Trajectory

logger = logging.getLogger(__name__)

CHECK_S = 120.0
"""For an MLflow server to answer at the start."""
CLOSE_S = 60.0
"""For the last traces to be written; in a run that failed, a tenth of it."""

TokenValues = Callable[[Trajectory], Mapping[str, list[float]]]
"""What training has computed for each response token of a trajectory, by name."""


class Traces:
    """What rollout.trace asks for, open from a run's first step to its last.

    >>> with Traces(config, tokenizer.decode) as traces:
    ...     traces.write(12, "train", trajectories, step_start)
    """

    def __init__(self, config: Config, decode: Callable[[list[int]], str]) -> None:
        self._settings, self._seed = config.rollout.trace, config.trainer.seed
        self.writer = TrajectoryWriter(config.trainer.run_dir, decode)
        self._mlflow: MlflowProcess | None = None
        if self._settings and self._settings.mlflow:
            self._mlflow = MlflowProcess(config.trainer.run_dir, asdict(self._settings.mlflow))

    def __enter__(self) -> Self:
        if self._mlflow:
            self._mlflow.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._mlflow:
            self._mlflow.close(CLOSE_S if kind is None else CLOSE_S / 10)

    def write(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        step_start: float,
        token_values: TokenValues | None = None,
    ) -> None:
        """Keep the trajectories of some groups. Blocks; any thread, one at a time."""
        if self._settings is None or self._settings.max_samples_per_step == 0:
            return
        # Of the validation set always the same prompts, so that they can be followed over a run.
        seed = f"{self._seed}-{'' if split == 'val' else step}"
        chosen = choose_groups(trajectories, self._settings.max_samples_per_step, seed)
        file = self.writer.write(step, split, chosen, step_start, token_values)
        if self._mlflow:
            self._mlflow.send(file, step, split, len(chosen))

    def metrics(self) -> dict[str, float]:
        """Trajectories that did not get into MLflow, since the start."""
        return {"tracing/mlflow_failures": self._mlflow.num_failed} if self._mlflow else {}


def check_traces(config: Config) -> None:
    """Raise ConfigError when rollout.trace.mlflow names a store that cannot be used."""
    settings = config.rollout.trace.mlflow if config.rollout.trace else None
    if settings is None:
        return
    for package in mlflow_writer.PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"rollout.trace.mlflow: {package} is not installed; pip install 'minirl[mlflow]'"
            )
    if settings.tracking_uri is None:
        return  # a new file in the run directory
    command = _command(config.trainer.run_dir, asdict(settings), "--check")
    environment = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", **os.environ}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHECK_S
        )
        problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer within {CHECK_S:g} s"
    if problem:
        raise ConfigError(
            f"rollout.trace.mlflow.tracking_uri: got {settings.tracking_uri!r}, which cannot be "
            f"used: {problem}; name a server that runs, or null for a file in the run directory"
        )


def choose_groups(
    trajectories: Sequence[Trajectory], limit: int, seed: str
) -> Sequence[Trajectory]:
    """Whole groups, drawn by `seed`, as many as fit into `limit` trajectories, and at least one;
    in their order. -1 = all."""
    if limit < 0 or len(trajectories) <= limit:
        return trajectories
    sizes: dict[str, int] = {}
    for trajectory in trajectories:
        sizes[trajectory.uid] = sizes.get(trajectory.uid, 0) + 1
    order = list(sizes)
    random.Random(seed).shuffle(order)
    chosen, room = set(order[:1]), limit - sizes[order[0]]
    for uid in order[1:]:
        if sizes[uid] > room:
            break
        chosen.add(uid)
        room -= sizes[uid]
    return [trajectory for trajectory in trajectories if trajectory.uid in chosen]


class TrajectoryWriter:
    """`<run_dir>/trajectories/step_000012.jsonl`: one strict JSON object per trajectory."""

    def __init__(self, run_dir: str | Path, decode: Callable[[list[int]], str]) -> None:
        self._dir = Path(run_dir) / "trajectories"
        self._decode = decode

    def write(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        step_start: float,
        token_values: TokenValues | None = None,
    ) -> Path:
        """Put the trajectories of a split ("train", "val", ...) into the file of the step.

        Each line holds `step`, `split`, `started_at` (when the step began, Unix seconds), what
        `trajectory_row` gives, and the lists of `token_values`. What the file holds of other splits
        stays; of the same split it is replaced, so a step that is run again after a resumption is
        not there twice. The file is written beside and renamed, so it is always whole.
        """
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"step_{step:06d}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [line for line in lines if json.loads(line)["split"] != split]
        started_at = time.time() - time.perf_counter() + step_start
        head = {"step": step, "split": split, "started_at": started_at}
        for trajectory in trajectories:
            row = trajectory_row(trajectory, step_start, self._decode)
            values = token_values(trajectory) if token_values else {}
            lines.append(to_json({**head, **row, **values}))
        replace_lines(path, lines)
        return path


def trajectory_row(
    trajectory: Trajectory, step_start: float, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Every field of a trajectory, its texts, and its times in seconds since `step_start`.

    `prompt` and `response` are decoded; each of `turns` has the `text` that was sampled and the
    `observation` that followed it. `start_s` and `end_s`, of the conversation and of each turn,
    tool call and reward, are null where nobody measured them.
    """
    row = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    for name in ("turns", "tool_calls", "rewards"):
        row[name] = [msgspec.structs.asdict(record) for record in row[name]]
    for part in (row, *row["turns"], *row["tool_calls"], *row["rewards"]):
        start, end, seconds = part.pop("start"), part.pop("end", None), part.get("seconds", 0.0)
        end = start + seconds if end is None and start is not None else end
        part["start_s"] = None if start is None else start - step_start
        part["end_s"] = None if end is None else end - step_start
    ids, begin = trajectory.response_ids, 0
    ends = trajectory.turn_ends
    for index, (turn, end) in enumerate(zip(row["turns"], ends, strict=True)):
        following = ids[end : ends[index + 1]] if index + 1 < len(ends) else ids[end:]
        mask = trajectory.response_mask[end : end + len(following)]
        num_observed = mask.index(1) if 1 in mask else len(mask)
        turn["text"] = decode(ids[begin:end])
        turn["observation"] = decode(following[:num_observed])
        begin = end + num_observed
    row["prompt"], row["response"] = decode(trajectory.prompt_ids), decode(ids)
    return row


class MlflowProcess:
    """Writes what is in trajectory files to MLflow, in a process of its own (mlflow_writer.py).

    There, because making spans and storing them takes a tenth of a second of Python per trajectory,
    which the event loop would have to share. What fails is logged and counted; it never raises.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._command = _command(run_dir, settings)
        self._log_file = run_dir / "logs" / "mlflow.log"
        self._pending: deque[int] = deque()
        """Numbers of trajectories that were sent and not answered yet."""
        self._closing = False
        self.num_failed = 0

    def start(self) -> None:
        """Returns at once; the process takes some seconds to be ready."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes it
            )
        self._thread = threading.Thread(target=self._count_answers, daemon=True)
        self._thread.start()

    def send(self, file: Path, step: int, split: str, count: int) -> None:
        """Have the `count` trajectories of a split that are in `file` written."""
        self._pending.append(count)
        job = json.dumps({"file": str(file.resolve()), "step": step, "split": split})
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the thread has seen that it ended, and counts
            self._process.stdin.write(job + "\n")
            self._process.stdin.flush()
        if not self._thread.is_alive():
            self._count_lost()

    def close(self, timeout_s: float) -> None:
        """Wait until everything is written, no longer than `timeout_s`."""
        assert self._process.stdin
        self._closing = True
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{mlflow_writer.END}\n")
            self._process.stdin.close()
        self._thread.join(timeout_s)
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._count_lost()  # what was sent while the thread was ending
        assert self._process.stdout
        self._process.stdout.close()

    def _count_answers(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            answer = json.loads(line)
            count = self._pending.popleft()
            if failed := count - answer["num_written"]:
                self._warn(failed, f"of {count} of step {answer['step']}: {answer['error']}")
        self._count_lost()

    def _count_lost(self) -> None:
        lost = 0
        while self._pending:
            lost += self._pending.popleft()
        if lost:
            self._warn(lost, "because the process that writes them ended, or was too slow")
        elif not self._closing:
            logger.warning("the process that writes to MLflow ended; see %s", self._log_file)

    def _warn(self, failed: int, reason: str) -> None:
        self.num_failed += failed
        words = "rollout.trace.mlflow: %d trajectories were not written, %s; see %s"
        logger.warning(words, failed, reason, self._log_file)


def _command(run_dir: Path, settings: Mapping[str, Any], *options: str) -> list[str]:
    store = mlflow_writer.store_options(run_dir, **settings)
    # -P: the folder of the script holds a `types.py`
    return [sys.executable, "-P", mlflow_writer.__file__, json.dumps(store), *options]
