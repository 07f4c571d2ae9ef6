"""What a trajectory costs by the number of conversations and of agent-loop workers.

    python -m benchmarks.scaling [--conversations 128 512 2048] [--workers 0 1 2]
                                 [--repetitions 3] [--out build/scaling.json] [--record]

A scripted engine in a process of its own samples without computing; conversations of three turns
with two tool calls, in groups of 8, all at once. Wall time, and CPU time of rank 0 (which runs the
conversations itself where there are no workers), of the workers together, and of the engine. The
numbers of workers are measured in turn, each time in new processes, after a rollout that warms up.
"""

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.measure import ratios, spent_s
from benchmarks.results import make_parser, start_load, table, write
from benchmarks.rollout_driver import (
    FORKSERVER,
    EngineProcess,
    make_config,
    make_rows,
    open_manager,
)
from minirl.rollout.manager import AgentLoopManager

FIGURES = ("wall", "rank 0", "workers", "engine")
Costs = dict[str, float]
"""Milliseconds per trajectory, by figure."""


def measure(folder: Path, num_workers: int, sizes: Sequence[int]) -> list[Costs]:
    """A rollout of each size, in new processes; `folder` is a new one, too."""
    folder.mkdir()
    address = f"ipc://{folder}/engine"
    with EngineProcess(address) as engine, ProcessPoolExecutor(1, FORKSERVER) as pool:
        return pool.submit(_run, folder, address, num_workers, sizes, engine.pid).result()


def _run(
    folder: Path, address: str, num_workers: int, sizes: Sequence[int], engine_pid: int
) -> list[Costs]:
    return uvloop.run(_measure(folder, address, num_workers, sizes, psutil.Process(engine_pid)))


async def _measure(
    folder: Path, address: str, num_workers: int, sizes: Sequence[int], engine: psutil.Process
) -> list[Costs]:
    settings = [
        f"rollout.agent.num_workers={num_workers}",
        f"trainer.default_local_dir={folder}/runs",  # the workers' logs
    ]
    async with open_manager(make_config(folder, *settings), [address]) as manager:
        await manager.generate_sequences(make_rows(8), step=0)
        workers = psutil.Process().children(recursive=True) if num_workers else []
        return [await _cost(manager, size, workers, engine) for size in sizes]


async def _cost(
    manager: AgentLoopManager, size: int, workers: list[psutil.Process], engine: psutil.Process
) -> Costs:
    rows, before, began = make_rows(size // 8), _cpu(workers, engine), time.perf_counter()
    trajectories = await manager.generate_sequences(rows, step=size)
    wall = time.perf_counter() - began
    spent = [after - first for first, after in zip(before, _cpu(workers, engine), strict=True)]
    assert all(t.reward for t in trajectories)
    return {
        figure: seconds / len(trajectories) * 1e3
        for figure, seconds in zip(FIGURES, [wall, *spent], strict=True)
    }


def _cpu(workers: list[psutil.Process], engine: psutil.Process) -> list[float]:
    """CPU seconds so far: this process, the workers, the engine."""
    return [time.process_time(), sum(map(spent_s, workers)), spent_s(engine)]


def run(sizes: Sequence[int], workers: Sequence[int], repetitions: int) -> dict[str, Any]:
    """By size, then by number of workers, figures with a value per repetition."""
    results: dict[str, Any] = {
        str(size): {str(n): {figure: [] for figure in FIGURES} for n in workers} for size in sizes
    }
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        for repetition in range(repetitions):
            for n in workers:
                costs = measure(Path(folder) / f"{repetition}-{n}", n, sizes)
                for size, cost in zip(sizes, costs, strict=True):
                    for figure, value in cost.items():
                        results[str(size)][str(n)][figure].append(value)
    return results


def report(results: dict[str, Any]) -> str:
    """A table; its last column compares wall times with those of the first number of workers."""
    rows = []
    for size, by_workers in results.items():
        walls = {n: costs["wall"] for n, costs in by_workers.items()}
        first = next(iter(walls))
        for n, costs in by_workers.items():
            rows.append((size, n, *costs.values(), ratios(walls, n, first)))
    header = ("conversations", "workers", "wall ms", *(f"{name} CPU ms" for name in FIGURES[1:]))
    return table([*header, "wall ratio"], rows)


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("scaling", __doc__, repetitions=3)
    parser.add_argument("--conversations", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    if any(number < 8 or number % 8 for number in arguments.conversations):
        parser.error(f"--conversations: got {arguments.conversations}; give multiples of 8")
    load = start_load()
    results = run(arguments.conversations, arguments.workers, arguments.repetitions)
    print(report(results))
    write(arguments, results, "scaling", load, ABOUT, report(results))


ABOUT = """\
Milliseconds per trajectory of three turns and two tool calls over a scripted engine, which has a
process of its own, as has each worker; the ratio is to the first row of as many conversations."""

if __name__ == "__main__":
    main()
