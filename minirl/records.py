"""What rank 0 shows and keeps of a run: trackers, display, trajectories."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from minirl.config import Config, to_yaml
from minirl.display import Display
from minirl.tracing import TokenValues, Traces
from minirl.tracking import Tracking, free_name, read_metrics
from minirl.trainer import packing
from minirl.types import MicroBatch, Trajectory


@contextmanager
def open_records(
    config: Config,
    total_steps: int,
    resumed: int | None,
    decode: Callable[[list[int]], str],
) -> Iterator["Records"]:
    """Open from a run's first step to its last.

    `resumed` is the step of the checkpoint from which the run goes on, 0 when it does so from its
    journal alone, None for a new run.
    """
    trainer, start_step = config.trainer, resumed or 0
    trainer.run_dir.mkdir(parents=True, exist_ok=True)
    for path in (trainer.run_dir / "config.yaml", trainer.run_dir / "trajectories"):
        if resumed is None and path.exists():  # of an earlier run
            path.rename(free_name(path))
    if start_step < total_steps:  # else it says how the steps came about
        (trainer.run_dir / "config.yaml").write_text(to_yaml(config))
    lacks_resumed = resumed is not None and not _is_recorded(trainer.run_dir, resumed)
    resumed_at = None if resumed is None else resumed - lacks_resumed
    settings = asdict(config)
    with (
        Tracking(trainer.logger, trainer.run_dir, settings, resumed_at=resumed_at) as tracking,
        Display(total_steps, trainer.experiment_name, start_step=start_step) as display,
        Traces(config, decode) as traces,
    ):
        if resumed is not None:
            over = "" if start_step < total_steps else "; no step is left to be trained"
            display.message(f"resumed from step {resumed} of {trainer.run_dir}{over}")
        yield Records(tracking, display, traces, lacks_resumed)


def _is_recorded(run_dir: Path, step: int) -> bool:
    """Step 0, a validation, is repeated: it is part of no checkpoint."""
    known = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return step > 0 and step in {row["step"] for row in known}


@dataclass(frozen=True)
class Records:
    """What `open_records` has opened."""

    tracking: Tracking
    display: Display
    traces: Traces
    lacks_resumed: bool
    """The run was killed when the step's checkpoint was complete and its numbers were not recorded:
    they have to be logged now."""

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of a step; in a thread, as some trackers wait for a server."""
        metrics = {**metrics, **self.traces.metrics()}
        await asyncio.to_thread(self.tracking.log, step, metrics)
        self.display.step(step, metrics)

    async def write(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        step_start: float,
        token_values: TokenValues | None = None,
    ) -> None:
        """Keep those that rollout.trace asks for; `step_start` by time.perf_counter()."""
        await asyncio.to_thread(
            self.traces.write, step, split, trajectories, step_start, token_values
        )

    async def write_step(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        batch: MicroBatch,
        members: Sequence[Trajectory],
        *,
        bad: Iterable[int],
        step_start: float,
    ) -> None:
        """Those of a training step, with what `batch` knows of its `members`; the `bad` sequences
        of it all, in the file only, whatever rollout.trace says."""
        places = {id(trajectory): index for index, trajectory in enumerate(members)}

        def token_values(trajectory: Trajectory) -> dict[str, list[float]]:
            index = places.get(id(trajectory))  # None: it does not train
            return {} if index is None else packing.response_values(batch, index)

        await self.write(step, "train", trajectories, step_start, token_values)
        if broken := [members[index] for index in sorted(bad)]:
            write = self.traces.writer.write
            await asyncio.to_thread(write, step, "bad", broken, step_start)
