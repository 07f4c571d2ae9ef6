"""How much of the time the engine works in serial, sync and async rollout, why it is idle in the
rest, and how far from the best possible each is.

    python -m benchmarks.async_vs_sync [CONFIG] [--out DIR] [--full] [--record]

CONFIG is `cpu` (two cores, the default), `gpu`, or a YAML file like cpu.yaml in this folder.
Into DIR go results.json, report.html and pictures.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.async_vs_sync.report import (
    Results,
    as_markdown,
    print_case,
    print_steps,
    write,
    write_json,
)
from benchmarks.async_vs_sync.rollouts import (
    Arm,
    engine_client,
    measure_case,
)
from benchmarks.async_vs_sync.sampling import Device
from benchmarks.async_vs_sync.settings import (
    FOLDER,
    MODES_IN_TURN,
    Case,
    Settings,
    check_lengths,
    check_run,
    load_settings,
    make_model,
    write_run,
)
from benchmarks.async_vs_sync.steps import measure_steps, step_arms, write_rows
from benchmarks.results import provenance, write_section
from minirl.config import Config, ConfigError, load_config
from minirl.launch import run_command
from minirl.run import open_run


async def benchmark(
    settings: Settings, cases: Sequence[Case], out: Path, record: bool, config: Config
) -> None:
    """All cases on one engine, then the training steps."""
    began, load = time.perf_counter(), os.getloadavg()
    check_run(config)
    check_lengths(cases, settings, config)
    async with open_run(config) as run, engine_client() as client:
        assert run.inputs
        device, once = Device(), replace(config, rollout=replace(config.rollout, n=1))
        arms = {m: Arm(once, run.inputs, client, m, device) for m in MODES_IN_TURN}
        results = Results(settings=settings, load_before=load)
        for case in cases:
            for number in case.conversations:
                result = await measure_case(arms, client, settings, case, number)
                results.cases.append(result)
                print_case(result)
                write_json(results, out)  # the next one may fail
        if settings.steps:
            in_steps = step_arms(config, run.inputs, client, device, settings.steps)
            results.steps = await measure_steps(run, in_steps, settings)
            print_steps(results.steps)
    results.seconds = time.perf_counter() - began
    write(results, out)
    if record:
        write_section("async_vs_sync", f"{provenance(load[0])}\n\n{as_markdown(results)}")
    print(f"{results.seconds:.0f} s; {out}/report.html, results.json and pictures")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.async_vs_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/async_vs_sync"))
    parser.add_argument("--full", action="store_true", help="with the cases under `full`")
    parser.add_argument("--record", action="store_true", help="write the section in RESULTS.md")
    arguments = parser.parse_args()
    out, name = arguments.out, arguments.config
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        settings = load_settings(path)
        cases = settings.cases + (settings.full if arguments.full else [])
        out.mkdir(parents=True, exist_ok=True)
        model, rows = make_model(settings, out), out / "rows.jsonl"
        run = write_run(settings, out, model, rows)
        write_rows(settings, load_config([str(run)]).rollout.n, rows)
    except ConfigError as error:
        parser.exit(2, f"minirl: {error}\n")
    run_command(
        partial(benchmark, settings, cases, out, arguments.record),
        [str(run)],
        usage=str(__doc__),
    )


if __name__ == "__main__":
    main()
