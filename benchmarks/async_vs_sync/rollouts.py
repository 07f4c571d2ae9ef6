"""Rollouts by each mode on one engine, in turn, and what each of them spent its time on."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.async_vs_sync.bound import Bound, EngineSpeed, bound, greedy
from benchmarks.async_vs_sync.sampling import Device, Sampler
from benchmarks.async_vs_sync.settings import Case, Settings
from benchmarks.async_vs_sync.timeline import (
    Conversation,
    Span,
    attribute,
    per_bucket,
    sampled_per_turn,
)
from benchmarks.async_vs_sync.workload import Plan
from benchmarks.measure import ratios
from minirl.agent_loop import Server
from minirl.config import Config
from minirl.launch import SOCKETS
from minirl.rollout.manager import AgentLoopManager
from minirl.rollout.modes import MODES
from minirl.rollout.parts import AgentParts, make_router
from minirl.rollout.server import ServerClient
from minirl.rollout.worker import LocalWorker
from minirl.types import TokenOutput, Trajectory
from minirl.waits import CONVERSATION

SHORT_S = 20
"""A rollout that takes less has its timeline by tenths of seconds."""


class Turnstile:
    """Stands between agent loops and rollout.mode, and notes how long each turn was held back."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.held: dict[str, list[Span]] = defaultdict(list)
        """By conversation, from asking for a turn to its way to the engine."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """See minirl.agent_loop.Server."""
        asked = time.perf_counter()
        output = await self._server.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        assert output.start is not None
        self.held[CONVERSATION.get()].append((asked, output.start))
        return output


@dataclass(kw_only=True)
class Rollout:
    """One rollout, measured; times by time.perf_counter()."""

    arm: str
    start: float
    end: float
    trajectories: list[Trajectory]
    conversations: list[Conversation]
    sampler: Sampler
    max_num_seqs: int
    trainer: list[Span] = field(default_factory=list)
    """Beside the rollout: actor.logprobs_in_tail."""

    @property
    def seconds(self) -> float:
        """The makespan."""
        return self.end - self.start

    def figures(self) -> dict[str, Any]:
        """For results.json; `idle_s` and `generating_s` together are `seconds`."""
        spent = attribute(self.conversations, self.start, self.end, self.trainer)
        tokens = sum(sum(t.response_mask) for t in self.trajectories)
        return {
            "seconds": self.seconds,
            "last_trajectory_s": max(c.end for c in self.conversations) - self.start,
            "tokens": tokens,
            "tokens_per_s": tokens / self.seconds,
            "generating_s": spent.pop("generating"),
            "idle_s": spent,
            **self.sampler.summary(self.max_num_seqs),
        }

    def timeline(self) -> list[dict[str, float]]:
        """By seconds, or tenths of them in a short rollout."""
        width = 1.0 if self.seconds > SHORT_S else 0.1
        return per_bucket(self.conversations, self.start, self.end, width)


class Arm:
    """Rollouts by one mode, made of what a run makes them of."""

    def __init__(
        self,
        config: Config,
        parts: AgentParts,
        client: ServerClient,
        mode: str,
        device: Device,
        *,
        name: str | None = None,
    ) -> None:
        self.mode, self.name = mode, name or mode
        self._config, self._client, self._device = config, client, device
        router = make_router(config.rollout.agent, [client])
        pace = MODES.find(mode)(router)
        self._turnstile = Turnstile(pace)
        loops = parts.make_worker(config, self._turnstile)
        self.manager = AgentLoopManager(config, LocalWorker(loops, router, pace), [client])

    async def rollout(self, prompts: list[dict[str, Any]], **options: Any) -> Rollout:
        """`generate_sequences`, measured."""
        self._turnstile.held.clear()
        async with Sampler(self._client, self._device) as sampler:
            start = time.perf_counter()
            trajectories = await self.manager.generate_sequences(prompts, **options)
            end = time.perf_counter()
        # only a barrier holds turns back; else the span is the way to the engine
        held = dict(self._turnstile.held) if self.mode == "sync" else {}
        return Rollout(
            arm=self.name,
            start=start,
            end=end,
            trajectories=trajectories,
            conversations=[
                Conversation.of(t, held.get(f"{t.uid}/{t.sample_index}", [])) for t in trajectories
            ],
            sampler=sampler,
            max_num_seqs=self._config.rollout.max_num_seqs,
        )


@asynccontextmanager
async def engine_client() -> AsyncIterator[ServerClient]:
    """To the engine of the run that is open."""
    async with ServerClient(f"ipc://{SOCKETS.path}/engine_0", "engine 0") as client:
        yield client


@dataclass(kw_only=True)
class CaseResult:
    """A case with one number of conversations; lists have an entry per repetition."""

    workload: str
    about: str
    conversations: int
    latency_scale: float
    bounds: list[Bound]
    greedy_s: list[float]
    figures: dict[str, list[dict[str, Any]]]
    """By mode."""
    shown: dict[str, Rollout]
    """By mode, the last one."""

    def values(self, mode: str, name: str) -> list[float]:
        """One figure."""
        return [figures[name] for figures in self.figures[mode]]

    def efficiency(self, mode: str) -> list[float]:
        """bound / measured."""
        pairs = zip(self.bounds, self.values(mode, "seconds"), strict=True)
        return [bound.seconds / seconds for bound, seconds in pairs]

    def of_greedy(self, mode: str) -> list[float]:
        """What the engine alone would take, by bound.greedy / measured."""
        return ratios({"greedy": self.greedy_s, mode: self.values(mode, "seconds")}, "greedy", mode)

    def against_async(self, mode: str) -> list[float]:
        """How many times as long it takes, round by round."""
        seconds = {m: self.values(m, "seconds") for m in (mode, "async")}
        return ratios(seconds, mode, "async")


async def measure_case(
    arms: dict[str, Arm], settings: Settings, case: Case, number: int, speed: EngineSpeed
) -> CaseResult:
    """Modes in turn, each repetition with conversations of its own, the same for all modes."""
    workload = case.load()
    modes = case.modes_for(number)
    result = CaseResult(
        workload=workload.name,
        about=workload.about,
        conversations=number,
        latency_scale=case.latency_scale,
        bounds=[],
        greedy_s=[],
        figures={mode: [] for mode in modes},
        shown={},
    )
    for repetition in range(settings.repetitions + 1):
        plans = draw(settings, case, number, repetition, speed.token_s)
        if repetition == 0:  # warms up
            await arms[modes[-1]].rollout(_prompts(plans), step=0)
            continue
        for mode in modes:
            rollout = await arms[mode].rollout(_prompts(plans), step=repetition)
            result.figures[mode].append(rollout.figures())
            result.shown[mode] = rollout
        by_plan = zip(*(rollout.trajectories for rollout in result.shown.values()), strict=True)
        held = [plan.reading(least_read(found)) for plan, found in zip(plans, by_plan, strict=True)]
        result.bounds.append(bound(held, speed))
        result.greedy_s.append(greedy(held, speed))
    return result


def least_read(trajectories: Sequence[Trajectory]) -> list[int]:
    """Per turn of one conversation, which every mode held, the least of what `newly_read` says."""
    return [min(of_turn) for of_turn in zip(*map(newly_read, trajectories), strict=True)]


def newly_read(trajectory: Trajectory) -> list[int]:
    """Per turn, the tokens before it that the engine's prefix cache did not hold."""
    spans = zip(trajectory.turn_ends, sampled_per_turn(trajectory), trajectory.turns, strict=True)
    start = len(trajectory.prompt_ids)
    return [start + end - sampled - turn.num_cached_tokens for end, sampled, turn in spans]


