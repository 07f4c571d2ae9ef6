"""Parquet and JSONL rows to prompts, in a seeded order that can be resumed anywhere.

Columns are verl's: `prompt` (messages), and where present `data_source`, `reward_model` (`style`,
`ground_truth`), `extra_info` (`index`, `split`, `tools_kwargs`, ...) and `agent_name`. Others
travel along.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from minirl.config import Config, ConfigError, require

Row = dict[str, Any]

logger = logging.getLogger(__name__)


def load_rows(files: Sequence[str | Path]) -> list[Row]:
    """All rows of Parquet (.parquet) and JSON Lines (.jsonl) files, in the order of the files.

    Parquet gives every struct the keys of all rows, None where a row lacks one; those are dropped
    again inside `prompt`, `extra_info` and other structs, so that both formats give the same rows.

    Raises:
        ConfigError: a file is missing, unreadable or empty, or a row does not fit; the message
            names file, row (counted from 0) and column.
    """
    rows: list[Row] = []
    for file in map(Path, files):
        if not file.is_file():
            raise ConfigError(f"{file}: no such file")
        before = len(rows)
        for index, row in enumerate(_read(file)):
            _check_row(row, f"{file}: row {index}")
            rows.append(row)
        if len(rows) == before:
            raise ConfigError(f"{file}: has no rows")
    return rows


def filter_overlong(
    rows: Sequence[Row],
    count_tokens: Callable[[Row], int],
    *,
    max_prompt_length: int,
    filter_overlong_prompts: bool,
    truncation: str,
    place: str = "the data",
) -> list[Row]:
    """The rows to use, given that a prompt may have `max_prompt_length` tokens.

    Overlong prompts are dropped and counted under `filter_overlong_prompts`; else an error under
    `truncation="error"`; else kept, to be cut on that side when they are rendered.

    Raises:
        ConfigError: a prompt is too long and may not be cut, or every prompt was dropped.
    """
    if not filter_overlong_prompts and truncation != "error":
        return list(rows)
    kept = []
    for index, row in enumerate(rows):
        length = count_tokens(row)
        if length <= max_prompt_length:
            kept.append(row)
        elif not filter_overlong_prompts:
            raise ConfigError(
                f"data.max_prompt_length: got {max_prompt_length}, but the prompt of row {index} "
                f"of {place} has {length} tokens; raise it, set data.filter_overlong_prompts=true, "
                "or choose a side to cut with data.truncation"
            )
    if not kept:
        raise ConfigError(
            f"data.max_prompt_length: got {max_prompt_length}, "
            f"but all {len(rows)} prompts of {place} are longer"
        )
    if len(kept) < len(rows):
        logger.warning(
            "dropped %d of %d prompts longer than data.max_prompt_length=%d tokens",
            len(rows) - len(kept),
            len(rows),
            max_prompt_length,
        )
    return kept


SAME_AGAIN = {
    "seed": "trainer.seed",
    "num_rows": "data.train_files, number of rows",
    "batch_size": "data.train_batch_size",
    "shuffle": "data.shuffle",
}
"""What a position in the data is worth nothing without, and whose key it is."""


class PromptLoader:
    """Batches of rows without end; an epoch visits each row at most once.

    With `shuffle` every epoch has an order of its own, drawn from (seed, epoch); without it the
    order is that of the rows. As in verl a batch has exactly `batch_size` rows, and the
    `len(rows) % batch_size` rows left at the end of an epoch are not used in it: with `shuffle`
    other rows each epoch.

    >>> loader = PromptLoader(rows, batch_size=16, seed=0)
    >>> batch = loader.next_batch()  # 16 rows, each with a `uid` of "<epoch>-<index of the row>"
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.batch = 0
        """Batches of this epoch that were handed out."""

    def next_batch(self) -> list[Row]:
        """The next rows, as copies with a `uid`; goes on into the next epoch at the end of one."""
        if self.batch == len(self.rows) // self.batch_size:
            self.epoch, self.batch = self.epoch + 1, 0
        order: Sequence[int] = range(len(self.rows))
        if self.shuffle:
            order = _shuffled(len(self.rows), self.seed, self.epoch)
        start = self.batch * self.batch_size
        picked = order[start : start + self.batch_size]
        self.batch += 1
        return [{**self.rows[i], "uid": f"{self.epoch}-{i}"} for i in picked]

    def state_dict(self) -> dict[str, int]:
        """The position; with the rows and the seed it decides everything that follows."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "seed": self.seed,
            "num_rows": len(self.rows),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ConfigError: the rows, the batch size or the seed are others than then.
        """
        now = self.state_dict()
        for name, key in SAME_AGAIN.items():
            words = (
                f"the checkpoint was made with {state[name]}; restore it, or start a new run with "
            )
            words += "another trainer.experiment_name"
            require(state[name] == now[name], key, now[name], words)
        self.epoch, self.batch = state["epoch"], state["batch"]


