"""Folders of checkpoints: which are there and whole, and how one appears in one rename.

`checkpoints/step_000010/` holds `state/`, `rng_<rank>.json`, `meta.json`, and the checksums of all
of them in SHA256SUMS (`sha256sum -c SHA256SUMS` checks them by hand). What is being written or
removed has a name that begins with a dot.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from minirl.config import Config, ConfigError
from minirl.tracking import free_name

STEP_NAME = re.compile(r"step_(\d+)")
SUMS = "SHA256SUMS"
META = "meta.json"


def complete(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `directory` with their steps, oldest first."""
    try:
        names = os.listdir(directory)  # not glob, which takes what may not be read for empty
    except FileNotFoundError:
        return []
    found = [(STEP_NAME.fullmatch(name), directory / name) for name in names]
    return sorted((int(m[1]), path) for m, path in found if m and (path / META).is_file())


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return max(complete(directory), default=(0, None))[1]


def prepare(partial: Path) -> None:
    """An empty folder to write into."""
    remove(partial)
    (partial / "state").mkdir(parents=True)


def publish(partial: Path, final: Path) -> None:
    """Make `partial`, whose files are synced, a checkpoint: by one rename, durable when done."""
    sync_folder(partial / "state")
    sync_folder(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    remove(replaced)


def keep_newest(directory: Path, number: int) -> None:
    """Delete all but `number` checkpoints; none is ever there in part."""
    for _, path in complete(directory)[:-number]:
        deleted = path.with_name(f".{path.name}.deleted")
        path.rename(deleted)
        remove(deleted)


def clean_up(directory: Path) -> None:
    """Remove what a run that was killed left half-written or half-removed."""
    for path in directory.glob(".step_*.replaced"):
        final = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
        if not final.exists():
            path.rename(final)  # killed between the two renames of `publish`
    for path in directory.glob(".step_*"):
        remove(path)


def set_aside(directory: Path) -> Path | None:
    """Give the checkpoints of an earlier run another name, if there are any: their numbers would
    mix with those of the run that starts anew. Returns the name."""
    if not complete(directory):
        return None
    aside = free_name(directory)
    directory.rename(aside)
    return aside


def remove(path: Path) -> None:
    """With all that is in it, if it is there."""
    if path.exists():
        shutil.rmtree(path)


def write_text(path: Path, text: str) -> None:
    """Write and sync."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as fsync of a file does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """By name relative to `folder`."""
    return {str(path.relative_to(folder)): digest(path) for path in files}


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """As sha256sum(1) reads them."""
    lines = (f"{value}  {name}\n" for name, value in sorted(sums.items()))
    write_text(folder / SUMS, "".join(lines))


def read_sums(path: Path) -> list[tuple[str, str]]:
    """Names in the checkpoint `path`, and their checksums; ValueError when they cannot be read."""
    lines = _readable(path / SUMS, Path.read_text).splitlines()
    pairs = [(name, value) for value, _, name in (line.partition("  ") for line in lines)]
    if not pairs or not all(name and len(value) == 64 for name, value in pairs):
        raise ValueError(f"{path / SUMS} is damaged")
    return pairs


def check_files(path: Path, sums: Iterable[tuple[str, str]]) -> None:
    """ValueError for a file that is missing, cannot be read, or is not what was written."""
    for name, expected in sums:
        if _readable(path / name, digest) != expected:
            raise ValueError(f"{path / name} is damaged: its checksum is not that in {SUMS}")


def read_meta(path: Path) -> dict[str, Any]:
    """What `meta.json` says; ValueError when it is missing or damaged."""
    text = _readable(path / META, Path.read_text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path / META} is damaged: {error}") from error


def _readable(path: Path, read: Callable[[Path], str]) -> str:
    try:
        return read(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def check_sizes(path: Path) -> None:
    """ValueError when a file is missing or of another size than was written: what is found at
    once. Checksums take longer, and find the rest."""
    for name, size in read_meta(path)["bytes"].items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ValueError(f"{path / name} {state}")


def damaged(path: Path, problem: str) -> ConfigError:
    """What to say of a checkpoint that cannot be used, with the one that can."""
    return ConfigError(f"{path}: the checkpoint cannot be used: {problem}; {remedy(path)}")


def remedy(path: Path) -> str:
    """What a user can do when the checkpoint `path` cannot be used."""
    anew = "trainer.resume_mode=disable starts anew"
    for _, older in reversed(complete(path.parent)):
        if older < path and _is_whole(older):
            return f"{older} is whole: rename or remove {path} to go on from it, or {anew}"
    return f"no older one in {path.parent} is whole; {anew}"


def _is_whole(path: Path) -> bool:
    try:
        read_meta(path)
        check_files(path, read_sums(path))
    except ValueError:
        return False
    return True


def check_checkpoints(config: Config) -> dict[str, Any] | None:
    """ConfigError when the latest checkpoint cannot be gone on from, as far as that shows at once,
    or when none could be written; the `extra` of the one that the run goes on from."""
    trainer = config.trainer
    directory = trainer.run_dir / "checkpoints"
    extra = None
    try:
        path = latest(directory)
        if path and trainer.resume_mode != "disable":
            check_sizes(path)
            extra = read_meta(path)["extra"]
        if trainer.save_freq > 0:
            directory.mkdir(parents=True, exist_ok=True)
            trial = directory / f".trial_{os.getpid()}"
            trial.touch()
            trial.unlink()
    except ValueError as error:
        assert path is not None
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"{directory}: checkpoints cannot be read and written there ({error}); give this user "
            "the right to, or name another trainer.default_local_dir"
        ) from error
    return extra
