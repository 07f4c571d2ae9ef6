"""JSON Lines: strict, and whole files only."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def to_json(value: Any) -> str:
    """Strict JSON on one line: non-finite floats as in JsonlTracker, arrays as lists, and whatever
    JSON does not know as its `str`."""
    try:
        return json.dumps(value, allow_nan=False)  # to make it plain first takes as long again
    except (TypeError, ValueError):
        return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def replace_lines(path: Path, lines: Sequence[str]) -> None:
    """Make `lines` the whole file; it is written beside and renamed, so it is never half there."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)
