"""What the machinery around the engines costs: three measurements, each a table.

    python -m examples.calculator.prepare --out build/calculator      # for the part `engine`
    python -m benchmarks.rollout_overhead [engine] [driver] [routing] [--quick] [--out FILE]

`engine`: tokens per second of whole rollouts against bare calls of the same vLLM engine; `driver`:
CPU time per generation and memory per conversation of rank 0 over a scripted engine; `routing`: how
much of the prompts is found in prefix caches with one engine and with several.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import rollout_driver, rollout_engine, rollout_routing
from benchmarks.results import add_options, provenance, start_load, table, write_section
from benchmarks.rollout_routing import Workload
from minirl.config import load_config

WORKLOADS = {
    "3 turns, alone": Workload(num_prompts=128, n=1, num_turns=3),
    "3 turns, groups of 8": Workload(num_prompts=16, n=8, num_turns=3),
    "1 turn, long prompts": Workload(num_prompts=16, n=8, num_turns=1, prompt_length=1000),
}


def measure_engine(quick: bool, folder: Path, config: str) -> dict[str, Any]:
    """Rollouts against bare calls."""
    num_prompts, repetitions = (4, 2) if quick else (16, 10)
    loaded = load_config([config])
    results = uvloop.run(
        rollout_engine.compare(loaded, folder, num_prompts=num_prompts, repetitions=repetitions)
    )
    print(
        f"{'agent loop':20}{'turns':>7}{'tokens':>8}   tokens/s: rollout, bare, ratio   CPU ratio"
    )
    for name, r in results.items():
        print(
            f"{name:20}{r['turns']:7}{r['tokens']:8}"
            f"{r['rollout_tokens_per_s']:12.0f}{r['bare_tokens_per_s']:8.0f}"
            f"{_spread(r['ratio'], r['ratios'])}  {_spread(r['cpu_ratio'], r['cpu_ratios'])}"
        )
    return results


def measure_driver(quick: bool, folder: Path, config: str) -> dict[str, Any]:
    """CPU time and memory of rank 0; the lowest of the repetitions, as others only add."""
    sizes, repetitions = ([40], 1) if quick else ([1_000, 3_000, 10_000], 3)
    print("conversations   CPU ms per generation: rank 0, engine   kB per conversation   tokens")
    results = {}
    for size in sizes:
        runs = [rollout_driver.measure(folder, size) for _ in range(repetitions)]
        least = results[str(size)] = {key: min(run[key] for run in runs) for key in runs[0]}
        print(
            f"{size:13}{least['driver_ms']:32.3f}{least['engine_ms']:8.3f}"
            f"{least['peak_kb']:22.1f}{least['tokens']:9.0f}"
        )
    return results


def measure_routing(quick: bool, folder: Path, config: str) -> dict[str, Any]:
    """Prefix-cache hit rates of servers that model a cache each."""
    results: dict[str, Any] = {}
    print(f"{'conversations':24}engines   hit rate   of one engine's   moves   requests per engine")
    for name, workload in WORKLOADS.items():
        rows = results[name] = {}
        for number in (1, 2) if quick else (1, 2, 4):
            stats = asyncio.run(rollout_routing.converse(number, workload))
            rows[number] = stats.cache_hit_rate
            requests = [stats.requests_per_server[i] for i in range(number)]
            print(
                f"{name:24}{number:7}{stats.cache_hit_rate:11.3f}"
                f"{stats.cache_hit_rate / rows[1]:18.3f}{stats.num_moves:8}   {requests}"
            )
    return results


PARTS = {"engine": measure_engine, "driver": measure_driver, "routing": measure_routing}


def _spread(middle: float, values: list[float]) -> str:
    return f"{middle:8.3f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="what the machinery around the engines costs")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--config", default="configs/debug/calculator_grpo.yaml")
    parser.add_argument("--quick", action="store_true", help="a trial of a few seconds per part")
    parser.add_argument("--out", type=Path, default=Path("build/rollout_overhead.json"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no part {sorted(unknown)}; choose of {', '.join(PARTS)}")
    results = {}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        for name in arguments.parts or PARTS:
            results[name] = PARTS[name](arguments.quick, Path(folder), arguments.config)
            print()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
