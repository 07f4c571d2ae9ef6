"""Written rows: what the commands that make the data of an example share."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_splits(make_rows: Callable[[int, int], list[dict[str, Any]]], name: str) -> None:
    """A command that writes train.jsonl and val.jsonl of `make_rows(count, seed)` to --out,
    build/<name> unless given; the splits have seeds of their own."""
    parser = argparse.ArgumentParser(description=f"rows for the example {name}")
    parser.add_argument("--out", type=Path, default=Path("build", name))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate([("train", 2000), ("val", 100)]):
        rows = make_rows(count, 2 * arguments.seed + number)
        lines = [json.dumps(row) + "\n" for row in rows]
        (arguments.out / f"{split}.jsonl").write_text("".join(lines))
