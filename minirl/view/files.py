"""What is in a run directory, as the page wants it."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from minirl.config import ConfigError, load_config, run_config_file
from minirl.tracking import read_metrics

LONGEST_CHARACTER = 4
"""Tokens that one character may be spread over: those of its bytes."""
IN_BRIEF = ("split", "uid", "sample_index", "reward", "termination", "start_s", "end_s", "rewards")
TEXTS = ("text", "observation", "arguments", "result")


class RunFiles:
    """Reads as asked, so that a run which goes on can be looked at."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError when there is no run in `run_dir`."""
        self._dir, self._config_file = run_dir, run_config_file(run_dir)

    def overview(self) -> dict[str, Any]:
        """`name`, `steps` that have trajectories, names of all `metrics`."""
        files = (self._dir / "trajectories").glob("step_*.jsonl")
        return {
            "name": self._dir.resolve().name,
            "steps": sorted(int(path.stem.removeprefix("step_")) for path in files),
            "metrics": sorted({name for row in self._metrics() for name in row} - {"step", "time"}),
        }

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) where there is one."""
        return [(row["step"], row[name]) for row in self._metrics() if name in row]

    def step(self, number: int) -> list[dict[str, Any]]:
        """Each trajectory of a step: what it was like and when, without its texts and tokens."""
        return [_in_brief(row) for row in self._rows(number)]

    def trajectory(self, number: int, index: int) -> dict[str, Any]:
        """All that is known of one: its line of the file, and `pieces`, the text of each token of
        the response; where that cannot be had, `pieces_error` says why."""
        row = self._rows(number)[index]
        decode, reason = self._decode
        known = pieces(row["response_ids"], decode) if decode else None
        return {**row, "pieces": known, "pieces_error": reason}

    def _metrics(self) -> list[dict[str, Any]]:
        path = self._dir / "metrics.jsonl"
        return _read_metrics(self._dir, *_version(path)) if path.exists() else []

    def _rows(self, number: int) -> list[dict[str, Any]]:
        path = self._dir / "trajectories" / f"step_{number:06d}.jsonl"
        return _read_rows(path, *_version(path))

    @cached_property
    def _decode(self) -> tuple[Callable[[list[int]], str] | None, str | None]:
        """The tokenizer's, or why there is none."""
        from transformers import AutoTokenizer  # takes seconds, and the page is there before

        try:
            model = load_config([str(self._config_file)]).model
        except ConfigError as error:
            return None, str(error)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                model.path, trust_remote_code=model.trust_remote_code
            )
        except (OSError, ValueError) as error:
            return None, f"model.path={model.path}: {str(error).strip().splitlines()[0]}"
        return tokenizer.decode, None


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=1)
def _read_metrics(run_dir: Path, size: int, mtime_ns: int) -> list[dict[str, Any]]:
    """Kept as long as the file is the same."""
    return read_metrics(run_dir)


@lru_cache(maxsize=2)
def _read_rows(path: Path, size: int, mtime_ns: int) -> list[dict[str, Any]]:
    """Kept for the next trajectory of the same file, as long as that is the same."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _in_brief(row: dict[str, Any]) -> dict[str, Any]:
    def without_texts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in part.items() if k not in TEXTS} for part in parts]

    pairs = zip(row.get("advantages", ()), row["response_mask"], strict=False)
    advantages = [float(advantage) for advantage, sampled in pairs if sampled]
    return {
        **{name: row[name] for name in IN_BRIEF},
        "turns": without_texts(row["turns"]),
        "tool_calls": without_texts(row["tool_calls"]),
        "num_tokens": sum(row["response_mask"]),
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "failed": row["error"] is not None,
    }


def pieces(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each token adds, "" for all but the last token of a character.

    Each is decoded behind the one before it, as some tokenizers drop a space at the beginning.
    """
    texts: list[str] = []
    before: list[int] = []
    begun: list[int] = []
    for token in ids:
        begun.append(token)
        known, text = decode(before), decode(before + begun)
        text = text[len(known) :] if text.startswith(known) else decode(begun)
        if text.endswith("\ufffd") and len(begun) < LONGEST_CHARACTER:
            texts.append("")
        else:
            texts.append(text)
            before, begun = begun, []
    if begun:
        texts[-1] = decode(begun)
    return texts
