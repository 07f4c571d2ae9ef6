"""Do engine and trainer give the same probabilities? A few conversations through both.

    python -m minirl.check_logprobs CONFIG.yaml [MORE.yaml ...] [key=value ...]

Starts model, engine and trainer as a run does, holds the first conversations of the validation set
(up to 64, sampled as in training), computes their log-probabilities again and prints the difference
by turn, place in the turn and tool boundary. Ends with status 1 when the mean is above
rollout.sync_check.max_logprob_diff.
"""

import sys

from rich.console import Console
from rich.table import Table

from minirl import credit
from minirl.agreement import agreement
from minirl.config import Config, SyncCheckConfig
from minirl.data import Row
from minirl.launch import run_command
from minirl.metrics import Metrics
from minirl.rollout.manager import groups_for_training
from minirl.run import Run, open_run
from minirl.scoring import score_with_model
from minirl.types import MicroBatch, Trajectory

NUM_CONVERSATIONS = 64


class DisagreementError(RuntimeError):
    """Engine and trainer are further apart than the config allows."""


async def check_logprobs(run: Run) -> None:
    """Sample, score, compare; rank 0 prints. Raises DisagreementError above the bound."""
    await run.sync(run.policy.weights, 0)
    batch, prompts, trajectories = None, list[Row](), list[Trajectory]()
    if run.inputs and run.manager:
        count = max(1, NUM_CONVERSATIONS // run.config.rollout.n)
        prompts = [{**row, "uid": str(i)} for i, row in enumerate(run.inputs.val_rows[:count])]
        trajectories = await run.manager.generate_sequences(prompts, step=0)
    # groups are of those that have a reward
    await score_with_model(run, trajectories, Metrics(), engines_go_on=False)
    if run.manager:
        await run.manager.sleep(level=2)
        groups = groups_for_training(prompts, trajectories)
        batch = credit.pack_groups(groups, run.config)
    batch = await run.on_trainer(run.world.broadcast_batch, batch)
    batch.old_logprobs = await run.on_trainer(run.policy.compute_logprobs, batch)
    if run.inputs:
        _report(batch, run.config)


def _report(batch: MicroBatch, config: Config) -> None:
    bound = (config.rollout.sync_check or SyncCheckConfig()).max_logprob_diff
    sampled = batch.response_mask > 0
    if not sampled.any():
        raise DisagreementError("no conversation has a token to compare; see trajectories' reasons")
    assert batch.old_logprobs is not None
    everything = (batch.old_logprobs - batch.rollout_logprobs).abs()[sampled]
    table = Table("sampled tokens", "number", "mean", "99 %", "largest", title="difference in nats")
    for name, values in {"all": everything, **agreement(batch)}.items():
        figures = values.mean(), values.quantile(0.99), values.max()
        table.add_row(name, str(len(values)), *(f"{float(figure):.2e}" for figure in figures))
    Console().print(table)
    if not float(everything.mean()) <= bound:  # nan is above every bound
        raise DisagreementError(
            f"the mean difference {float(everything.mean()):.3g} is above "
            f"rollout.sync_check.max_logprob_diff={bound:g}"
        )


async def main(config: Config) -> None:
    """`python -m minirl.check_logprobs`."""
    async with open_run(config, training=False) as run:
        await check_logprobs(run)


if __name__ == "__main__":
    run_command(main, sys.argv[1:], usage=str(__doc__))
