"""What benchmarks share: arms in turn, ratios with their spread, the machine."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from benchmarks.results import words

Arms = Mapping[str, Callable[[], Any]]


def machine() -> dict[str, Any]:
    """What figures depend on."""
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
    }


def show(results: Mapping[str, Any]) -> None:
    """A line per figure."""
    for name, value in results.items():
        print(f"  {name:34} {words(value)}")


def spent_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    return sum(process.cpu_times()[:2])


def interleave(arms: Arms, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each arm, in turn; the first round, which is not kept, warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repetitions + 1):
        for name, run in arms.items():
            _settle()
            began = time.perf_counter()
            run()
            _settle()
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratios(seconds: Mapping[str, list[float]], over: str, under: str) -> list[float]:
    """Of two arms, round by round."""
    return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
