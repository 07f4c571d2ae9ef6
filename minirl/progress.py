"""Where a run is: what its checkpoints and journals keep of it, and how it goes on from them."""

import logging
from pathlib import Path
from typing import Any, Protocol

from minirl import credit
from minirl.data import prompt_loader
from minirl.journal import Journal, Journals, Outcome
from minirl.run import Run
from minirl.trainer.checkpoint_folder import complete, latest, set_aside
from minirl.trainer.determinism import environment, parameter_hash, seed_step
from minirl.trainer.policy import trained_parts

logger = logging.getLogger(__name__)


class Record(Protocol):
    """What a run has left of its steps, to be computed again (minirl/replay.py)."""

    checkpoint: Path | None
    """From which to go on; None = the start."""
    last_step: int

    def begin(self, step: int, parameters: str | None) -> Journal:
        """As Journals.begin; nothing is written."""
        ...


class Progress:
    """All that the next step depends on beside the models. Only rank 0 has prompts and journals."""

    def __init__(self, run: Run, record: Record | None = None) -> None:
        assert run.checkpoints is not None  # it trains
        self._run, self.checkpoints = run, run.checkpoints
        self._trainer = run.config.trainer
        self._record = record
        self._journals: Journals | Record | None = None
        self._parameters: str | None = None
        """Their hash, on rank 0, with trainer.deterministic."""
        self.kl_controller = credit.make_kl_controller(run.config.algorithm)
        self.num_bad_steps = 0
        """In a row, up to now."""
        self.journal: Journal | None = None
        """Of the step at work."""
        self.number = 0
        """Of the step at work; 0 before the first."""
        self.total = record.last_step if record else run.total_steps
        if run.inputs:
            self.loader = prompt_loader(run.config, run.inputs.train_rows)

    async def restore(self) -> tuple[int | None, dict[str, float]]:
        """Go on where the run was: the step after which it does, None for a new run, and what the
        checkpoint, if there is one, holds of that step's metrics."""
        state = await self._run.on_trainer(self._load_checkpoint)
        await self.end_step()
        resumed = self.number if state else None
        if self._run.inputs and self._record:
            self._journals = self._record
        elif self._run.inputs:
            resumed = self._open_journals(resumed)
        return resumed, state["record"] if state else {}

    def begin_step(self) -> None:
        """Go to the next step."""
        self.number += 1
        if self._trainer.deterministic:
            seed_step(self._trainer.seed, self.number, self._run.world.rank)
        if self._journals:
            self.journal = self._journals.begin(self.number, self._parameters)

    async def end_step(self) -> None:
        """The models are now what the step made of them."""
        run = self._run
        if self._trainer.deterministic:
            trained = trained_parts(run.policy, run.critic).values()
            self._parameters = await run.on_trainer(parameter_hash, trained, run.world)

    def note_outcome(self, metrics: dict[str, float]) -> None:
        """What came of the step, into its journal."""
        if self.journal:
            shown = {k: v for k, v in metrics.items() if k.startswith(("actor/", "critic/"))}
            self.journal.end(Outcome(parameters=self._parameters, metrics=shown))

    async def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint: everything that the next step depends on, and the step's metrics."""
        run, extra = self._run, {}
        if run.inputs:
            extra = {
                "data": self.loader.state_dict(),
                "kl_ctrl": self.kl_controller.state_dict(),
                "bad_steps_in_a_row": self.num_bad_steps,
                "record": metrics,
            }
        parts = trained_parts(run.policy, run.critic)
        await run.on_trainer(self.checkpoints.save, self.number, parts, extra)

    def forget(self) -> None:
        """Drop the journals of the steps that a checkpoint holds."""
        if isinstance(self._journals, Journals):
            saved = complete(self._trainer.run_dir / "checkpoints")
            self._journals.forget(max((step for step, _ in saved), default=0))

    def close(self) -> None:
        """No more is written into journals."""
        if isinstance(self._journals, Journals):
            self._journals.close()

    def _open_journals(self, resumed: int | None) -> int | None:
        """Open them; the step after which the run goes on, None for a new run."""
        if self._trainer.save_freq == -1 and not self._trainer.deterministic:
            return resumed
        self._journals = journals = Journals(self._run.config, environment(self._run.world))
        if resumed is not None:
            return resumed
        if self._trainer.resume_mode == "auto" and journals.has_begun(self._parameters):
            return 0
        journals.clear()
        return None

    def _find_checkpoint(self) -> Path | None:
        """The latest, or that of the record to replay."""
        directory = self._trainer.run_dir / "checkpoints"
        if self._record:
            return self._record.checkpoint
        if self._trainer.resume_mode == "auto":
            return latest(directory)
        if self._run.world.is_main and (aside := set_aside(directory)):
            logger.warning("the checkpoints of an earlier run are now in %s", aside)
        return None

    def _load_checkpoint(self) -> dict[str, Any] | None:
        """Go on from a checkpoint, if there is one; what it holds beside the models."""
        run, path = self._run, self._find_checkpoint()
        if path is None:
            return None
        state = run.policy.load(path, run.critic)
        self.number = state["step"]
        self.kl_controller.load_state_dict(state["kl_ctrl"])
        self.num_bad_steps = state["bad_steps_in_a_row"]
        if run.inputs:
            self.loader.load_state_dict(state["data"])
        return state