def draw(
    settings: Settings, case: Case, number: int, repetition: int, token_s: float
) -> list[Plan]:
    """The conversations of a repetition."""
    return case.load().draw(
        number,
        settings.seed + repetition,
        token_s=token_s,
        latency_scale=case.latency_scale,
    )


SALTS = itertools.count()


def _prompts(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    return [plan.row(f"{i:04}", next(SALTS)) for i, plan in enumerate(plans)]


async def measure_speed(client: ServerClient, largest: int, repetitions: int) -> EngineSpeed:
    """With requests that are given all at once; of rounds in turn the medians, since a machine has
    faster and slower seconds, and the rollouts have them too."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    few, many = min(16, largest), min(64, largest)
    bursts = [(size, SHORT, tokens) for size in sizes for tokens in (1, SPEED_TOKENS + 1)]
    bursts.append((few, LONG, 1))
    seconds: dict[tuple[int, int, int], list[float]] = {burst: [] for burst in bursts}
    for _ in range(repetitions + 1):
        for shape, values in seconds.items():
            values.append(await _burst(client, *shape))
    typical = {shape: median(values[1:]) for shape, values in seconds.items()}  # the first warms up

    def slope(more: tuple[int, int, int], less: tuple[int, int, int], by: int) -> float:
        return max(typical[more] - typical[less], LEAST_S) / by

    step_s = {n: slope((n, SHORT, SPEED_TOKENS + 1), (n, SHORT, 1), SPEED_TOKENS) for n in sizes}
    for size, larger in reversed(list(pairwise(sizes))):
        step_s[size] = min(step_s[size], step_s[larger])  # fewer never take longer
    prefill_token_s = slope((few, LONG, 1), (few, SHORT, 1), few * (LONG - SHORT))
    request_s = 0.0
    if many > few:
        each = slope((many, SHORT, 1), (few, SHORT, 1), many - few)
        in_steps = (step_s[many] - step_s[few]) / (many - few) + SHORT * prefill_token_s
        request_s = max(each - in_steps, 0.0)
    return EngineSpeed(step_s=step_s, prefill_token_s=prefill_token_s, request_s=request_s)


async def _burst(client: ServerClient, number: int, prompt_tokens: int, tokens: int) -> float:
    """Seconds of so many requests at once."""
    params = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(number):
            salt = next(SALTS)
            # no two begin alike, so that no prefix cache helps
            prompt = [salt % 250, salt // 250 % 250, salt // 250**2] + [1] * prompt_tokens
            given = prompt[:prompt_tokens], params | {"seed": index}, f"speed-{salt}"
            tasks.create_task(client.generate(*given))
    return time.perf_counter() - begun


SHORT, LONG, SPEED_TOKENS = 8, 256, 32
LEAST_S = 1e-6
"""What a difference of two times is at least, where an engine takes next to none."""
