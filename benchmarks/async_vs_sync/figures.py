"""The pictures: timelines, where the time went, growth with the number of conversations."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.async_vs_sync.rollouts import CaseResult, Rollout
from benchmarks.async_vs_sync.steps import StepsResult
from benchmarks.async_vs_sync.timeline import CAUSES, WORKING, Conversation

COLORS = {
    WORKING: "#009e73",
    "tools": "#56b4e9",
    "tail": "#0072b2",
    "barrier": "#d55e00",
    "sync": "#cc79a7",
    "trainer": "#e69f00",
    "driver": "#999999",
}
"""Okabe & Ito's palette: told apart with any colour vision."""
MODE_COLORS = {"serial": "#999999", "sync": "#d55e00", "async": "#009e73"}
STATE_COLORS = {"waiting": "#e3e3e3", WORKING: COLORS[WORKING], "tools": COLORS["tools"]}
MOST_ROWS = 64
"""Conversations of a timeline; of more, so many, evenly."""


def timeline(result: CaseResult) -> Figure:
    """The last rollout of each mode: a row per conversation, and the engine's below them."""
    rollouts = list(result.shown.values())
    rows = min(result.conversations, MOST_ROWS)
    heights = [value for _ in rollouts for value in (0.6 + 0.055 * rows, 0.5)]
    figure = Figure(figsize=(9, sum(heights) + 0.9), dpi=150, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for rollout, rows_ax, engine_ax in zip(rollouts, axes[::2], axes[1::2], strict=True):
        _draw_conversations(rows_ax, rollout)
        _draw_engine(engine_ax, rollout)
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(0, max(rollout.seconds for rollout in rollouts))
    _state_legend(figure)
    return figure


def _draw_conversations(ax: Axes, rollout: Rollout) -> None:
    chosen = _evenly(rollout.conversations, MOST_ROWS)
    for row, conversation in enumerate(chosen):
        for state, spans in _states(conversation).items():
            bars = [(start - rollout.start, end - start) for start, end in spans]
            ax.broken_barh(bars, (row + 0.1, 0.8), facecolors=STATE_COLORS[state], linewidth=0)
    ax.set_ylim(len(chosen), 0)
    ax.set_yticks([])
    number = len(rollout.conversations)
    shown = f"{len(chosen)} of {number}" if len(chosen) < number else f"{number}"
    title = f"{rollout.arm}: {rollout.seconds:.2f} s, {shown} conversations"
    ax.set_title(title, loc="left", fontsize=10)
    ax.tick_params(bottom=False)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _states(conversation: Conversation) -> dict[str, list[tuple[float, float]]]:
    """Waiting is what lies under the others: held back, or in code of rank 0."""
    return {
        "waiting": [(conversation.start, conversation.end)],
        WORKING: conversation.generating,
        "tools": conversation.tools,
    }


def _draw_engine(ax: Axes, rollout: Rollout) -> None:
    """How many conversations are in it, from the times of their turns."""
    changes = [(s - rollout.start, 1) for c in rollout.conversations for s, _ in c.generating]
    changes += [(e - rollout.start, -1) for c in rollout.conversations for _, e in c.generating]
    times, counts, number = [0.0], [0], 0
    for at, change in sorted(changes):
        number += change
        times.append(at)
        counts.append(number)
    ax.fill_between(times, counts, step="post", color=COLORS[WORKING], linewidth=0)
    ax.set_ylim(0, max(counts) * 1.1)
    ax.set_yticks([0, max(counts)])
    ax.set_ylabel("engine", rotation=0, ha="right", va="center")
    ax.spines[["top", "right"]].set_visible(False)


def _state_legend(figure: Figure) -> None:
    handles = [Patch(color=color, label=state) for state, color in STATE_COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


def _evenly(values: Sequence[Any], number: int) -> list[Any]:
    step = max(1.0, len(values) / number)
    return [values[int(index * step)] for index in range(min(len(values), number))]


def spent(bars: Sequence[tuple[str, list[dict[str, Any]]]], title: str) -> Figure:
    """Stacked bars: of each labelled list of figures, the mean share of every cause: these
    add up, as medians would not."""
    figure = Figure(figsize=(9, 1.3 + 0.32 * len(bars)), dpi=150, layout="constrained")
    ax = figure.subplots()
    for row, (_, figures) in enumerate(bars):
        whole = median(f["seconds"] for f in figures)
        left = 0.0
        for cause in (WORKING, *CAUSES):
            share = fmean(_seconds_of(f, cause) / f["seconds"] for f in figures)
            ax.barh(row, share, left=left, color=COLORS[cause], height=0.75)
            left += share
        ax.text(1.01, row, f"{whole:.2f} s", va="center", fontsize=8)
    ax.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of the time")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    used = [c for c in (WORKING, *CAUSES) if any(_seconds_of(f, c) for _, fs in bars for f in fs)]
    for cause in used:
        label = "engine works" if cause == WORKING else cause
        ax.bar(0, 0, color=COLORS[cause], label=label)
    figure.legend(loc="outside lower center", ncols=len(used), frameon=False, fontsize=8)
    return figure


def _seconds_of(figures: dict[str, Any], cause: str) -> float:
    return figures["generating_s"] if cause == WORKING else figures["idle_s"][cause]


def case_bars(cases: Sequence[CaseResult]) -> list[tuple[str, list[dict[str, Any]]]]:
    """A bar per case and mode."""
    return [
        (f"{case.workload}, {case.conversations}: {mode}", figures)
        for case in cases
        for mode, figures in case.figures.items()
    ]


def step_bars(steps: StepsResult) -> list[tuple[str, list[dict[str, Any]]]]:
    """A bar per mode."""
    return list(steps.figures.items())


def grown(cases: Sequence[CaseResult]) -> list[str]:
    """The workloads with several numbers of conversations."""
    names = dict.fromkeys(c.workload for c in cases)
    return [n for n in names if len({c.conversations for c in cases if c.workload == n}) > 1]


def growth(cases: Sequence[CaseResult], names: Sequence[str]) -> Figure:
    """Makespan of each mode against the number of conversations, and the bound, per workload."""
    figure = Figure(figsize=(4.2 * len(names), 3.6), dpi=150, layout="constrained")
    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        mine = sorted((c for c in cases if c.workload == name), key=lambda c: c.conversations)
        for mode, color in MODE_COLORS.items():
            points = [c for c in mine if mode in c.figures]
            numbers = [c.conversations for c in points]
            seconds = [c.values(mode, "seconds") for c in points]
            ax.plot(numbers, [median(s) for s in seconds], "o-", color=color, label=mode, ms=4)
            if points:
                low, high = ([f(s) for s in seconds] for f in (min, max))
                ax.fill_between(numbers, low, high, color=color, alpha=0.2, linewidth=0)
        least = [median(b.seconds for b in c.bounds) for c in mine]
        ax.plot([c.conversations for c in mine], least, "k--", label="bound", linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xticks(sizes := [c.conversations for c in mine], map(str, sizes))
        ax.set_xlabel("conversations")
        ax.set_title(name, loc="left", fontsize=10)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("seconds")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
