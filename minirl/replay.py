"""Compute a step again from its recorded trajectories, and compare to the last bit.

    python -m minirl.replay RUN STEP
    torchrun --nproc-per-node W -m minirl.replay RUN STEP       (RUN was trained on W ranks)

RUN is the directory of a run with trainer.deterministic=true, e.g. runs/demo. Goes on from the last
checkpoint before STEP, or from the start, over the steps between, without an engine, and writes
nothing but RUN/replay/logs. The exit status is 0 when loss, gradient norm, hash of the parameters
and all else that was recorded of these steps are the same, 1 when they are not, and 2 when the
record cannot be replayed.
"""

import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minirl.config import Config, ConfigError
from minirl.distributed import place
from minirl.journal import Header, Journal, Outcome, config_digest, read_journal
from minirl.launch import run_command
from minirl.rollout.server import AsyncServerBase, RequestRefusedError, ServerStats
from minirl.rollout.worker import SampleRequest
from minirl.run import open_run
from minirl.train import train
from minirl.trainer import checkpoint
from minirl.trainer.determinism import environment
from minirl.types import TokenOutput, Trajectory

SHOWN = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")


class ReplayDiffersError(RuntimeError):
    """What was computed is not what was recorded."""


class RecordedServer(AsyncServerBase):
    """The engine of a run that samples nothing: `rollout.name=minirl.replay:RecordedServer`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """Always refused: RecordedJournal has every conversation, so nobody should ask."""
        raise RequestRefusedError(f"request {request_id}: a replay samples nothing")

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def sleep(self, level: int = 1) -> None:
        """It holds no memory."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """It holds no memory."""

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """It has no weights, nor takes any."""

    async def start_weight_update(self) -> None:
        """It has no weights."""

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """It has no weights."""

    async def finish_weight_update(self, version: int) -> None:
        """It has no weights."""

    async def stats(self) -> ServerStats:
        """Of one that is idle."""
        return ServerStats()

    async def check_health(self) -> None:
        """It cannot die."""


class RecordedJournal(Journal):
    """Of a step that ended, to be read only; `end` notes what came of it now."""

    now: Outcome | None = None

    def find(self, request: SampleRequest) -> list[Trajectory]:
        """ConfigError for a conversation that was not recorded."""
        known = super().find(request)
        if known is None:
            raise ConfigError(
                f"{self.path}: has no conversation {request.row['uid']}/{request.sample_index}; "
                "the rows of data.train_files are others than then"
            )
        return known

    def end(self, outcome: Outcome) -> None:
        """Not written."""
        self.now = outcome


@dataclass(kw_only=True)
class RunRecord:
    """Implements Record for the steps from the last checkpoint before `last_step` to it."""

    run_dir: Path
    last_step: int
    config: Config
    """That of the run."""
    checkpoint: Path | None = None
    journals: list[RecordedJournal] = field(default_factory=list)
    """That were replayed."""

    def begin(self, step: int, parameters: str | None) -> RecordedJournal:
        """Raises ConfigError when the step did not begin with these parameters."""
        path = journal_path(self.run_dir, step)
        records, _ = read_journal(path)
        header = records[0]
        assert isinstance(header, Header)  # it was checked
        if not self.journals and header.parameters != parameters:
            start = self.checkpoint or f"model.path={self.config.model.path}"
            raise ConfigError(f"{path}: step {step} did not begin with the parameters of {start}")
        self.journals.append(RecordedJournal(path, records))
        return self.journals[-1]


def open_record(config: Config, run_dir: Path, step: int) -> RunRecord:
    """ConfigError when there is something that cannot be replayed; opens no model."""
    if not config.trainer.deterministic:
        raise ConfigError(
            f"{run_dir}: cannot be replayed: trainer.deterministic was false, so that its steps "
            "were neither kept nor computed in a way that can be repeated"
        )
    starts: list[tuple[int, Path | None]] = [(0, None)]
    starts += checkpoint.complete(run_dir / "checkpoints")
    first, start = [(number, path) for number, path in starts if number < step][-1]
    record = RunRecord(run_dir=run_dir, last_step=step, config=config, checkpoint=start)
    for number in range(first + 1, step + 1):
        if not journal_path(run_dir, number).is_file():
            raise ConfigError(f"{run_dir}: has no record of step {number}, which STEP={step} needs")
        check_record(journal_path(run_dir, number), config)
    return record


def journal_path(run_dir: Path, step: int) -> Path:
    """Where the record of a step is."""
    return run_dir / "journal" / f"step_{step:06d}"


def check_record(path: Path, config: Config) -> None:
    """ConfigError when it is not that of a step that ended, or cannot be replayed here."""
    records, _ = read_journal(path)
    header = records[0] if records else None
    if not isinstance(header, Header):
        raise ConfigError(f"{path}: is not a journal that this version of minirl has written")
    if not isinstance(records[-1], Outcome):
        raise ConfigError(f"{path}: step {header.step} did not end, or its record is damaged")
    if header.config != config_digest(config):
        raise ConfigError(f"{path}: was not recorded with the settings of the run's config.yaml")
    here = environment(place(config, os.environ))
    for name, value in header.environment.items():
        if here[name] != value:
            raise ConfigError(
                f"{path}: {name} was {value} and is {here[name]} here, which changes the bits; "
                "replay it where it is the same"
            )


def config_of_replay(record: RunRecord) -> Config:
    """The run's, with nothing that samples or writes."""
    config, trainer, rollout = record.config, record.config.trainer, record.config.rollout
    return replace(
        config,
        trainer=replace(
            trainer,
            default_local_dir=str(record.run_dir),
            experiment_name="replay",
            val_before_train=False,
            test_freq=-1,
            save_freq=-1,
            max_bad_steps=sys.maxsize,
        ),
        rollout=replace(
            rollout,
            name="minirl.replay:RecordedServer",
            sync_check=None,
            trace=None,
            agent=replace(rollout.agent, num_workers=0),
        ),
    )


