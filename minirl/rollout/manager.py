"""AgentLoopManager: prompts in, trajectories out.

trajectories = await manager.generate_sequences(prompts, step=7)
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Literal

from minirl.agent_loop import derive_seed
from minirl.config import Config, RolloutConfig, SamplingConfig
from minirl.journal import Journal
from minirl.metrics import Reduce
from minirl.rewards import reward_number, token_rewards
from minirl.rollout.server import ServerClient, engine_answers
from minirl.rollout.worker import SampleRequest, Workers, WorkerStats, loop_lag
from minirl.types import GREEDY, Group, Termination, Trajectory, conversations

logger = logging.getLogger(__name__)

REDUCED: dict[str, Reduce] = {
    "rollout/tokens_per_s": "mean",
    "rollout/prefix_cache_hit_rate": "mean",
    "rollout/engine_busy_fraction": "mean",
    "rollout/loop_lag_max_s": "max",
}
"""How metrics of several rollouts become those of one step; those that are not named, by `sum`."""

BEGIN_TOGETHER = 16
"""Conversations. With fewer, each request costs more on its way, which many share."""


class TooManyFailuresError(RuntimeError):
    """More trajectories failed than rollout.max_failure_fraction allows."""


class AgentLoopManager:
    """Hands prompts to the workers and collects every trajectory, on rank 0."""

    def __init__(self, config: Config, workers: Workers, servers: Sequence[ServerClient]) -> None:
        self._config = config
        self._workers = workers
        self._servers = servers
        self.metrics: dict[str, float] = {}
        """Of the last `generate_sequences`."""

    async def generate_sequences(
        self,
        prompts: list[dict[str, Any]],
        *,
        step: int,
        validate: bool = False,
        greedy: bool = False,
        journal: Journal | None = None,
        in_tail: Callable[[list[Trajectory]], Awaitable[None]] | None = None,
    ) -> list[Trajectory]:
        """Every prompt's trajectories, in the order of the prompts and of their sample index.

        Each prompt is sampled `rollout.n` times, or `rollout.val_kwargs.n` times to validate; with
        `greedy` once more beside those, without randomness, as the sample GREEDY. The samples that
        rollout.over_sample_rate adds race with the others of their prompt. What `journal` holds is
        not sampled again, and what is sampled counts when it is written there. `in_tail` is called
        with what has ended when at most a quarter of the conversations is left.

        Raises:
            TooManyFailuresError: more failed than `rollout.max_failure_fraction`.
            ExceptionGroup: of ServerError; an engine, or an agent-loop worker, failed.
        """
        busy_before = [(await server.stats()).busy_s for server in self._servers]
        requests = self._requests(prompts, step, validate, greedy)
        by_row = {id(row): Race(self._sampling(validate).n) for row in prompts}
        races = [Race(1) if r.sample_index == GREEDY else by_row[id(r.row)] for r in requests]
        results: dict[int, list[Trajectory]] = {}
        for i, request in enumerate(requests):
            if journal and (known := journal.find(request)) is not None:
                results[i] = known
                races[i].count(known)
        missing = [i for i, race in enumerate(races) if i not in results and not race.is_over]

        async def run(i: int) -> None:
            results[i] = await self._run(requests[i], races[i], journal)

        await self._workers.begin(len(missing))
        started = time.perf_counter()
        async with loop_lag() as lag, asyncio.TaskGroup() as tasks:
            running = []
            for i in missing:
                running.append(tasks.create_task(run(i)))
                if len(running) % BEGIN_TOGETHER == 0:
                    await asyncio.sleep(0)  # their requests go out while the next are prepared
            if in_tail:
                await _quarter_left(running)
                await in_tail(_in_order(results))
        seconds = time.perf_counter() - started
        trajectories = _in_order(results)
        busy = [(await server.stats()).busy_s for server in self._servers]
        self.metrics = _rollout_metrics(await self._workers.end(), seconds, max(lag))
        self.metrics["rollout/num_aborted"] = len(requests) - len(results)
        self.metrics["rollout/engine_busy_fraction"] = (sum(busy) - sum(busy_before)) / (
            seconds * len(busy)
        )
        self._check_failures(trajectories)
        return trajectories

    async def sleep(self, level: int) -> None:
        """Free the engines' memory for the trainer (see AsyncServerBase.sleep)."""
        await self._all("the engines to sleep", "sleep", level=level)

    async def wake_up(self) -> None:
        """Let engines that sleep at level 1 go on with the weights that they have."""
        await self._all("the engines to wake up", "wake_up")

    async def _all(self, what: str, method: str, **arguments: Any) -> None:
        async with engine_answers(what, self._config.rollout.engine_timeout_s):
            await asyncio.gather(*(server.call(method, **arguments) for server in self._servers))

    def _requests(
        self, prompts: list[dict[str, Any]], step: int, validate: bool, greedy: bool
    ) -> list[SampleRequest]:
        seed, sampling = self._config.trainer.seed, self._sampling(validate)
        more = 0.0 if validate else self._config.rollout.over_sample_rate
        number = sampling.n + math.ceil(round(sampling.n * more, 9))  # 100 x 0.07 is above 7
        params = dict.fromkeys(range(number), _sampling_params(sampling))
        if greedy:
            params[GREEDY] = {"temperature": 0.0}
        return [
            SampleRequest(
                row=row,
                sample_index=index,
                seed=derive_seed(seed, "validate" if validate else step, row["uid"], index),
                sampling_params=params[index],
            )
            for row in prompts
            for index in params
        ]

    def _sampling(self, validate: bool) -> SamplingConfig | RolloutConfig:
        return self._config.rollout.val_kwargs if validate else self._config.rollout

    async def _run(
        self, request: SampleRequest, race: "Race", journal: Journal | None
    ) -> list[Trajectory]:
        with race.running():
            trajectories = await self._workers.run(request)
        if race.is_over:  # user code held up its cancellation
            raise asyncio.CancelledError
        race.count(trajectories)
        if journal:
            await journal.append(request, trajectories)
        return trajectories

    def _check_failures(self, trajectories: list[Trajectory]) -> None:
        rollout = self._config.rollout
        was_sampled = any(t.num_turns for t in trajectories)
        trajectories = conversations(trajectories)
        errors = [str(t.error) for t in trajectories if t.termination == "error"]
        if not errors:
            if trajectories and not was_sampled:
                [(reason, count)] = Counter(t.termination for t in trajectories).most_common(1)
                words = "no token was sampled: %d of %d trajectories ended by %s"
                logger.warning(words, count, len(trajectories), reason)
            return
        cause, count = Counter(map(_cause, errors)).most_common(1)[0]
        example = next(error for error in errors if _cause(error) == cause)
        failed = f"{len(errors)} of {len(trajectories)} trajectories failed"
        limit = 0.0 if rollout.on_failure == "raise" else rollout.max_failure_fraction
        if len(errors) > limit * len(trajectories):
            raise TooManyFailuresError(
                f"{failed}, more than "
                f"rollout.on_failure={rollout.on_failure} and rollout.max_failure_fraction="
                f"{rollout.max_failure_fraction} allow; most often ({count} times):\n{example}"
            )
        last_line = example.rstrip().rpartition("\n")[2]
        logger.warning("%s, most often (%d times) by %s", failed, count, last_line)


