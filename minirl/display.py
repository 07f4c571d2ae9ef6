"""What a person sees of a run: a live panel on a terminal, one plain line per step elsewhere."""

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Self

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

CHART_HEIGHT = 5  # rows of text
RECENT_STEPS = 10  # whose mean length tells the time left
CORE = "val-core/"


class Display:
    """Step, reward curve, phase, speed, time left, last validation and last warning.

    >>> with Display(total_steps=200, title="gsm8k") as display:
    ...     with display.phase("rollout"):
    ...         ...
    ...     display.step(1, metrics)

    While it is live, `print` and every log handler that writes to the terminal appear above the
    panel. It is drawn by a thread of its own, so a busy event loop does not freeze it; what child
    processes write to the terminal directly it cannot hold back. `step` reads `critic/score/mean`,
    `response_length/mean`, `perf/total_num_tokens`, `timing_s/step` and `val-core/*`, each if it is
    there.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        start_step: int = 0,
        console: Console | None = None,
    ) -> None:
        self._title = title
        self._total_steps = total_steps
        self._step = start_step
        self._console = console or Console()
        self._live = self._console.is_terminal
        self._start = self._step_start = time.monotonic()
        self._phase: tuple[str, float] = ("start", self._start)
        self._rewards: list[float] = []
        self._step_seconds: list[float] = []
        self._speed: list[str] = []
        self._validation = ""
        self._warning = ""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._start = self._step_start = time.monotonic()
        if self._live:
            with ExitStack() as stack:
                # Live redirects sys.stdout and sys.stderr; log handlers hold on to the old ones.
                before = (sys.stdout, sys.stderr)
                stack.enter_context(
                    Live(get_renderable=lambda: self, console=self._console, refresh_per_second=4)
                )
                stack.enter_context(_redirected_handlers(*before))
                logging.root.addHandler(handler := _LastWarning(self))
                stack.callback(logging.root.removeHandler, handler)
                self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Show `name` as what the run is doing, from now; as a context manager, until its end."""
        earlier = self._phase
        self._phase = (name, time.monotonic())
        ending = ExitStack()
        ending.callback(setattr, self, "_phase", earlier)
        return ending

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is done, and its figures; on no terminal, as one line."""
        now = time.monotonic()
        if step > self._step:  # a validation before the first step says nothing about its length
            self._step_seconds.append((now - self._step_start) / (step - self._step))
        seconds = metrics.get("timing_s/step", now - self._step_start)
        self._step, self._step_start = step, now
        self._rewards.append(metrics.get("critic/score/mean", math.nan))
        self._speed = _speed(metrics, seconds)
        core = [(k.removeprefix(CORE), v) for k, v in metrics.items() if k.startswith(CORE)]
        validation = ", ".join(f"{name} {value:.3f}" for name, value in core)
        if core:
            self._validation = f"step {step}: {validation}"
        if not self._live:
            parts = [f"step {step}/{self._total_steps}", *self._speed, f"{self._time_left()} left"]
            self.message(" | ".join(parts + [f"val {validation}"] * bool(core)))

    def message(self, text: str) -> None:
        """Print a line, above the panel where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Show `text` as the last warning; log records from WARNING on come here by themselves."""
        self._warning = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True)
        name, since = self._phase
        rows.add_row("phase", f"{name} {time.monotonic() - since:.0f} s")
        if self._speed:
            rows.add_row("last step", Text(", ".join(self._speed)))
        if self._validation:
            rows.add_row("validation", Text(self._validation, "green", overflow="ellipsis"))
        if self._warning:
            rows.add_row("warning", Text(self._warning, "yellow", overflow="ellipsis"))
        chart = [] if options.ascii_only else self._chart(options.max_width - 4)
        title = Text(self._title)  # as it is: in a string, brackets are markup
        yield Panel(Group(self._progress(), *chart, rows), title=title, title_align="left")

    def _progress(self) -> Table:
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        elapsed = _clock(time.monotonic() - self._start)
        line.add_row(
            f"step {self._step}/{self._total_steps}",
            ProgressBar(total=self._total_steps, completed=self._step),
            f"{elapsed} gone, {self._time_left()} left",
        )
        return line

    def _chart(self, width: int) -> list[RenderableType]:
        rewards = [r for r in self._rewards if math.isfinite(r)]
        if len(rewards) < 2:
            return []
        labels = [f"{max(rewards):.3g}", *[""] * (CHART_HEIGHT - 2), f"{min(rewards):.3g}"]
        margin = max(len("reward"), *map(len, labels))
        labels[CHART_HEIGHT // 2] = "reward"
        rows = braille_chart(rewards, max(width - margin - 1, 8), CHART_HEIGHT)
        lines = [
            Text.assemble((label.rjust(margin), "dim"), " ", (row, "cyan"), no_wrap=True)
            for label, row in zip(labels, rows, strict=True)
        ]
        return [*lines]

    def _time_left(self) -> str:
        if not self._step_seconds:
            return "-:--:--"
        recent = self._step_seconds[-RECENT_STEPS:]
        return _clock(sum(recent) / len(recent) * max(self._total_steps - self._step, 0))


def braille_chart(values: list[float], width: int, height: int) -> list[str]:
    """A line through finite `values`, scaled to `height` rows of `width` braille characters.

    A character holds 2 x 4 dots. More values than dots are averaged, fewer are interpolated.
    """
    columns, levels = 2 * width, 4 * height
    if len(values) > columns:
        points = np.array([part.mean() for part in np.array_split(np.array(values), columns)])
    else:
        points = np.interp(np.linspace(0, len(values) - 1, columns), range(len(values)), values)
    low, high = points.min(), points.max()
    share = (points - low) / (high - low) if high > low else np.full(columns, 0.5)
    dots = np.rint((1 - share) * (levels - 1)).astype(int)  # 0 = top
    cells = np.zeros((height, width), dtype=int)
    for x, (start, end) in enumerate(zip([dots[0], *dots[:-1]], dots, strict=True)):
        step = 1 if end >= start else -1
        for y in range(start + step if abs(end - start) > 1 else end, end + step, step):
            cells[y // 4, x // 2] |= BRAILLE_DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in row y, column x of a character, from U+2800 (Unicode, "Braille Patterns")."""


def _speed(metrics: Mapping[str, float], seconds: float) -> list[str]:
    parts = []
    if "critic/score/mean" in metrics:
        parts.append(f"reward {metrics['critic/score/mean']:.3f}")
    if "response_length/mean" in metrics:
        parts.append(f"response {metrics['response_length/mean']:.0f} tokens")
    if "perf/total_num_tokens" in metrics and seconds > 0:
        parts.append(f"{metrics['perf/total_num_tokens'] / seconds:.0f} tokens/s")
    return [*parts, f"{seconds:.1f} s/step"]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class _LastWarning(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._display.warn(record.getMessage().strip().partition("\n")[0])
        except Exception:  # arguments that do not fit the message: never worth a run
            self.handleError(record)


@contextmanager
def _redirected_handlers(stdout: Any, stderr: Any) -> Iterator[None]:
    """Let every log handler that writes to `stdout` or `stderr` write to what now stands there."""
    now = {id(stdout): sys.stdout, id(stderr): sys.stderr}
    moved = []
    for log in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(log, "handlers", []):  # loggerDict holds placeholders too
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in now:
                moved.append((handler, handler.setStream(now[id(handler.stream)])))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
