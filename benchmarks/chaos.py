"""Does a run that is killed again and again come to the same end? (or: make chaos)

    python -m benchmarks.chaos [--kills 50] [--steps 20] [--seed 0] [key=value ...]

The demo's policy is trained once undisturbed. Then it is trained with SIGKILL for all of its
processes at random moments, drawn by the seed over start, rollout, update, sync, validation, save
and all else, and started again each time; when it has come to its end, from the beginning, until
there were so many kills. Each time the records must hold every prompt of every step once, with the
same tokens and rewards, and the parameters must have the same hash as those of the undisturbed run.
Writes `build/chaos/kills.json`; the exit status is 1 when anything differs.

The engine is `rollout.name=transformers` with `rollout.max_num_seqs=1`: what it samples does not
depend, in the last bit, on what else is in its batch, so that conversations which a kill cut off
are sampled again as they were.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pyarrow.parquet as pq

from benchmarks.measure import show
from examples.calculator.demo import CONFIG, prepare
from minirl.journal import Outcome, read_journal
from minirl.launch import run_command
from minirl.replay import journal_path
from minirl.rollout.worker_process import print_to
from minirl.steps import Steps
from minirl.tracking import read_metrics
from minirl.train import main as train

SETTINGS = [
    "rollout.name=transformers",
    "rollout.max_num_seqs=1",
    "rollout.n=4",
    "rollout.sync_check.max_logprob_diff=1.0e-4",
    "rollout.trace.max_samples_per_step=-1",
    "data.train_batch_size=4",
    "trainer.deterministic=true",
    "trainer.device=cpu",
    "trainer.save_freq=3",
    "trainer.test_freq=4",
    "trainer.val_before_train=false",
]
START = "start"
MOST_PHASES = 24
"""Of a life, which repeats the steps since the last checkpoint first: a step has about eight."""
PATIENCE_S = 600.0
"""For a life to say anything."""

CONTEXT = multiprocessing.get_context("forkserver")
Phases = list[tuple[str, float]]
"""Of a life: their names, and when they began."""


@dataclass(frozen=True)
class Death:
    """When a life ends: a share of the usual length of a phase behind its beginning."""

    number: int
    """Of the phase since the start, which is 0."""
    share: float


def live(arguments: list[str], phases: Connection, log_file: Path) -> None:
    """One life of a training command, which tells its phases as they begin."""
    os.setsid()
    print_to(log_file)
    phases.send(START)
    timed = Steps.timed

    def told(steps: Steps, name: str) -> AbstractContextManager[None]:
        phases.send(name)
        return timed(steps, name)

    Steps.timed = told  # type: ignore[method-assign, assignment]
    run_command(train, arguments, usage=str(__doc__))


def one_life(
    arguments: list[str], log_file: Path, death: Death | None, lengths: dict[str, float]
) -> tuple[Phases, bool]:
    """Live until `death`; the phases, and whether it came before the end of the run."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=live, args=(arguments, sender, log_file))
    process.start()
    sender.close()
    phases: Phases = []
    due = time.monotonic() + PATIENCE_S
    while receiver.poll(max(0.0, due - time.monotonic())):
        try:
            phases.append((receiver.recv(), time.monotonic()))
        except EOFError:
            process.join()
            if process.exitcode:
                sys.exit(f"a life ended with status {process.exitcode}; see {log_file}")
            return phases, False
        name, began = phases[-1]
        if death and len(phases) == death.number + 1:
            due = began + death.share * lengths.get(name, 1.0)
        elif death is None or len(phases) <= death.number:
            due = began + PATIENCE_S
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if len(phases) <= (death.number if death else len(phases)):
        sys.exit(f"a life stood still for {PATIENCE_S:g} s; see {log_file}")
    return phases, True


def usual_lengths(phases: Phases) -> dict[str, float]:
    """Seconds of each phase, the longest that was seen."""
    lengths: dict[str, float] = {}
    for (name, began), (_, ended) in pairwise(phases):
        lengths[name] = max(lengths.get(name, 0.0), ended - began)
    return lengths


