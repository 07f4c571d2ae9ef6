"""Rollouts by each mode on one engine, in turn, and what each of them spent its time on."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.async_vs_sync.bound import Bound, EngineSpeed, bound, greedy
from benchmarks.async_vs_sync.sampling import Device, Sampler
from benchmarks.async_vs_sync.settings import Case, Settings
from benchmarks.async_vs_sync.speed import SALTS, SpeedMeter
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
        self.generating: dict[str, list[Span]] = defaultdict(list)
        """By conversation, in the engine; also turns that were cut off with their conversation."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """See minirl.agent_loop.Server."""
        asked, conversation = time.perf_counter(), CONVERSATION.get()
        try:
            output = await self._server.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        except asyncio.CancelledError:
            self.generating[conversation].append((asked, time.perf_counter()))
            raise
        assert output.start is not None and output.end is not None
        self.held[conversation].append((asked, output.start))
        self.generating[conversation].append((output.start, output.end))
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
    aborted: list[Span]
    """In which the engine had turns of conversations that rollout.over_sample_rate has aborted."""
    trainer: list[Span] = field(default_factory=list)
    """Beside the rollout: actor.logprobs_in_tail."""

    @property
    def seconds(self) -> float:
        """The makespan."""
        return self.end - self.start

    def figures(self) -> dict[str, Any]:
        """For results.json; `idle_s` and `generating_s` together are `seconds`."""
        spent = attribute(self.conversations, self.start, self.end, self.trainer, self.aborted)
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
        self._turnstile.generating.clear()
        async with Sampler(self._client, self._device) as sampler:
            start = time.perf_counter()
            trajectories = await self.manager.generate_sequences(prompts, **options)
            end = time.perf_counter()
        # only a barrier holds turns back; else the span is the way to the engine
        held = dict(self._turnstile.held) if self.mode == "sync" else {}
        ended = {f"{t.uid}/{t.sample_index}": t for t in trajectories}
        turns = self._turnstile.generating
        return Rollout(
            arm=self.name,
            start=start,
            end=end,
            trajectories=trajectories,
            conversations=[Conversation.of(t, held.get(name, [])) for name, t in ended.items()],
            sampler=sampler,
            aborted=[span for name in turns.keys() - ended.keys() for span in turns[name]],
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
    figures: dict[str, list[dict[str, Any]]]
    """By mode."""
    shown: dict[str, Rollout]
    """By mode, the last one."""
    speed: EngineSpeed
    bounds: list[Bound]
    greedy_s: list[float]

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
    arms: dict[str, Arm], client: ServerClient, settings: Settings, case: Case, number: int
) -> CaseResult:
    """Modes in turn, each repetition with conversations of its own, the same for all modes; the
    engine's speed between them."""
    workload = case.load()
    figures: dict[str, list[dict[str, Any]]] = {mode: [] for mode in case.modes_for(number)}
    shown: dict[str, Rollout] = {}
    meter, all_plans = SpeedMeter(client, number), []
    await meter.warm_up()
    await meter.round()
    for repetition in range(settings.repetitions_of(case) + 1):
        plans = workload.draw(
            number,
            settings.seed + repetition,
            token_s=meter.speed().token_s,
            latency_scale=case.latency_scale,
        )
        if repetition == 0:  # warms up
            await arms[list(figures)[-1]].rollout(_prompts(plans), step=0)
            continue
        for mode, found in figures.items():
            shown[mode] = await arms[mode].rollout(_prompts(plans), step=repetition)
            found.append(shown[mode].figures())
        by_plan = zip(*(rollout.trajectories for rollout in shown.values()), strict=True)
        all_plans.append([p.reading(least_read(t)) for p, t in zip(plans, by_plan, strict=True)])
        await meter.round()
    speed = meter.speed()
    return CaseResult(
        workload=workload.name,
        about=workload.about,
        conversations=number,
        latency_scale=case.latency_scale,
        figures=figures,
        shown=shown,
        speed=speed,
        bounds=[bound(plans, speed) for plans in all_plans],
        greedy_s=[greedy(plans, speed) for plans in all_plans],
    )


def least_read(trajectories: Sequence[Trajectory]) -> list[int]:
    """Per turn of one conversation, which every mode held, the least of what `newly_read` says."""
    return [min(of_turn) for of_turn in zip(*map(newly_read, trajectories), strict=True)]


def newly_read(trajectory: Trajectory) -> list[int]:
    """Per turn, the tokens before it that the engine's prefix cache did not hold."""
    spans = zip(trajectory.turn_ends, sampled_per_turn(trajectory), trajectory.turns, strict=True)
    start = len(trajectory.prompt_ids)
    return [start + end - sampled - turn.num_cached_tokens for end, sampled, turn in spans]


def _prompts(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    return [plan.row(f"{i:04}", next(SALTS)) for i, plan in enumerate(plans)]
