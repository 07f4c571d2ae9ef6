"""The reward model's scores into the rewards of a rollout; steps.py and evaluate.py call it."""

import asyncio
from statistics import pstdev

from minirl.metrics import Metrics, timer
from minirl.rewards.model import RewardModelInput, add_score, conversations
from minirl.run import Run
from minirl.trainer.reward_model import pack_sequences
from minirl.types import MicroBatch, Trajectory


async def score_with_model(
    run: Run, trajectories: list[Trajectory], metrics: Metrics, *, engines_go_on: bool
) -> None:
    """Join the scores of reward.reward_model with the rewards of `trajectories`, if there is one.

    Every rank calls it; rank 0 has the trajectories, and adds the metrics `reward_model/...`. The
    engines sleep meanwhile, as they do while the trainer works, and stay asleep unless they are to
    go on sampling with the weights that they have.
    """
    if run.reward_model is None:
        return
    with timer(metrics, "reward_model"):
        found, batch = conversations(trajectories), None
        if run.inputs and run.manager:
            await run.manager.sleep(level=1 if engines_go_on else 2)
            assert run.inputs.reward_model_input is not None
            batch = await asyncio.to_thread(_pack, run.inputs.reward_model_input, found, metrics)
        batch = await run.on_trainer(run.world.broadcast_batch, batch)
        scores = await run.on_trainer(run.reward_model.score, batch)
        if run.manager and engines_go_on:
            await run.manager.wake_up()
    settings = run.config.reward.reward_model
    assert settings is not None
    if found:
        for conversation, score in zip(found, scores, strict=True):
            add_score(conversation, score, settings)
        metrics.add_stats("reward_model", scores)
        metrics.add("reward_model/std", pstdev(scores), reduce="mean")


def _pack(
    model_input: RewardModelInput, found: list[list[Trajectory]], metrics: Metrics
) -> MicroBatch:
    """The tokens of each conversation's last trajectory, which holds all of the conversation."""
    sequences = []
    for *_, last in found:
        token_ids = model_input.tokens(last)
        metrics.add("reward_model/truncated", model_input.is_too_long(token_ids), reduce="mean")
        sequences.append(model_input.cut(token_ids))
    return pack_sequences(sequences)