def differences(run_dir: Path, reference: Path, num_steps: int) -> list[str]:
    """What is wrong with the records of a run, given those of one that was not disturbed."""
    wrong = []
    logged = [row["step"] for row in read_metrics(run_dir) if row["step"]]
    if logged != list(range(1, num_steps + 1)):
        wrong.append(f"metrics.jsonl has the steps {logged}")
    seen: Counter[tuple[str, int]] = Counter()
    for step in range(1, num_steps + 1):
        ours, theirs = (trained(folder, step) for folder in (run_dir, reference))
        seen.update((uid, index) for uid, index, *_ in ours)
        if ours != theirs:
            wrong.append(f"step {step} was made of other trajectories")
        if outcome(run_dir, step) != outcome(reference, step):
            wrong.append(f"step {step} has another hash of parameters")
    if twice := [key for key, count in seen.items() if count > 1]:
        wrong.append(f"trained more than once: {twice}")
    return wrong


def trained(run_dir: Path, step: int) -> list[tuple[str, int, list[int], float]]:
    """Uid, sample index, tokens and reward of every trajectory that trained in a step."""
    file = run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = ("uid", "sample_index", "response_ids", "reward")
    return [tuple(row[n] for n in names) for row in rows if row["split"] == "train"]  # type: ignore[misc]


def outcome(run_dir: Path, step: int) -> str | None:
    """The hash of the parameters behind a step."""
    last = read_journal(journal_path(run_dir, step))[0][-1]
    return last.parameters if isinstance(last, Outcome) else None


def few_rows(settings: list[str], out: Path) -> list[str]:
    """Rows for lives that begin quickly: the first of those that `settings` name."""
    own = []
    for key, count in (("data.train_files", 400), ("data.val_files", 8)):
        [file] = [s.partition("=")[2].strip("[]") for s in settings if s.startswith(key)]
        pq.write_table(pq.read_table(file).slice(0, count), out / Path(file).name)
        own.append(f"{key}=[{out / Path(file).name}]")
    return own


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="kill a run again and again")
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for run in given.out.glob("*disturbed*"):
        shutil.rmtree(run)
    CONTEXT.set_forkserver_preload(["minirl.train", "minirl.rollout.transformers_server"])
    _, data = prepare(0)
    data += few_rows(data, given.out)
    steps = f"trainer.total_training_steps={given.steps}"
    settings = [CONFIG, *data, *SETTINGS, steps, *given.overrides]
    settings += [f"trainer.default_local_dir={given.out}"]
    log_file, random = given.out / "lives.log", Random(given.seed)

    def arguments(name: str) -> list[str]:
        return [*settings, f"trainer.experiment_name={name}"]

    phases, _ = one_life(arguments("undisturbed"), log_file, None, {})
    lengths, kills, wrong = usual_lengths(phases), list[str](), list[str]()
    for round_number in itertools.count(1):
        name, killed = f"disturbed_{round_number}", True
        while killed:
            death = Death(random.randrange(MOST_PHASES), random.random())
            last = death if len(kills) < given.kills else None
            phases, killed = one_life(arguments(name), log_file, last, lengths)
            kills += [phases[-1][0]] * killed
            print(f"{name}: {f'kill {len(kills)} in {phases[-1][0]}' if killed else 'ended'}")
        wrong += [
            f"{name}: {what}"
            for what in differences(given.out / name, given.out / "undisturbed", given.steps)
        ]
        if len(kills) >= given.kills:
            break
    report = {"kills": dict(Counter(kills)), "rounds": round_number, "wrong": wrong}
    (given.out / "kills.json").write_text(json.dumps(report, indent=2) + "\n")
    show({"kills": len(kills), "runs": round_number} | Counter(kills))
    if wrong:
        sys.exit("\n".join(wrong))
    print("every prompt was trained once, and the parameters are the same to the last bit")


if __name__ == "__main__":
    main()
