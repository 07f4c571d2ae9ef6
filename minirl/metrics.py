"""Numbers of a step; each is added with the way in which its values become one."""

import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, SupportsFloat, get_args, get_type_hints

from minirl.types import Termination, ToolCallRecord, Trajectory, conversations

Reduce = Literal["mean", "sum", "min", "max", "last"]
STATISTICS: tuple[Reduce, ...] = ("mean", "max", "min")

COMBINE: dict[str, Callable[[float, float], float]] = {
    "mean": operator.add,  # result() divides by their number
    "sum": operator.add,
    # Python's own min and max drop a nan, or keep it, by its position.
    "min": lambda old, new: math.nan if math.isnan(old + new) else min(old, new),
    "max": lambda old, new: math.nan if math.isnan(old + new) else max(old, new),
    "last": lambda old, new: new,
}


class Metrics:
    """Running values by name; a name has one reduction for good.

    >>> metrics = Metrics()
    >>> metrics.add("num_turns/mean", 3, reduce="mean")
    >>> metrics.add("num_turns/mean", 4, reduce="mean")
    >>> metrics.result()
    {'num_turns/mean': 3.5}
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Reduce, float, int]] = {}  # (reduce, value, how many)

    def add(self, name: str, value: SupportsFloat, *, reduce: Reduce) -> None:
        """Take in one value. Raises ValueError for an unknown reduction, and for one that differs
        from the name's earlier one."""
        if reduce not in COMBINE:
            raise ValueError(f"metric {name!r}: reduce={reduce!r}; use one of {', '.join(COMBINE)}")
        self._combine(name, reduce, float(value), 1)

    def update(self, values: Mapping[str, SupportsFloat], *, reduce: Reduce) -> None:
        """`add` each of `values`."""
        for name, value in values.items():
            self.add(name, value, reduce=reduce)

    def add_stats(self, name: str, values: Iterable[SupportsFloat]) -> None:
        """Add `name/mean`, `name/max` and `name/min` of `values`, each counting the same."""
        for value in values:
            for statistic in STATISTICS:
                self.add(f"{name}/{statistic}", value, reduce=statistic)

    def merge(self, other: "Metrics") -> None:
        """Take in what `other` has collected; for `last` it is the later."""
        for name, (reduce, value, number) in other._entries.items():
            self._combine(name, reduce, value, number)

    def result(self) -> dict[str, float]:
        """The reduced values."""
        return {
            name: value / number if reduce == "mean" else value
            for name, (reduce, value, number) in self._entries.items()
        }

    def _combine(self, name: str, reduce: Reduce, value: float, number: int) -> None:
        known, old, old_number = self._entries.get(name, (reduce, None, 0))
        if known != reduce:
            raise ValueError(f"metric {name!r} is reduced by {known!r} and now by {reduce!r}")
        combined = value if old is None else COMBINE[reduce](old, value)
        self._entries[name] = (reduce, combined, old_number + number)


@contextmanager
def timer(metrics: Metrics, name: str) -> Iterator[None]:
    """Add the seconds spent inside as `timing_s/<name>`; entered again, they add up."""
    start = time.perf_counter()
    try:
        yield
    finally:
        metrics.add(f"timing_s/{name}", time.perf_counter() - start, reduce="sum")


def trajectory_metrics(
    trajectories: Sequence[Trajectory],
    *,
    response_length: int,
    max_prompt_length: int,
    rewards: Sequence[float] | None = None,
) -> Metrics:
    """What the rollout of a step looks like, under verl's names where the quantity is the same.

    `response_length` and `max_prompt_length` are the limits in tokens, for the clip ratios.
    `critic/score` is `Trajectory.reward`, where there is one, of each conversation (its stretches
    share it), as are `reward/...` and `critic/groups/...`; `critic/rewards` is `rewards`, one
    per trajectory: what the estimator saw, after tool rewards and KL penalty (None = the score).
    `num_turns` counts turns of the policy. `critic/groups/no_signal` is the share of groups whose
    rewards are all equal. Every figure in `Trajectory.metrics` becomes
    `trajectory/<figure>/{mean,max,min}`.
    """
    metrics = Metrics()
    ends = conversations(trajectories)
    scores = [t.reward for t in ends if t.reward is not None]
    metrics.add_stats("critic/score", scores)
    metrics.add_stats("critic/rewards", scores if rewards is None else rewards)
    lengths = [len(t.response_ids) for t in trajectories]
    prompt_lengths = [len(t.prompt_ids) for t in trajectories]
    metrics.add_stats("response_length", lengths)
    metrics.add_stats("prompt_length", prompt_lengths)
    for n in lengths:
        metrics.add("response_length/clip_ratio", n >= response_length, reduce="mean")
    for n in prompt_lengths:
        metrics.add("prompt_length/clip_ratio", n >= max_prompt_length, reduce="mean")
    metrics.add_stats("num_turns", [t.num_turns for t in trajectories])
    metrics.add("perf/total_num_tokens", sum(lengths) + sum(prompt_lengths), reduce="sum")
    _add_agent_loop(metrics, trajectories)
    _add_rewards(metrics, ends)
    return metrics


def slowest_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of the trajectory for which a rollout waited longest, as `agent_loop/slowest/<figure>`: its
    lengths, its turns, and every figure in its `metrics`."""
    if not trajectories:
        return {}
    slowest = max(trajectories, key=lambda t: t.metrics.get("seconds", 0.0))
    figures = {
        **slowest.metrics,
        "num_turns": slowest.num_turns,
        "prompt_length": len(slowest.prompt_ids),
        "response_length": len(slowest.response_ids),
    }
    return {f"agent_loop/slowest/{name}": float(value) for name, value in figures.items()}


def _add_agent_loop(metrics: Metrics, trajectories: Sequence[Trajectory]) -> None:
    statuses = get_args(get_type_hints(ToolCallRecord)["status"])
    for trajectory in trajectories:
        metrics.add("agent_loop/tool_calls/mean", len(trajectory.tool_calls), reduce="mean")
        for call in trajectory.tool_calls:
            for status in statuses:
                name = f"agent_loop/tool_calls/{status}"
                metrics.add(name, call.status == status, reduce="mean")
        for reason in get_args(Termination):
            name = f"agent_loop/termination/{reason}"
            metrics.add(name, trajectory.termination == reason, reduce="mean")
        for figure, value in trajectory.metrics.items():
            metrics.add_stats(f"trajectory/{figure}", [value])
    failures = sum(t.termination == "error" for t in trajectories)
    metrics.add("agent_loop/failures", failures, reduce="sum")


def _add_rewards(metrics: Metrics, trajectories: Sequence[Trajectory]) -> None:
    groups: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            groups[trajectory.uid].append(trajectory.reward)
        for name, value in trajectory.reward_breakdown.items():
            metrics.add(f"reward/{name}/mean", value, reduce="mean")
    for group in groups.values():
        if len(group) > 1:  # a group of one has no baseline whatever its reward
            metrics.add("critic/groups/no_signal", len(set(group)) == 1, reduce="mean")
