"""Rows of the tensors in a model folder's safetensors files, without the rest of them."""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PLAIN_TYPES = {"F32", "F16", "BF16"}


class ShardedFiles:
    """The tensors of a model folder or a hub name, in one file or many.

    A file is mapped for one tensor at a time, so that what has been read does not stay in memory.
    """

    def __init__(self, path: str) -> None:
        self._file_of = _files(path)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor of plain floating-point numbers; None where there is no such tensor."""
        if name not in self._file_of:
            return None
        with safe_open(self._file_of[name], "pt") as file:
            found = file.get_slice(name)
            return tuple(found.get_shape()) if found.get_dtype() in PLAIN_TYPES else None

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor, in the type of the file."""
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_slice(name)[first:last].clone()  # else a view of the mapped file


def _files(path: str) -> dict[str, Path]:
    """The file of each tensor; none for a model in another format."""
    if index := _find(path, INDEX):
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {file: _find(path, file) for file in set(names.values())}
        return {name: found for name, file in names.items() if (found := files[file])}
    single = _find(path, SINGLE)
    if single is None:
        return {}
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _find(path: str, name: str) -> Path | None:
    """A file of the folder or of the hub name, which is downloaded where it is not yet there."""
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
