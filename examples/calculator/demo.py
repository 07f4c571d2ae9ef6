"""The demo from data to picture: prepare, train, and say what came of it.

    python -m examples.calculator.demo [--seed N] [--ranks W] [key=value ...]

Runs `examples.calculator.prepare`, then `torchrun ... -m minirl.train
configs/debug/calculator_grpo.yaml`, and writes `summary.json` and `learning_curve.png` into the
run directory. What is there already is not made again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from minirl.plots import learning_curve
from minirl.tracking import read_metrics

CONFIG = "configs/debug/calculator_grpo.yaml"
SCORE = "val-core/calculator/acc/mean@1"


def main() -> None:
    """Run what is missing, print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="processes that torchrun starts")
    parser.add_argument("overrides", nargs="*", help="key=value settings for minirl.train")
    arguments = parser.parse_args()
    name = "demo" if arguments.seed == 0 else f"demo-{arguments.seed}"
    run_dir = Path("runs") / name
    if arguments.overrides and (run_dir / "summary.json").exists():
        words = " ".join(arguments.overrides)
        parser.error(f"{words}: {run_dir} has ended already and would not change; move it away")
    if not (run_dir / "summary.json").exists():
        prepare_seconds, data = prepare(arguments.seed)
        settings = [f"trainer.experiment_name={name}", *data, *arguments.overrides]
        summary = train(run_dir, [CONFIG, *settings], arguments.ranks)
        summary["prepare_seconds"] = round(prepare_seconds, 1)
        learning_curve(
            run_dir, run_dir / "learning_curve.png", title="Arithmetic with a calculator"
        )
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _report(run_dir, json.loads((run_dir / "summary.json").read_text()))


def prepare(seed: int) -> tuple[float, list[str]]:
    """Make data and start policy; the seconds that took, and where they are as settings."""
    out = Path("build") / ("calculator" if seed == 0 else f"calculator-{seed}")
    started = time.monotonic()
    _check([sys.executable, "-m", "examples.calculator.prepare", f"--out={out}", f"--seed={seed}"])
    settings: dict[str, Any] = {
        "trainer.seed": seed,
        "model.path": out / "model",
        "data.train_files": f"[{out}/train.parquet]",
        "data.val_files": f"[{out}/val.parquet]",
    }
    if shutil.which("nvidia-smi"):  # float32 on a GPU would take slow paths; bfloat16 rounds
        settings |= {"model.dtype": "bfloat16", "rollout.sync_check.max_logprob_diff": 0.05}
    return time.monotonic() - started, [f"{key}={value}" for key, value in settings.items()]


def train(run_dir: Path, arguments: list[str], ranks: int = 1) -> dict[str, Any]:
    """Run `minirl.train` with `arguments`; its figures. Seconds count from the command's start."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={ranks}", "-m", "minirl.train", *arguments]
    started, first_step_seconds, known = time.monotonic(), None, _recorded_steps(run_dir)
    process = subprocess.Popen(torchrun)
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if first_step_seconds is None and _recorded_steps(run_dir) - known:
                first_step_seconds = time.monotonic() - started
    except KeyboardInterrupt:  # the terminal told the command too: it ends by itself
        sys.exit(process.wait())
    if process.returncode:
        sys.exit(process.returncode)
    train_seconds = time.monotonic() - started
    rows = read_metrics(run_dir)
    scores = [row[SCORE] for row in rows if SCORE in row]
    return {
        "val_before": scores[0],
        "val_after": scores[-1],
        "num_steps": rows[-1]["step"],
        "train_seconds": round(train_seconds, 1),
        "first_step_seconds": round(first_step_seconds or train_seconds, 1),
    }


def _recorded_steps(run_dir: Path) -> set[tuple[int, float]]:
    """With the time of each: one that a run repeats is another."""
    try:
        rows = read_metrics(run_dir)
    except FileNotFoundError:
        return set()
    return {(row["step"], row["seconds"]) for row in rows if row["step"] >= 1}


def _report(run_dir: Path, summary: dict[str, Any]) -> None:
    print(
        f"\nsuccess on the validation set: {summary['val_before']:.1%} before, "
        f"{summary['val_after']:.1%} after {summary['num_steps']} steps "
        f"({summary['train_seconds']:.0f} s; first step after "
        f"{summary['first_step_seconds']:.0f} s)\n"
        f"run directory:   {run_dir}\n"
        f"learning curve:  {run_dir / 'learning_curve.png'}\n"
        f"every token:     {sys.executable} -m minirl.view {run_dir}"
    )


def _check(command: list[str]) -> None:
    if status := subprocess.run(command).returncode:
        sys.exit(status)


if __name__ == "__main__":
    main()
