"""What rank 0 shows and keeps of a run: trackers, display, trajectories."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any, Self

from minirl.config import Config, to_yaml
from minirl.display import Display
from minirl.tracking import Tracking, TrajectoryWriter
from minirl.types import Trajectory


class Records:
    """Open from a run's first step to its last; `resumed` is the step of the checkpoint."""

    def __init__(
        self,
        config: Config,
        total_steps: int,
        resumed: int | None,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        self._resumed = resumed
        self._decode = decode
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        trainer = self._config.trainer
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        (trainer.run_dir / "config.yaml").write_text(to_yaml(self._config))
        tracking = Tracking(
            trainer.logger, trainer.run_dir, asdict(self._config), resumed_at=self._resumed
        )
        self._tracking = self._stack.enter_context(tracking)
        start_step = self._resumed or 0
        display = Display(self._total_steps, trainer.experiment_name, start_step=start_step)
        self._display = self._stack.enter_context(display)
        self._writer = TrajectoryWriter(trainer.run_dir)
        if self._resumed is not None:
            self._display.message(f"resumed from step {self._resumed} of {trainer.run_dir}")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Show `name` as what is going on."""
        return self._display.phase(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of a step."""
        self._tracking.log(step, metrics)
        self._display.step(step, metrics)

    async def write(
        self, step: int, split: str, trajectories: Sequence[Trajectory], *, limit: int | None = None
    ) -> None:
        """Keep trajectories, at most rollout.trace of them unless `limit` says otherwise (-1 =
        all)."""
        limit = self._config.rollout.trace if limit is None else limit
        chosen = trajectories if limit < 0 else trajectories[:limit]
        await asyncio.to_thread(self._writer.write, step, split, chosen, self._decode)
