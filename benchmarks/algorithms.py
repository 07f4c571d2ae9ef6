"""The demo by every algorithm that has an overlay: one table, one picture of the curves.

    python -m benchmarks.algorithms [NAME ...] [--seed N] [--out build/algorithms] [key=value ...]

Each is `minirl.train configs/debug/calculator_grpo.yaml configs/debug/calculator_NAME.yaml` from
the same start policy, one after the other, and has to reach 85 % from at most 30 % within 6
minutes on two cores. Writes `results.json` and `learning_curves.png`. A run that is there already
is not made again.
"""

import argparse
import json
import sys
from pathlib import Path

from examples.calculator.demo import CONFIG, prepare, train
from minirl.plots import learning_curve

NAMES = ("grpo", "ppo", "rloo", "reinforce_plus_plus", "remax", "dapo", "gspo", "cpo")
START, REACH, SECONDS = 0.30, 0.85, 360


def main() -> None:
    """Run what is missing; exit status 1 when one fell short."""
    parser = argparse.ArgumentParser(description="the demo by every algorithm")
    parser.add_argument("arguments", nargs="*", help="names of algorithms, key=value settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/algorithms"))
    given = parser.parse_args()
    settings = [argument for argument in given.arguments if "=" in argument]
    names = [argument for argument in given.arguments if "=" not in argument] or list(NAMES)
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such algorithm: {', '.join(sorted(unknown))}; there are {NAMES}")
    given.out.mkdir(parents=True, exist_ok=True)
    _, data = prepare(given.seed)
    results = {}
    runs = {n: given.out / (n if given.seed == 0 else f"{n}-{given.seed}") for n in names}
    for name, run_dir in runs.items():
        summary = run_dir / "summary.json"
        if not summary.exists():
            overlay = [] if name == "grpo" else [f"configs/debug/calculator_{name}.yaml"]
            own = [
                f"trainer.default_local_dir={given.out}",
                f"trainer.experiment_name={run_dir.name}",
            ]
            figures = train(run_dir, [CONFIG, *overlay, *data, *own, *settings])
            summary.write_text(json.dumps(figures, indent=2) + "\n")
        results[name] = json.loads(summary.read_text())
    (given.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    picture = given.out / "learning_curves.png"
    learning_curve(list(runs.values()), picture, title="A calculator, by every algorithm")
    print(f"\n{'algorithm':22} before  after  steps  seconds")
    short = []
    for name, r in results.items():
        reached = (
            r["val_before"] <= START and r["val_after"] >= REACH and r["train_seconds"] <= SECONDS
        )
        short += [] if reached else [name]
        print(
            f"{name:22} {r['val_before']:6.1%} {r['val_after']:6.1%} {r['num_steps']:6} "
            f"{r['train_seconds']:8.0f}{'' if reached else '  fell short'}"
        )
    print(f"curves: {picture}")
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
