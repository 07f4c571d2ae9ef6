"""AgentLoopWorker: runs agent loops concurrently and rewards what they return."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from minirl.agent_loop import (
    AgentLoopContext,
    derive_seed,
    failed_trajectories,
    make_agent_loop,
    record_failure,
    run_agent_loop,
)
from minirl.config import RolloutConfig
from minirl.openai.endpoint import POLICY
from minirl.rewards import RewardManager
from minirl.rollout.client import AsyncLLMServerManager, RoutingStats
from minirl.rollout.modes import Pace
from minirl.tools.session import cancelled_from_outside, is_failure
from minirl.tools.threads import off_loop
from minirl.types import RewardRecord, Trajectory
from minirl.waits import CONVERSATION, WAITS

LAG_INTERVAL_S = 0.05
NUM_YOUNG = 100_000
"""New objects after which the garbage collector looks at them; Python's own number is 700."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One trajectory to make."""

    row: Mapping[str, Any]
    sample_index: int
    seed: int
    """Of trainer.seed, step, the prompt's uid and the sample index; turns derive theirs from it."""
    sampling_params: Mapping[str, Any]


@dataclass(kw_only=True)
class WorkerStats:
    """What workers have done since the start of a rollout."""

    routing: RoutingStats = field(default_factory=RoutingStats)
    loop_lag_max_s: float = 0.0
    """The longest that a worker process's event loop came late to a timer."""
    num_restarts: int = 0
    """Worker processes that died and were started again."""


class Workers(Protocol):
    """What the manager runs its requests on: the worker in its own process, or a pool of them."""

    async def begin(self, num_requests: int) -> None:
        """So many requests are about to be run; count from zero."""
        ...

    async def run(self, request: SampleRequest) -> list[Trajectory]:
        """See AgentLoopWorker.run."""
        ...

    async def end(self) -> WorkerStats:
        """All have been run: forget them, and say what was done since `begin`."""
        ...


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
            if cancelled_from_outside():  # of which user code made an error
                break
        return trajectories

    async def aclose(self) -> None:
        """Stop to serve agents; after the last request."""
        await self._context.endpoint.aclose()

    async def _attempt(self, request: SampleRequest, seed: int) -> list[Trajectory]:
        started = time.perf_counter()
        POLICY.set(self._context.endpoint)
        CONVERSATION.set(f"{request.row['uid']}/{request.sample_index}")
        row = {
            **request.row,
            "raw_prompt": request.row["prompt"],
            "sample_index": request.sample_index,
        }
        name = row.get("agent_name") or self._config.agent.default_agent_loop
        params = dict(request.sampling_params)
        if self._config.seeded_sampling:
            params["seed"] = seed
        try:
            loop = make_agent_loop(name, self._context)
        except BaseException as error:
            if not is_failure(error):
                raise
            trajectories = failed_trajectories([], error, row)
        else:
            trajectories = await run_agent_loop(loop, params, row)
        if all(trajectory.error is None for trajectory in trajectories):
            await self._score(trajectories, row)
        ended = time.perf_counter()
        for trajectory in trajectories:
            trajectory.start, trajectory.end = started, ended
        trajectories[-1].metrics["seconds"] = ended - started
        return trajectories

    async def _score(self, trajectories: list[Trajectory], row: Mapping[str, Any]) -> None:
        """The last trajectory carries the outcome; earlier stretches of the history share it."""
        last = trajectories[-1]
        started = time.perf_counter()
        if last.reward is None and any(t.num_turns for t in trajectories):
            decode = self._context.chat.decode
            solution = await off_loop(len(last.response_ids), decode, last.response_ids)
            try:
                with WAITS.on("reward"):
                    await self._reward_manager(last, row, solution)
            except BaseException as error:
                if not is_failure(error):
                    raise
                for trajectory in trajectories:  # user code: its failure is theirs
                    record_failure(trajectory, "error", error)
            last.rewards.append(
                RewardRecord(
                    name="outcome", value=last.reward, start=started, end=time.perf_counter()
                )
            )
        last.metrics["reward_s"] = time.perf_counter() - started
        for earlier in trajectories[:-1]:
            earlier.reward, earlier.answer = last.reward, last.answer
            earlier.reward_breakdown = last.reward_breakdown | earlier.reward_breakdown


class LocalWorker:
    """A worker in this process, at the pace of rollout.mode; implements Workers."""

    def __init__(self, worker: AgentLoopWorker, router: AsyncLLMServerManager, pace: Pace) -> None:
        self._worker = worker
        self._router = router
        self._pace = pace

    async def begin(self, num_requests: int) -> None:
        """See Workers."""
        self._router.stats = RoutingStats()
        self._pace.begin(num_requests)

    async def run(self, request: SampleRequest) -> list[Trajectory]:
        """See Workers."""
        return await self._pace.run(self._worker.run(request))

    async def end(self) -> WorkerStats:
        """See Workers; the lag of this process's loop is the manager's to measure."""
        self._router.forget_conversations()
        return WorkerStats(routing=self._router.stats)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have the garbage collector pass over all that is there now, and look for new garbage seldom.

    It stops all conversations: for the modules alone 0.2 s each time, and a tenth of the time that
    a rollout costs would go into looking at young objects that live as long as their conversation.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(NUM_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """Seconds by which the event loop came late to a timer, measured all along."""
    lag = [0.0]

    async def measure() -> None:
        while True:
            due = time.perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            lag.append(time.perf_counter() - due)

    task = asyncio.create_task(measure())
    try:
        yield lag
    finally:
        task.cancel()
