"""Whole training steps, all in one run: rollouts by each arm in turn, the rest as ever."""

import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.async_vs_sync.rollouts import Arm, Rollout
from benchmarks.async_vs_sync.sampling import Device
from benchmarks.async_vs_sync.settings import MODES_IN_TURN, Settings, WholeSteps, load_workload
from benchmarks.async_vs_sync.timeline import Span
from benchmarks.measure import ratios
from minirl.config import Config
from minirl.rollout.parts import AgentParts
from minirl.rollout.server import ServerClient
from minirl.run import Run
from minirl.tracking import read_metrics
from minirl.train import train
from minirl.types import Trajectory

Early = Callable[[list[Trajectory]], Awaitable[None]]
"""What the trainer begins with in the rollout's tail."""
OUTSIDE = ("step", "gen", "update_weights")
"""Phases that are not the trainer's alone."""


class ArmsInTurn:
    """The manager of a run whose steps roll out by one arm after another; keeps the rollouts.

    The run has actor.logprobs_in_tail if any arm has it; the others do not begin that early.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self.rollouts: list[Rollout] = []

    @property
    def _last(self) -> Arm:
        return self._arms[(len(self.rollouts) - 1) % len(self._arms)]

    @property
    def metrics(self) -> dict[str, float]:
        """See AgentLoopManager."""
        return self._last.manager.metrics

    async def generate_sequences(
        self, prompts: list[dict[str, Any]], *, in_tail: Early | None, **options: Any
    ) -> list[Trajectory]:
        """See AgentLoopManager."""
        arm, trainer = self._arms[len(self.rollouts) % len(self._arms)], list[Span]()

        async def noted(ended: list[Trajectory]) -> None:
            assert in_tail
            began = time.perf_counter()
            await in_tail(ended)
            trainer.append((began, time.perf_counter()))

        options["in_tail"] = noted if in_tail and arm.name == "in_tail" else None
        rollout = await arm.rollout(prompts, **options)
        self.rollouts.append(replace(rollout, trainer=trainer))
        return rollout.trajectories

    async def sleep(self, level: int) -> None:
        """See AgentLoopManager."""
        await self._last.manager.sleep(level)

    async def wake_up(self) -> None:
        """See AgentLoopManager."""
        await self._last.manager.wake_up()


@dataclass(kw_only=True)
class StepsResult:
    """Of every arm, what its steps took; lists have an entry per repetition."""

    workload: str
    conversations: int
    figures: dict[str, list[dict[str, Any]]]

    def against_async(self, arm: str) -> list[float]:
        """How many times as long a step takes, round by round."""
        seconds = {a: [f["seconds"] for f in self.figures[a]] for a in (arm, "async")}
        return ratios(seconds, arm, "async")


def write_rows(settings: Settings, n: int, path: Path) -> None:
    """The run's dataset: one batch, so that every step has the same conversations to hold, for `n`
    samples of a prompt and those that an arm begins on top."""
    steps = settings.steps or WholeSteps(prompts=1)
    size = steps.samples(n)
    plans = load_workload(steps.workload).draw(
        steps.prompts * size, settings.seed, latency_scale=steps.latency_scale
    )
    groups = [plans[start : start + size] for start in range(0, len(plans), size)]
    rows = [first.row(str(i), i, others) for i, (first, *others) in enumerate(groups)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_arms(
    config: Config, parts: AgentParts, client: ServerClient, device: Device, steps: WholeSteps
) -> list[Arm]:
    """By `steps.arms`."""
    more = replace(config.rollout, over_sample_rate=steps.over_sample_rate)
    configs = {"over_sampled": replace(config, rollout=more)}
    modes = {arm: arm if arm in MODES_IN_TURN else "async" for arm in steps.arms}
    return [
        Arm(configs.get(arm, config), parts, client, mode, device, name=arm)
        for arm, mode in modes.items()
    ]


async def measure_steps(run: Run, arms: Sequence[Arm], settings: Settings) -> StepsResult:
    """Train; the first step, by the last of the arms, warms up."""
    assert settings.steps
    in_turn = ArmsInTurn([arms[-1], *(list(arms) * settings.repetitions)])
    run.manager = in_turn  # type: ignore[assignment]
    await train(run)
    rows = [row for row in read_metrics(run.config.trainer.run_dir) if row["step"] > 1]
    figures: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rollout, row in zip(in_turn.rollouts[1:], rows, strict=True):
        figures[rollout.arm].append(step_figures(rollout, row))
    return StepsResult(
        workload=load_workload(settings.steps.workload).name,
        conversations=len(in_turn.rollouts[0].conversations),
        figures=dict(figures),
    )


def step_figures(rollout: Rollout, metrics: dict[str, float]) -> dict[str, Any]:
    """Of a step: what its rollout's time went into, and of its other phases by what they are."""
    phases = {
        name.removeprefix("timing_s/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("timing_s/")
    }
    figures = rollout.figures()
    idle = figures["idle_s"]
    idle["sync"] = phases["update_weights"] + phases["gen"] - rollout.seconds
    alone = sum(s for name, s in phases.items() if name not in OUTSIDE)
    idle["trainer"] += alone
    idle["driver"] += phases["step"] - phases["gen"] - phases["update_weights"] - alone
    return {
        "seconds": phases["step"],
        "rollout_s": rollout.seconds,
        "generating_s": figures["generating_s"],
        "idle_s": idle,
        "phases_s": phases,
    }
