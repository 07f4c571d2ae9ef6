"""Score a policy on the validation set, and nothing else.

    python -m minirl.evaluate CONFIG.yaml [MORE.yaml ...] [key=value ...]

Scores the latest checkpoint of the run directory, or the start policy (model.path) where there is
none or with trainer.resume_mode=disable. Prints a table and writes `evaluation.json` there.
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from minirl.config import Config
from minirl.launch import run_command
from minirl.metrics import Metrics
from minirl.rewards import reward_number
from minirl.run import Run, open_run
from minirl.scoring import score_with_model
from minirl.tracing import TrajectoryWriter
from minirl.types import Trajectory, conversations
from minirl.validation import ValResult, validation_metrics


async def validate(run: Run, step: int) -> tuple[dict[str, float], list[Trajectory]]:
    """Sample every validation prompt `rollout.val_kwargs.n` times and score the answers.

    Every rank calls it; rank 0 returns what came of it, the others nothing. A trajectory that
    failed counts as an answer with score 0, stretches of one conversation as one.
    """
    trajectories: list[Trajectory] = []
    if run.inputs and run.manager:
        prompts = [{**row, "uid": f"val-{i}"} for i, row in enumerate(run.inputs.val_rows)]
        trajectories = await run.manager.generate_sequences(prompts, step=step, validate=True)
    await score_with_model(run, trajectories, Metrics(), engines_go_on=True)
    results = [
        ValResult(
            data_source=t.data_source,
            uid=t.uid,
            score=t.reward or 0.0,
            acc=_accuracy(t),
            answer=t.answer,
        )
        for t in conversations(trajectories)
    ]
    return validation_metrics(results), trajectories


def _accuracy(trajectory: Trajectory) -> float | None:
    """What the reward function says; None = by the score. A reward model's score is no success, and
    what `dapo` takes off for length no failure."""
    breakdown = trajectory.reward_breakdown
    if "acc" in breakdown:
        return reward_number(trajectory, "acc")
    rule = breakdown.get("score", breakdown.get("rule_score"))
    return None if rule is None else float(rule >= 1)


async def evaluate(run: Run) -> None:
    """Load the latest checkpoint, bring it into the engines, score it."""
    trainer = run.config.trainer
    step = 0
    if trainer.resume_mode == "auto":
        state = await run.on_trainer(run.policy.load_latest, trainer.run_dir)
        step = state["step"] if state else 0
    await run.sync(run.policy.weights, step)
    start = time.perf_counter()
    metrics, trajectories = await validate(run, step)
    if run.inputs:
        _report(run, step, metrics)
        writer = TrajectoryWriter(run.config.trainer.run_dir, run.inputs.tokenizer.decode)
        writer.write(step, "evaluate", trajectories, start)


def _report(run: Run, step: int, metrics: dict[str, float]) -> None:
    run_dir = run.config.trainer.run_dir
    what = f"checkpoint of step {step}" if step else f"start policy {run.config.model.path}"
    table = Table("metric", "value", title=f"{run.config.trainer.experiment_name}: {what}")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console(markup=False).print(table)  # names of runs and data sources may have brackets
    content: dict[str, Any] = {"step": step, "model": run.config.model.path, **metrics}
    (run_dir / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n")


async def main(config: Config) -> None:
    """`python -m minirl.evaluate`."""
    config = replace(config, rollout=replace(config.rollout, sync_check=None))
    async with open_run(config, training=False) as run:
        await evaluate(run)


if __name__ == "__main__":
    run_command(main, sys.argv[1:], usage=str(__doc__))
