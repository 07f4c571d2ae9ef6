"""Pictures of runs, from their `metrics.jsonl`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minirl.tracking import read_metrics

REWARD = "critic/score/mean"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Okabe & Ito's palette, grey for its yellow: told apart with any colour vision."""
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of a run, at the steps that have it."""

    steps: np.ndarray  # [N] int
    values: np.ndarray  # [N] float


def learning_curve(
    run_dirs: str | Path | Sequence[str | Path], out_png: str | Path, *, title: str | None = None
) -> Path:
    """Draw validation success and training reward against the step, one colour per run.

    Validation is the `val-core/<data_source>/acc/mean@n` of each data source (`reward/mean@n` where
    there is no accuracy), reward the mean score of a step, pale, with its running mean on top. One
    run has the time on a second axis, several have it in the legend. Returns `out_png`; raises
    ValueError when a run has neither.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, and Agg whatever the screen

    paths = [Path(d) for d in ([run_dirs] if isinstance(run_dirs, str | Path) else run_dirs)]
    runs = [read_metrics(path) for path in paths]
    labels = [
        f"{p.resolve().name} ({_duration(rows)})" for p, rows in zip(paths, runs, strict=True)
    ]
    validations = [_validations(rows) for rows in runs]
    for path, rows, curves in zip(paths, runs, validations, strict=True):
        if not curves and not any(REWARD in row for row in rows):
            raise ValueError(f"{path}/metrics.jsonl: neither {REWARD} nor val-core/... to draw")
    names = sorted({name for curves in validations for name in curves})
    figure = Figure(figsize=(8, 6 if names else 3.6), dpi=150, layout="constrained")
    axes = figure.subplots(2 if names else 1, 1, sharex=True, squeeze=False)[:, 0]
    if names:
        _draw_validations(axes[0], validations, names)
    _draw_rewards(axes[-1], runs)
    axes[-1].set_xlabel("step")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    if len(runs) == 1:
        _add_time_axis(axes[0], runs[0])
    _add_legend(figure, labels if len(runs) > 1 else [], names)
    figure.suptitle(title or (labels[0] if len(runs) == 1 else "Learning curves"))
    figure.savefig(out_png)
    return Path(out_png)


def _curve(rows: list[dict[str, Any]], name: str) -> Curve:
    points = [(row["step"], row[name]) for row in rows if name in row]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(steps), np.array(values, dtype=float))


def _validations(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    """`<data_source> <variable>/mean@n` to its curve."""
    names = {name for row in rows for name in row if name.startswith("val-core/")}
    found = {}
    for name in sorted(names):
        source, variable, statistic = name.removeprefix("val-core/").rsplit("/", 2)
        shadowed = variable == "reward" and f"val-core/{source}/acc/{statistic}" in names
        if statistic.startswith("mean@") and not shadowed:
            found[f"{source} {variable}/{statistic}"] = _curve(rows, name)
    return found


def _draw_validations(ax: Any, validations: list[dict[str, Curve]], names: list[str]) -> None:
    for color, curves in zip(_cycle(COLORS, len(validations)), validations, strict=True):
        for name, curve in curves.items():
            dashes = DASHES[names.index(name) % len(DASHES)]
            ax.plot(curve.steps, curve.values, dashes, color=color, marker="o", markersize=4)
    shares = all(" acc/" in name for name in names)
    ax.set_ylabel("validation success" if shares else "validation score")
    if shares:
        ax.set_ylim(-0.03, 1.03)


def _draw_rewards(ax: Any, runs: list[list[dict[str, Any]]]) -> None:
    for color, rows in zip(_cycle(COLORS, len(runs)), runs, strict=True):
        curve = _curve(rows, REWARD)
        ax.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=1)
        ax.plot(curve.steps, _running_mean(curve.values), color=color, linewidth=2)
    ax.set_ylabel("training reward")


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Centred, over a twentieth of the run, at least 3 steps; at the ends over what there is."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([window.mean() for window in windows])


def _add_time_axis(ax: Any, rows: list[dict[str, Any]]) -> None:
    steps = np.array([row["step"] for row in rows], dtype=float)
    seconds = np.array([row["seconds"] for row in rows])
    if len(rows) < 2 or np.any(np.diff(seconds) <= 0):
        return  # not to be inverted
    unit, divisor = _time_unit(seconds[-1])
    times = seconds / divisor
    axis = ax.secondary_xaxis("top", functions=(_linear(steps, times), _linear(times, steps)))
    axis.set_xlabel(f"time ({unit})")


def _linear(x: np.ndarray, y: np.ndarray) -> Any:
    """Interpolation of y(x), continued beyond the ends with the mean slope."""
    slope = (y[-1] - y[0]) / (x[-1] - x[0])

    def interpolate(at: Any) -> np.ndarray:
        at = np.asarray(at, dtype=float)
        beyond = np.minimum(at - x[0], 0) + np.maximum(at - x[-1], 0)
        return np.interp(at, x, y) + slope * beyond

    return interpolate


def _add_legend(figure: Any, runs: list[str], names: list[str]) -> None:
    """Below the axes, so that it covers no data: a colour per run, a dash per data source."""
    from matplotlib.lines import Line2D

    colors = zip(runs, _cycle(COLORS, len(runs)), strict=True)
    handles = [Line2D([], [], color=color, linewidth=2, label=run) for run, color in colors]
    for name, dashes in zip(names, _cycle(DASHES, len(names)), strict=True):
        color = "0.3" if runs else COLORS[0]
        line = Line2D([], [], color=color, linestyle=dashes, marker="o", markersize=4, label=name)
        handles.append(line)
    if not runs:
        handles.append(Line2D([], [], color=COLORS[0], linewidth=2, label="reward, running mean"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def _cycle(values: Sequence[Any], n: int) -> list[Any]:
    return [values[i % len(values)] for i in range(n)]


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds >= 7200:
        return "h", 3600.0
    return ("min", 60.0) if seconds >= 120 else ("s", 1.0)


def _duration(rows: list[dict[str, Any]]) -> str:
    unit, divisor = _time_unit(rows[-1]["seconds"] if rows else 0.0)
    return f"{rows[-1]['seconds'] / divisor:.3g} {unit}" if rows else "no steps"