def compare(record: RunRecord, console: Console) -> list[str]:
    """Print what was recorded and what is computed now; names of what differs, `step 3: loss`."""
    table = Table("step", "", "recorded", "now", title=Text(str(record.run_dir)))
    different = []
    for number, journal in enumerate(record.journals, record.last_step + 1 - len(record.journals)):
        before, now = journal.outcome, journal.now
        assert before and now
        names = before.differences(now)
        different += [f"step {number}: {name}" for name in names]
        for name in [n for n in SHOWN if n in before.metrics] + [
            n for n in names if n not in SHOWN
        ]:
            values = (repr(outcome.metrics.get(name)) for outcome in (before, now))
            table.add_row(str(number), name, *values)
        table.add_row(str(number), "parameters", str(before.parameters), str(now.parameters))
    console.print(table)
    return different


async def replay(run_dir: Path, step: int, config: Config) -> None:
    """Raises ReplayDiffersError; ConfigError for a record that cannot be replayed."""
    record = open_record(config, run_dir, step)
    async with open_run(config_of_replay(record)) as run:
        await train(run, record)
    if not run.inputs:
        return
    console = Console(width=max(Console().width, 160))
    if different := compare(record, console):
        raise ReplayDiffersError(f"{run_dir} is not the same now: {', '.join(different)}")
    console.print(f"{len(record.journals)} steps, all of them the same to the last bit")


def main(arguments: list[str]) -> None:
    """The command."""
    if len(arguments) == 2 and arguments[1].isdecimal() and int(arguments[1]) > 0:
        run_dir = Path(arguments[0])
        command = partial(replay, run_dir, int(arguments[1]))
        run_command(command, [str(run_dir / "config.yaml")], usage=str(__doc__))
    print(__doc__)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
