"""The journal of a run: a conversation is on disk before it counts.

`journal/step_000012` is written while step 12 runs: what the conversations were sampled from, each
of them when it has ended, and in the end what came of the step. A run that was killed repeats the
steps since its last checkpoint from their journals, and samples only what is not in them; with
trainer.deterministic all are kept, for `python -m minirl.replay`.

A record is its length and checksum, 4 bytes each, and MessagePack. It is handed to the system in
one piece, so it survives the process, whatever kills that. Of a record that is torn (the machine
lost power, the disk was full) nothing is used, nor of what follows it.
"""

import asyncio
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from minirl.config import Config
from minirl.jsonl import to_json
from minirl.rollout.wire import encode_number
from minirl.rollout.worker import SampleRequest
from minirl.types import Trajectory

MAGIC = b"minirl journal 1\n"
FRAME = struct.Struct("<II")  # length of what follows, and its CRC-32
FILE_NAME = re.compile(r"step_(\d+)")

UNRELATED = {
    "trainer": (
        "experiment_name",
        "default_local_dir",
        "val_before_train",
        "test_freq",
        "save_freq",
        "max_ckpt_to_keep",
        "resume_mode",
        "logger",
        "collective_timeout_s",
    ),
    "rollout": ("val_kwargs", "sync_check", "stall_warning_s", "engine_timeout_s", "trace"),
    "data": ("val_files",),
}
"""Keys that decide nothing of what is sampled or learned, and rollout.agent.num_workers."""


class Header(msgspec.Struct, kw_only=True, frozen=True, tag="header"):
    """What the conversations of a step were sampled from."""

    step: int
    weight_version: int
    """Of the weights in the engines: the step after which they were sent."""
    config: str
    """Digest of the keys that matter: `config_digest`."""
    files: str
    """Digest of the files that they name: `files_digest`."""
    parameters: str | None
    """Hash of the trainer's, with trainer.deterministic."""
    environment: dict[str, str]
    """Of the trainer, which does not decide what is sampled."""

    def fits(self, other: "Header") -> bool:
        """Whether conversations of the one are conversations of the other."""
        return msgspec.structs.replace(self, environment=other.environment) == other


class Conversation(msgspec.Struct, kw_only=True, tag="conversation"):
    """One that has ended, rewards included, but for a reward model's, which scores whole steps."""

    uid: str
    sample_index: int
    seed: int
    trajectories: list[Trajectory]
    """Without the ground truth, which the row holds."""


class Outcome(msgspec.Struct, kw_only=True, tag="outcome"):
    """What came of a step; a journal without it is that of a step that did not end."""

    parameters: str | None
    """Hash of the trainer's behind it, with trainer.deterministic."""
    metrics: dict[str, float]
    """actor/... and critic/..."""

    def differences(self, other: "Outcome") -> list[str]:
        """Names of what is not the same in both, to the last bit."""
        ours, theirs = (o.metrics | {"parameters": o.parameters} for o in (self, other))
        # By their words: nan is the same as nan, and -0.0 is not 0.0.
        return [n for n in ours | theirs if repr(ours.get(n)) != repr(theirs.get(n))]


Record = Header | Conversation | Outcome
DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def config_digest(config: Config) -> str:
    """The same for configs that differ in UNRELATED keys only."""
    return _digest(_related(config))


def files_digest(config: Config) -> str:
    """The same as long as the files that the config names (rows, tools, rewards, the model folder)
    have the sizes and times that they have."""
    # os.path's: a Path raises for a text that is too long for a name, such as a judge's rubric.
    paths = [Path(value) for value in _texts(_related(config)) if os.path.exists(value)]
    files = {f for path in paths for f in (path.iterdir() if path.is_dir() else [path])}
    there = sorted(f for f in files if f.exists())  # a link may lead nowhere
    return _digest([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in there])


def _related(config: Config) -> dict[str, Any]:
    content = asdict(config)
    for section, names in UNRELATED.items():
        for name in names:
            del content[section][name]
    del content["rollout"]["agent"]["num_workers"]
    return content


