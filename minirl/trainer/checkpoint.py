"""Checkpoints: complete or absent, whatever kills the run.

`checkpoints/step_000010/` holds `state/` (torch.distributed.checkpoint: parameters and optimizer of
policy and critic, readable by any number of ranks), `rng_<rank>.json` and `meta.json`. It is
written under another name, synced to disk and renamed, so a folder with the right name is complete.
"""

import base64
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from transformers import PreTrainedModel

from minirl.config import ConfigError
from minirl.distributed import Dist

STEP_NAME = re.compile(r"step_(\d+)")


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What an adapter leaves as it was is in its model's folder; _check_same_model is strict."""


class Part(Protocol):
    """What is saved under a name: `actor`, `critic`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Optimizer: ...


def save(
    directory: Path,
    step: int,
    parts: Mapping[str, Part],
    extra: dict[str, Any],
    world: Dist,
    *,
    max_to_keep: int | None = None,
) -> Path:
    """Write `directory/step_<step>` and return it; then delete all but the newest `max_to_keep`.

    `extra` (data position, schedule, weight version ...) must fit into JSON. The random states of
    Python and torch are saved per rank. Every rank takes part.
    """
    final = directory / f"step_{step:06d}"
    partial = directory / f".{final.name}.partial"
    if world.is_main:
        for stale in directory.glob(".step_*"):
            shutil.rmtree(stale)
        partial.mkdir(parents=True)
    world.barrier()
    dcp.save(_state(parts), checkpoint_id=partial / "state")
    _write_json(partial / f"rng_{world.rank}.json", _random_state())
    world.barrier()
    if world.is_main:
        meta = {"step": step, "parameters": _shapes(parts), "extra": extra}
        _write_json(partial / "meta.json", meta)
        _sync_folder(partial / "state")
        _sync_folder(partial)
        replaced = directory / f".{final.name}.replaced"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _sync_folder(directory)
        shutil.rmtree(replaced, ignore_errors=True)  # where there was none
        for old in [path for _, path in complete(directory)][: -max_to_keep if max_to_keep else 0]:
            shutil.rmtree(old)
    world.barrier()
    return final


def complete(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `directory` with their steps, oldest first."""
    found = [(STEP_NAME.fullmatch(path.name), path) for path in directory.glob("step_*")]
    return sorted((int(m[1]), path) for m, path in found if m and (path / "meta.json").is_file())


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return max(complete(directory), default=(0, None))[1]


def load(path: Path, parts: Mapping[str, Part], world: Dist) -> dict[str, Any]:
    """Restore parameters, optimizers and random states in place; return `{"step": ..., **extra}`.

    The number of ranks may differ from that of the run that saved (then ranks beyond it keep
    their random state). Parts of the checkpoint that are not asked for stay unread. Raises
    ConfigError when it lacks one, or is another model's. Every rank takes part.
    """
    meta = json.loads((path / "meta.json").read_text())
    for name, shapes in _shapes(parts).items():
        _check_same_model(path, name, meta["parameters"].get(name), shapes)
    state = _state(parts)
    dcp.load(state, checkpoint_id=path / "state")
    for name, part in parts.items():
        loaded = state[name]
        set_state_dict(
            part.model,
            part.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=TRAINED,
        )
    random_state = path / f"rng_{world.rank}.json"
    if random_state.is_file():
        _set_random_state(json.loads(random_state.read_text()))
    return {"step": meta["step"]} | meta["extra"]


def load_weights(path: Path, part: str, model: PreTrainedModel) -> None:
    """Fill `model` with the weights of `part` (`actor`, `critic`); ConfigError if it is another's.

    Needs no other rank, whatever the number that saved.
    """
    saved = json.loads((path / "meta.json").read_text())["parameters"].get(part)
    _check_same_model(path, part, saved, _shapes_of(model))
    weights = get_model_state_dict(model, options=TRAINED)
    with warnings.catch_warnings():  # it says that there is no other rank
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({part: {"model": weights}}, checkpoint_id=path / "state", no_dist=True)
    set_model_state_dict(model, weights, options=TRAINED)


def _state(parts: Mapping[str, Part]) -> dict[str, Any]:
    states = {
        name: get_state_dict(part.model, part.optimizer, options=TRAINED)
        for name, part in parts.items()
    }
    return {name: {"model": m, "optimizer": o} for name, (m, o) in states.items()}


def _shapes(parts: Mapping[str, Part]) -> dict[str, dict[str, list[int]]]:
    return {part: _shapes_of(trained.model) for part, trained in parts.items()}


def _shapes_of(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _check_same_model(path: Path, part: str, saved: dict[str, Any] | None, here: Any) -> None:
    if saved == here:
        return
    restart = "set trainer.resume_mode=disable or another trainer.experiment_name"
    if saved is None:
        raise ConfigError(
            f"{path}: the checkpoint of a run without {part}; remove it, or {restart}"
        )
    name = min(saved.keys() ^ here.keys() or {n for n in here if here[n] != saved[n]})
    raise ConfigError(
        f"{path}: the checkpoint of another model: {name} is {saved.get(name, 'not there')} in it "
        f"and {here.get(name, 'not there')} in {'critic' if part == 'critic' else 'model'}.path; "
        f"name the model that the run began with, or {restart}"
    )


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    torch_state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    return {"python": [version, list(words), gauss], "torch": torch_state}


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch_state = bytearray(base64.b64decode(state["torch"]))
    torch.set_rng_state(torch.frombuffer(torch_state, dtype=torch.uint8))


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as fsync of a file does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
