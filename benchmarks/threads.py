"""Log-probabilities and update by one thread and by every core, beside processes that are busy.

    python -m benchmarks.threads [--busy 0 1 2] [--repetitions 3] [--out FILE] [--record]

    one        OMP_NUM_THREADS=1
    every      as many threads as there are cores, and minirl's GOMP_SPINCOUNT
    spinning   the same, but a thread waits for the others as long as libgomp has it by default
    two_pools  as `every`, but another thread has computed something before: libgomp keeps threads
               for it too, and has more of them than there are cores from then on

For a machine without a GPU. Each arm is a process of its own, the part `phases` of train_step with
the demo's micro-batches (4096 tokens); they run in turn, beside `busy` loops of Python.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import ratios
from benchmarks.results import make_parser, start_load, table, write

ARMS = {
    "one": {"OMP_NUM_THREADS": "1"},
    "every": {},
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "two_pools": {},
}
LOOP = """\
import os, sys
while os.getppid() == int(sys.argv[1]):  # until what started it is gone, however that ended
    for _ in range(10_000_000): pass
"""
PHASES = ("old_log_prob", "update_actor")


def measure(arm: str) -> dict[str, float]:
    """Seconds by phase, the median of three."""
    # What the shell says of threads would be said to every arm.
    given = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "phases.json"
        command = [sys.executable, "-m", "benchmarks.train_step", "--parts", "phases"]
        command += ["--repetitions=3", "--max-tokens=4096", f"--out={out}"]
        command += ["--two-pools"] if arm == "two_pools" else []
        subprocess.run(command, env=given | ARMS[arm], stdout=subprocess.DEVNULL, check=True)
        phases = json.loads(out.read_text())["phases"]
    return {phase: median(phases[f"seconds {phase}"]) for phase in PHASES}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """That many processes, each of which takes what it is given of a core."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("threads", __doc__, repetitions=3)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    load, results, rows = start_load(), dict[str, Any](), []
    for count in arguments.busy:
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        with busy(count):
            for _ in range(arguments.repetitions):
                for arm, found in runs.items():
                    found.append(measure(arm))
        results[f"busy={count}"] = runs
        for phase in PHASES:
            seconds = {arm: [run[phase] for run in found] for arm, found in runs.items()}
            compared = [ratios(seconds, "one", arm) for arm in list(ARMS)[1:]]
            rows.append((phase, count, *seconds.values(), *compared))
    header = ("phase", "busy", *(f"{arm}, s" for arm in ARMS))
    header += tuple(f"one / {arm}" for arm in list(ARMS)[1:])
    text = table(header, rows)
    print(text)
    write(arguments, results, "threads", load, text)


if __name__ == "__main__":
    main()
