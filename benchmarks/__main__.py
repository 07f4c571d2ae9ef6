"""The benchmarks of a machine without a GPU, in turn; each writes its section in RESULTS.md.

    python -m benchmarks [NAME ...]

For an idle machine. What fails is told in the end, and what is not installed is left out: with TRL,
`vs_trl` takes twenty minutes more. The others in this folder are run by their names.
"""

import argparse
import subprocess
import sys
import time

from examples.calculator.demo import prepare

BENCHMARKS = {
    "async_vs_sync": [],
    "weight_sync": ["--repetitions=5"],
    "train_step": ["--repetitions=3"],
    "rollout_overhead": ["--repetitions=3", "--conversations=1000"],
    "routing": ["--repetitions=3"],
    "scaling": ["--conversations=1024"],
    "vs_trl": [],
}
"""By name, the options with which it takes its part of the time."""


def main() -> None:
    """Run them; exit status 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := set(names) - BENCHMARKS.keys():
        parser.error(f"no such benchmark: {sorted(unknown)}; there are {', '.join(BENCHMARKS)}")
    prepare(seed=0)
    failed = []
    for name in names:
        print(f"\n{name}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name], "--record"]
        failed += [name] if subprocess.run(command).returncode else []
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