def prompt_loader(config: Config, rows: Sequence[Row]) -> PromptLoader:
    """Of a run."""
    data = config.data
    return PromptLoader(rows, data.train_batch_size, seed=config.trainer.seed, shuffle=data.shuffle)


@lru_cache(maxsize=1)  # a million rows take a second, in which the event loop stands still
def _shuffled(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    Random(f"prompts-{seed}-{epoch}").shuffle(order)
    return order


def _read(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
    elif file.suffix == ".jsonl":
        yield from _read_jsonl(file)
    else:
        raise ConfigError(f"{file}: unknown format {file.suffix!r}; use .parquet or .jsonl")


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # UTF-8, dates
        raise ConfigError(f"{file}: not readable as Parquet: {error}") from error
    for row in rows:
        yield {column: _without_none(value) for column, value in row.items()}


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as content:
        lines = (line for line in content if line.strip())
        for index, line in enumerate(lines):
            try:
                row = json.loads(line)
                if b"\\u" in line:  # half a surrogate pair: JSON may hold it, no tokenizer takes it
                    json.dumps(row, ensure_ascii=False).encode()
            except ValueError as error:  # of JSON, of UTF-8, or of a number with too many digits
                raise ConfigError(f"{file}: row {index}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{file}: row {index}: expected an object, got {line[:40]!r}")
            yield {column: _without_none(value) for column, value in row.items()}


def _without_none(value: Any) -> Any:
    """`value` without None entries in dicts, at any depth; lists keep theirs."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


COLUMN_TYPES = {
    "data_source": (str, "a string"),
    "agent_name": (str, "the name of an agent loop"),
    "reward_model": (dict, "a struct with `ground_truth`"),
    "extra_info": (dict, "a struct"),
}


def _check_row(row: Row, place: str) -> None:
    if "prompt" not in row:
        raise ConfigError(
            f"{place}: column prompt is missing; there are {', '.join(row) or 'none'}"
        )
    _check_messages(row["prompt"], f"{place}, column prompt")
    for column, (kind, wanted) in COLUMN_TYPES.items():
        value = row.get(column)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{place}, column {column}: got {value!r}; must be {wanted}")
    for key in ("tools_kwargs", "interaction_kwargs"):
        value = (row.get("extra_info") or {}).get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{place}, column extra_info.{key}: got {value!r}; must be a struct")
    reward_model = row.get("reward_model")
    if reward_model is not None and "ground_truth" not in reward_model:
        raise ConfigError(
            f"{place}, column reward_model: got {reward_model!r}; `ground_truth` is missing"
        )


def _check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: got {messages!r}; must be a list of at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ConfigError(
                f"{place}, message {number}: got {message!r}; must have `role` and `content`"
            )
        if not isinstance(message["role"], str):
            raise ConfigError(
                f"{place}, message {number}: got role {message['role']!r}; must be a string"
            )
        if not isinstance(message["content"], str | list):
            raise ConfigError(
                f"{place}, message {number}: got content {message['content']!r}; must be a string, "
                "or a list of parts"
            )
