"""actor.logprobs_in_tail: the trainer works while the rollout waits for its last conversations."""

import asyncio

import torch
from torch import Tensor

from minirl.run import Run
from minirl.trainer import packing
from minirl.types import GREEDY, Group, MicroBatch, Trajectory


class TailLogprobs:
    """The policy's log-probabilities of what has ended before the rest has; every rank has one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.known: dict[int, Tensor] = {}
        """By id of a trajectory of this step, on rank 0."""

    async def compute(self, trajectories: list[Trajectory]) -> None:
        """Those of what has ended; every rank calls it, in the rollout."""
        ended = [t for t in trajectories if t.error is None and t.sample_index != GREEDY]
        batch = None
        if self._run.inputs:
            rewards = [[0.0] * len(t.response_ids) for t in ended]
            # Seconds, for millions of tokens, in which the others go on.
            batch = await asyncio.to_thread(packing.pack, ended, rewards, list(range(len(ended))))
        batch = await self._run.on_trainer(self._run.world.broadcast_batch, batch)
        logprobs = await self._run.on_trainer(self._run.policy.compute_logprobs, batch)
        if self._run.inputs:
            parts = logprobs.split(batch.lengths.tolist())
            self.known = {id(t): part for t, part in zip(ended, parts, strict=True)}

    def of(self, groups: list[Group], batch: MicroBatch) -> Tensor:
        """Of the packed groups [N]; nan in sequences of which they are not known."""
        members = [t for group in groups for t in group.trajectories]
        parts = [
            self.known.get(id(t), torch.full((length,), torch.nan))
            for t, length in zip(members, batch.lengths.tolist(), strict=True)
        ]
        return torch.cat(parts) * batch.response_mask
