"""What the machinery around the engines costs: three measurements, each a table.

    python -m examples.calculator.prepare --out build/calculator      # for the part `engine`
    python -m benchmarks.rollout_overhead [engine] [driver] [routing] [--quick] [--record]

`engine`: tokens per second of whole rollouts against bare calls of the same vLLM engine, as many
pairs as `--repetitions` says; `driver`: CPU time per generation and memory per conversation of rank
0 over a scripted engine; `routing`: how much of the prompts is found in prefix caches with one
engine and with several.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import rollout_driver, rollout_engine, rollout_routing
from benchmarks.results import make_parser, start_load, table, write
from benchmarks.rollout_routing import Workload
from minirl.config import load_config

WORKLOADS = {
    "3 turns, alone": Workload(num_prompts=128, n=1, num_turns=3),
    "3 turns, groups of 8": Workload(num_prompts=16, n=8, num_turns=3),
    "1 turn, long prompts": Workload(num_prompts=16, n=8, num_turns=1, prompt_length=1000),
}


def measure_engine(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rollouts against bare calls."""
    num_prompts, repetitions = (4, 2) if arguments.quick else (16, arguments.repetitions)
    config = load_config([arguments.config])
    return uvloop.run(
        rollout_engine.compare(config, folder, num_prompts=num_prompts, repetitions=repetitions)
    )


def report_engine(results: dict[str, Any]) -> str:
    """A row per kind of agent loop."""
    header = ("agent loop", "turns", "tokens", "tokens/s", "bare", "ratio", "CPU ratio")
    figures = ("turns", "tokens", "rollout_tokens_per_s", "bare_tokens_per_s", "ratios")
    rows = [(name, *(r[f] for f in figures), r["cpu_ratios"]) for name, r in results.items()]
    return table(header, rows)


def measure_driver(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """CPU time and memory of rank 0; the lowest of the repetitions, as others only add."""
    sizes, repetitions = ([40], 1) if arguments.quick else (arguments.conversations, 3)
    results = {}
    for size in sizes:
        runs = [rollout_driver.measure(folder, size) for _ in range(repetitions)]
        results[str(size)] = {key: min(run[key] for run in runs) for key in runs[0]}
    return results


def report_driver(results: dict[str, Any]) -> str:
    """A row per number of conversations."""
    header = ("conversations", "CPU ms per generation: rank 0", "the scripted engine")
    rows = [(size, *costs.values()) for size, costs in results.items()]
    return table([*header, "peak kB per conversation", "tokens of one"], rows)


def measure_routing(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prefix-cache hit rates of servers that model a cache each; see benchmarks.routing."""
    return {
        name: {
            number: asyncio.run(rollout_routing.converse(number, workload))
            for number in ((1, 2) if arguments.quick else (1, 2, 4))
        }
        for name, workload in WORKLOADS.items()
    }


def report_routing(results: dict[str, Any]) -> str:
    """A row per workload and number of engines."""
    rows = []
    for name, by_number in results.items():
        for number, stats in by_number.items():
            rate, requests = stats.cache_hit_rate, stats.requests_per_server
            share = rate / by_number[1].cache_hit_rate
            each = " ".join(str(requests[i]) for i in range(number))
            rows.append((name, number, rate, share, stats.num_moves, each))
    header = ("conversations", "engines", "hit rate", "of one engine's", "moves")
    return table([*header, "requests per engine"], rows)


PARTS = {
    "engine": (measure_engine, report_engine),
    "driver": (measure_driver, report_driver),
    "routing": (measure_routing, report_routing),
}
ABOUT = {
    "engine": "Rollouts of the demo's policy against bare calls of `AsyncLLM.generate` with the "
    "same requests, pairs in turn; the CPU ratio counts all processes.",
    "driver": "Rank 0 over a scripted engine in a process of its own, conversations of three "
    "turns in groups of 8, all at once, the lowest of three runs.",
    "routing": "Prefix-cache hit rate over servers that model a block-wise cache.",
}


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("rollout_overhead", __doc__, repetitions=10)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--config", default="configs/debug/calculator_grpo.yaml")
    parser.add_argument("--conversations", type=int, nargs="+", default=[1_000, 3_000, 10_000])
    parser.add_argument("--quick", action="store_true", help="a trial of a few seconds per part")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no part {sorted(unknown)}; choose of {', '.join(PARTS)}")
    if any(number < 8 or number % 8 for number in arguments.conversations):
        parser.error(f"--conversations: got {arguments.conversations}; give multiples of 8")
    load, results, texts = start_load(), {}, list[str]()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        for name in arguments.parts or PARTS:
            measure, report = PARTS[name]
            results[name] = measure(arguments, Path(folder))
            print(report(results[name]), end="\n\n")
            texts += [ABOUT[name], report(results[name])]
    write(arguments, results, "rollout_overhead", load, *texts)


if __name__ == "__main__":
    main()
