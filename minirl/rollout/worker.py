"""AgentLoopWorker: runs agent loops concurrently and rewards what they return."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minirl.agent_loop import (
    AgentLoopContext,
    derive_seed,
    make_agent_loop,
    record_failure,
    run_agent_loop,
)
from minirl.config import RolloutConfig
from minirl.rewards import RewardManager
from minirl.types import Trajectory
from minirl.waits import CONVERSATION, WAITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One trajectory to make."""

    row: Mapping[str, Any]
    sample_index: int
    seed: int
    """Of trainer.seed, step, the prompt's uid and the sample index; turns derive theirs from it."""
    sampling_params: Mapping[str, Any]


class AgentLoopWorker:
    """Runs requests; the same code inside rank 0 and in a worker process."""

    def __init__(
        self, config: RolloutConfig, context: AgentLoopContext, reward_manager: RewardManager
    ) -> None:
        self._config = config
        self._context = context
        self._reward_manager = reward_manager

    async def run(self, request: SampleRequest) -> list[Trajectory]:
        """Run one agent loop to its trajectories (several when the agent rewrote its history).

        An exception in user code (loop, tool, reward) ends this trajectory only: it comes back with
        `termination` error and its traceback, after as many attempts as rollout.on_failure allows.
        A failed engine is no trajectory's fault and is raised.
        """
        attempts = 1 + (self._config.max_retries if self._config.on_failure == "retry" else 0)
        for attempt in range(attempts):
            # The same seed would sample the same tokens, and fail in the same way.
            seed = derive_seed(request.seed, "retry", attempt) if attempt else request.seed
            trajectories = await self._attempt(request, seed)
            if all(trajectory.termination != "error" for trajectory in trajectories):
                break
        return trajectories

    async def _attempt(self, request: SampleRequest, seed: int) -> list[Trajectory]:
        started = time.perf_counter()
        CONVERSATION.set(f"{request.row['uid']}/{request.sample_index}")
        row = {
            **request.row,
            "raw_prompt": request.row["prompt"],
            "sample_index": request.sample_index,
        }
        name = row.get("agent_name") or self._config.agent.default_agent_loop
        loop = make_agent_loop(name, self._context)
        params = {**request.sampling_params, "seed": seed}
        trajectories = await run_agent_loop(loop, params, row)
        if all(trajectory.error is None for trajectory in trajectories):
            await self._score(trajectories, row)
        trajectories[-1].metrics["seconds"] = time.perf_counter() - started
        return trajectories

    async def _score(self, trajectories: list[Trajectory], row: Mapping[str, Any]) -> None:
        """The last trajectory carries the outcome; earlier stretches of the history share it."""
        last = trajectories[-1]
        started = time.perf_counter()
        if last.num_turns and last.reward is None:
            solution = await asyncio.to_thread(self._context.chat.decode, last.response_ids)
            try:
                with WAITS.on("reward"):
                    await self._reward_manager(last, row, solution)
            except Exception as error:  # the reward is user code: its failure is the trajectory's
                record_failure(last, "error", error)
        last.metrics["reward_s"] = time.perf_counter() - started
        for earlier in trajectories[:-1]:
            earlier.reward = last.reward