def _texts(value: Any) -> Iterator[str]:
    """Every text in a nest of mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _digest(content: Any) -> str:
    return hashlib.sha256(to_json(content).encode()).hexdigest()


def read_journal(path: Path) -> tuple[list[Record], int]:
    """The whole records of a file, and the bytes that they take; none where it is no journal."""
    content = memoryview(path.read_bytes())
    if bytes(content[: len(MAGIC)]) != MAGIC:
        return [], 0
    records, place = list[Record](), len(MAGIC)
    while len(content) >= place + FRAME.size:
        size, checksum = FRAME.unpack_from(content, place)
        body = content[place + FRAME.size : place + FRAME.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        records.append(DECODER.decode(body))
        place += FRAME.size + size
    return records, place


class Journal:
    """Of one step: `find` what was sampled already, `append` what has ended, `end` the step."""

    def __init__(self, path: Path, records: Sequence[Record], *, file: int | None = None) -> None:
        self.path = path
        self.outcome: Outcome | None = None
        self._file = file
        self._known: dict[tuple[str, int, int], list[Trajectory]] = {}
        for record in records:
            if isinstance(record, Conversation):
                key = record.uid, record.sample_index, record.seed
                self._known[key] = record.trajectories
            elif isinstance(record, Outcome):
                self.outcome = record

    @classmethod
    def begin(cls, path: Path, header: Header) -> Self:
        """Go on with the file where it fits `header`, else make a new one."""
        records, size = read_journal(path) if path.exists() else ([], 0)
        found = _header(records)
        begun = found is not None and found.fits(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if begun else os.O_TRUNC)
        file = os.open(path, flags, 0o666)
        if begun:
            os.ftruncate(file, size)  # what was torn
        else:
            _write(file, MAGIC + _frame(header))
        return cls(path, records if begun else [], file=file)

    def find(self, request: SampleRequest) -> list[Trajectory] | None:
        """What came of it, where it is known. Once: the trajectories belong to the caller."""
        key = request.row["uid"], request.sample_index, request.seed
        known = self._known.pop(key, None)
        truth = (request.row.get("reward_model") or {}).get("ground_truth")
        for trajectory in known or ():
            trajectory.ground_truth = truth
        return known

    async def append(self, request: SampleRequest, trajectories: list[Trajectory]) -> None:
        """Returns when it is written; OSError where it cannot be."""
        if self._file is None:
            return
        bare = [replace(trajectory, ground_truth=None) for trajectory in trajectories]
        record = Conversation(
            uid=request.row["uid"],
            sample_index=request.sample_index,
            seed=request.seed,
            trajectories=bare,
        )
        await asyncio.to_thread(_write, self._file, _frame(record))

    def end(self, outcome: Outcome) -> None:
        """Note what came of the step, in place of what was noted before."""
        if self._file is not None:
            _write(self._file, _frame(outcome))
        self.outcome = outcome

    def close(self) -> None:
        """No more is written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Journals:
    """Those of a run, on rank 0: since the last checkpoint, or all with trainer.deterministic.

    `environment` is as in Header.
    """

    def __init__(self, config: Config, environment: dict[str, str]) -> None:
        self.folder = config.trainer.run_dir / "journal"
        self._config, self._files = config_digest(config), files_digest(config)
        self._environment = environment
        self._keep = config.trainer.deterministic
        self._open: Journal | None = None

    def header(self, step: int, parameters: str | None) -> Header:
        """Of a journal that is written now."""
        return Header(
            step=step,
            weight_version=step - 1,
            config=self._config,
            files=self._files,
            parameters=parameters,
            environment=self._environment,
        )

    def has_begun(self, parameters: str | None) -> bool:
        """Whether there is the first step of a run that began as this one does."""
        path = self._path(1)
        header = _header(read_journal(path)[0]) if path.exists() else None
        return header is not None and header.fits(self.header(1, parameters))

    def begin(self, step: int, parameters: str | None) -> Journal:
        """The journal of a step, with what it holds already. What follows a step that did not end,
        or that is now made of other conversations, goes."""
        self.close()
        journal = self._open = Journal.begin(self._path(step), self.header(step, parameters))
        if journal.outcome is None:
            self._remove(lambda other: other > step)
        return journal

    def forget(self, step: int) -> None:
        """There is a checkpoint of this step: nothing up to it is repeated again."""
        if not self._keep:
            self._remove(lambda other: other <= step)

    def clear(self) -> None:
        """A new run begins."""
        self._remove(lambda other: True)

    def close(self) -> None:
        """No more is written."""
        if self._open is not None:
            self._open.close()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _remove(self, is_stale: Callable[[int], bool]) -> None:
        for path in self.folder.glob("step_*"):
            if (match := FILE_NAME.fullmatch(path.name)) and is_stale(int(match[1])):
                path.unlink()


def _header(records: Sequence[Record]) -> Header | None:
    return records[0] if records and isinstance(records[0], Header) else None


def _frame(record: Record) -> bytes:
    body = msgspec.msgpack.encode(record, enc_hook=encode_number)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def _write(file: int, content: bytes) -> None:
    """All of it in one piece, so that records of several threads do not mix."""
    if (written := os.write(file, content)) < len(content):
        raise OSError(f"only {written} of {len(content)} bytes were written: is the disk full?")
