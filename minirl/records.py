"""What rank 0 shows and keeps of a run: trackers, display, trajectories."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any, Self

from minirl.config import Config, to_yaml
from minirl.display import Display
from minirl.tracing import TokenValues, Traces
from minirl.tracking import Tracking, free_name, read_metrics
from minirl.trainer import packing
from minirl.types import MicroBatch, Trajectory


class Records:
    """Open from a run's first step to its last.

    `resumed` is the step of the checkpoint from which the run goes on, 0 when it does so from its
    journal alone, None for a new run.
    """

    def __init__(
        self,
        config: Config,
        total_steps: int,
        resumed: int | None,
        decode: Callable[[list[int]], str],
    ) -> None:
        self.lacks_resumed = False
        """The run was killed when the step's checkpoint was complete and its numbers were not
        recorded: they have to be logged now."""
        self._config = config
        self._total_steps = total_steps
        self._resumed = resumed
        self._decode = decode
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        trainer = self._config.trainer
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        for path in (trainer.run_dir / "config.yaml", trainer.run_dir / "trajectories"):
            if self._resumed is None and path.exists():  # of an earlier run
                path.rename(free_name(path))
        if (self._resumed or 0) < self._total_steps:  # else it says how the steps came about
            (trainer.run_dir / "config.yaml").write_text(to_yaml(self._config))
        self.lacks_resumed = self._resumed is not None and not self._is_recorded(self._resumed)
        resumed_at = None if self._resumed is None else self._resumed - self.lacks_resumed
        tracking = Tracking(
            trainer.logger, trainer.run_dir, asdict(self._config), resumed_at=resumed_at
        )
        self._tracking = self._stack.enter_context(tracking)
        start_step = self._resumed or 0
        display = Display(self._total_steps, trainer.experiment_name, start_step=start_step)
        self._display = self._stack.enter_context(display)
        self._traces = self._stack.enter_context(Traces(self._config, self._decode))
        if self._resumed is not None:
            over = "" if start_step < self._total_steps else "; no step is left to be trained"
            self._display.message(f"resumed from step {self._resumed} of {trainer.run_dir}{over}")
        return self

    def _is_recorded(self, step: int) -> bool:
        """Step 0, a validation, is repeated: it is part of no checkpoint."""
        run_dir = self._config.trainer.run_dir
        known = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        return step > 0 and step in {row["step"] for row in known}

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Show `name` as what is going on."""
        return self._display.phase(name)

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of a step; in a thread, as some trackers wait for a server."""
        metrics = {**metrics, **self._traces.metrics()}
        await asyncio.to_thread(self._tracking.log, step, metrics)
        self._display.step(step, metrics)

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
            self._traces.write, step, split, trajectories, step_start, token_values
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
            write = self._traces.writer.write
            await asyncio.to_thread(write, step, "bad", broken, step_start)
