"""Train a policy by reinforcement learning while it talks and calls tools.

python -m minirl.train CONFIG.yaml [MORE.yaml ...] [key=value ...]
torchrun --nproc-per-node W -m minirl.train CONFIG.yaml [key=value ...]

dataset row ─▶ agent loop ⇄ engine, tools ─▶ Trajectory ─▶ reward ─▶ group ─▶ advantage
                 ▲                                                               │
                 └──────────── weight sync ◀── gradient ◀── MicroBatch ◀─────────┘
"""

import sys

from minirl.config import Config
from minirl.launch import run_command
from minirl.progress import Record
from minirl.run import Run, open_run
from minirl.steps import Steps


async def train(run: Run, record: Record | None = None) -> None:
    """Every step, in order. Every rank runs this; rank 0 makes the trajectories, or has them of a
    `record`, up to its last step."""
    trainer, algorithm = run.config.trainer, run.config.algorithm
    with Steps(run, record) as steps:
        await steps.start()
        await steps.update_weights()
        if trainer.val_before_train and steps.number == 0:
            await steps.validate()
        await steps.record_start()
        for step in steps:
            with steps.timed("gen"):
                groups = await steps.generate()
            with steps.timed("reward"):
                batch = await steps.assemble(groups)
            if steps.needs_old_logprobs:
                with steps.timed("old_log_prob"):
                    batch.old_logprobs, batch.logprob_stats = await steps.compute_logprobs(batch)
            if run.reference:
                with steps.timed("ref"):
                    batch.ref_logprobs = await steps.compute_ref_logprobs(batch)
            if run.critic:
                with steps.timed("values"):
                    batch.values = await steps.compute_values(batch)
            if algorithm.cpo:
                with steps.timed("hints"):
                    batch.hinted_logprobs = await steps.compute_hinted_logprobs(batch)
            with steps.timed("adv"):
                if steps.needs_old_logprobs:
                    steps.correct_mismatch(batch)
                steps.penalize_kl(batch)
                batch.advantages, batch.returns = await steps.compute_advantages(batch)
            if run.critic:
                with steps.timed("update_critic"):
                    await steps.update_critic(batch)
            if step > trainer.critic_warmup:
                with steps.timed("update_actor"):
                    await steps.update_actor(batch)
            with steps.timed("update_weights"):
                await steps.update_weights()
            if steps.due(trainer.test_freq):
                with steps.timed("testing"):
                    await steps.validate()
            await steps.record(batch)
            if steps.due(trainer.save_freq):
                with steps.timed("save_checkpoint"):
                    await steps.save()
            await steps.finish()


async def main(config: Config) -> None:
    """`python -m minirl.train`."""
    async with open_run(config) as run:
        await train(run)


if __name__ == "__main__":
    run_command(main, sys.argv[1:], usage=str(__doc__))