async def _quarter_left(running: Collection[asyncio.Task[Any]]) -> None:
    """Wait until no more of them run."""
    ended = asyncio.Semaphore(0)
    for task in running:
        task.add_done_callback(lambda _: ended.release())
    for _ in range(len(running) - len(running) // 4):
        await ended.acquire()


def _in_order(results: Mapping[int, list[Trajectory]]) -> list[Trajectory]:
    return [trajectory for i in sorted(results) for trajectory in results[i]]


class Race:
    """Between the samples of a prompt: those that do not end among the first so many are aborted.

    One that failed does not count, so a sample more makes up for it.
    """

    def __init__(self, num_wanted: int) -> None:
        self._num_missing = num_wanted
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def is_over(self) -> bool:
        """Whether enough have ended."""
        return self._num_missing <= 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The current task takes part: it is cancelled when the race is over."""
        task = asyncio.current_task()
        assert task
        self._running.add(task)
        if self.is_over:  # before this one began
            task.cancel()
        try:
            yield
        finally:
            self._running.discard(task)

    def count(self, trajectories: list[Trajectory]) -> None:
        """One has ended; if it was the last that is wanted, the others are cancelled."""
        self._num_missing -= all(t.error is None for t in trajectories)
        if self.is_over:
            for task in self._running:
                task.cancel()


def groups_for_training(
    prompts: list[dict[str, Any]],
    trajectories: list[Trajectory],
    *,
    num_wanted: int = 0,
    needs_greedy: bool = False,
    tool_reward: Literal["turn", "outcome", "log"] = "turn",
) -> list[Group]:
    """Trajectories by prompt, without those that failed or have no reward (they never sampled).

    A failed trajectory never enters its group's baseline as a made-up zero: it is left out, and its
    whole group where fewer conversations than `num_wanted` remain (a further sample may have made
    up for it). So is a group whose greedy rollout failed, if `needs_greedy`: it has no baseline.
    What tools gave that rollout is in its reward as in the others', by reward.`tool_reward`.
    """
    by_uid: dict[str, list[Trajectory]] = {row["uid"]: [] for row in prompts}
    for trajectory in trajectories:
        by_uid[trajectory.uid].append(trajectory)
    groups = []
    for row in prompts:
        members = by_uid[row["uid"]]
        greedy = [t for t in members if t.sample_index == GREEDY and _is_rewarded(t)]
        rewarded = [t for t in members if t.sample_index != GREEDY and _is_rewarded(t)]
        worth = [sum(token_rewards(t, tool_reward)) for t in greedy]  # of its stretches
        lacks = any(t.error for t in members) and len(conversations(rewarded)) < num_wanted
        if rewarded and not lacks and (greedy or not needs_greedy):
            groups.append(
                Group(
                    uid=row["uid"],
                    row=row,
                    trajectories=rewarded,
                    greedy_reward=fmean(worth) if worth else None,
                )
            )
    return groups


def varied_groups(groups: list[Group], metric: str, masked: Collection[Termination]) -> list[Group]:
    """The groups in which `metric` (`reward`, or a name in reward_breakdown) takes several values,
    among the trajectories that train: not those that ended by one of `masked`.

    Paper: dynamic sampling of DAPO, Yu et al., 2025.
    """

    def values(group: Group) -> set[float]:
        trained = (t for t in group.trajectories if t.termination not in masked)
        return {reward_number(t, metric) for t in trained}

    return [group for group in groups if len(values(group)) > 1]


def _is_rewarded(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.error is None


def _cause(error: str) -> str:
    """A traceback without the words of its exception, which often name one row's value."""
    frames, _, last_line = error.rstrip().rpartition("\n")
    return frames + last_line.partition(":")[0]


def _rollout_metrics(
    workers: WorkerStats, seconds: float, manager_lag_s: float
) -> dict[str, float]:
    stats = workers.routing
    metrics = {
        "rollout/tokens_per_s": stats.generated_tokens / seconds,
        "rollout/prefix_cache_hit_rate": stats.cache_hit_rate,
        "rollout/num_moves": stats.num_moves,
        "rollout/num_preempted": stats.num_preempted,
        "rollout/loop_lag_max_s": max(manager_lag_s, workers.loop_lag_max_s),
        "rollout/worker_restarts": workers.num_restarts,
    }
    for index, count in stats.requests_per_server.items():
        metrics[f"rollout/requests/server_{index}"] = count
    return metrics


def _sampling_params(sampling: SamplingConfig | RolloutConfig) -> dict[str, Any]:
    """In vLLM's names; what is off is left out."""
    params = {"temperature": sampling.temperature}
    if sampling.top_p != 1:
        params["top_p"] = sampling.top_p
    if sampling.top_k != -1:
        params["top_k"] = sampling.top_k
    if isinstance(sampling, RolloutConfig) and sampling.min_p:
        params["min_p"] = sampling.min_p
    return params
