"""Checkpoints: complete or absent, whatever kills the run.

A checkpoint holds everything that the next step depends on: parameters and optimizers of policy and
critic (torch.distributed.checkpoint, readable by any number of ranks), the random states of every
rank, and what the run adds: data position, KL controller, learning-rate schedules. It is written
under another name, synced to disk and renamed, so a folder with the right name is complete, and its
files have checksums. See checkpoint_folder.py for what lies where.
"""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers import PreTrainedModel

from minirl.config import ConfigError
from minirl.distributed import Dist
from minirl.trainer import checkpoint_folder as folder
from minirl.trainer import lora
from minirl.trainer.checkpoint_folder import complete, latest
from minirl.trainer.random_state import random_state, set_random_state
from minirl.trainer.update import TrainedModel

__all__ = ["CheckpointError", "Checkpoints", "complete", "latest", "load", "load_weights"]

R = TypeVar("R")
Parts = Mapping[str, TrainedModel]
"""What is saved, by name: `actor`, `critic`."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What an adapter leaves as it was is in its model's folder; _check_same_model is strict."""


class Checkpoints:
    """Writes the checkpoints of a run into `directory`, one at a time.

    In the `background`, `save` copies the state to host memory (which keeps room for one copy of
    this rank's shards) and a thread writes it while the training goes on; the next `save` waits for
    it. A write that fails on any rank fails on all of them: CheckpointError comes from the next
    call of any method. Every rank makes one and calls it with the others; what a run that was
    killed left half-written is removed.
    """

    def __init__(
        self,
        directory: Path,
        world: Dist,
        *,
        max_to_keep: int | None = None,
        background: bool = True,
        timeout_s: float = 1800.0,
    ) -> None:
        self.directory = directory
        self._world = world
        self._max_to_keep = max_to_keep
        self._background = background
        # A group of its own: its collectives run beside those of the training.
        wait_s = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=wait_s) if background else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[float] | None = None
        self._seconds = 0.0
        # Not the DefaultStager around it: torch 2.11's closes it after its first use.
        self._stager = StateDictStager(pin_memory=world.device.type == "cuda")
        if world.is_main:
            folder.clean_up(directory)
        world.barrier()

    def save(self, step: int, parts: Parts, extra: dict[str, Any]) -> Path:
        """Write `directory/step_<step>`, in the background or at once, and return its path.

        Then all but the newest `max_to_keep` are deleted. `extra` must fit into JSON.
        """
        self.wait()
        meta = {
            "step": step,
            "parameters": {name: _shapes(part.model) for name, part in parts.items()},
            "adapter_scaling": {name: lora.scaling(part.model) for name, part in parts.items()},
            "num_updates": {name: part.num_steps for name, part in parts.items()},
            "extra": extra,
        }
        # as text, since `extra` may change while the thread writes
        texts = json.dumps(meta), json.dumps(random_state(self._world.device))
        with _on_device(parts):
            state: dict[str, Any] = _state(parts)
            if self._background:
                state = self._stager.stage(state)
            self._writing = self._thread.submit(self._write, step, state, *texts)
            if not self._background:
                self.wait()
        return self._final(step)

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError."""
        if self._writing:
            wait([self._writing])
            self._collect(self._writing)

    def poll(self) -> float:
        """Seconds that writes took which have ended since the last call. Raises CheckpointError.

        Does not wait.
        """
        if self._writing and self._writing.done():
            self._collect(self._writing)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self, timeout_s: float) -> None:
        """Let a write that has begun go on for so many seconds, however the run ends."""
        if self._writing:
            wait([self._writing], timeout_s)

    def _collect(self, writing: Future[float]) -> None:
        self._seconds += writing.result()  # what failed stays, and fails again
        self._writing = None

    def _final(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _write(self, step: int, state: dict[str, Any], meta: str, numbers: str) -> float:
        """In the thread; every collective here is over its own group. Seconds."""
        start = time.perf_counter()
        final = self._final(step)
        partial = final.with_name(f".{final.name}.partial")
        try:
            self._on_main(lambda: folder.prepare(partial))
            dcp.save(state, checkpoint_id=partial / "state", process_group=self._group)
            sums = self._everywhere(lambda: self._write_numbers(partial, numbers))
            self._on_main(lambda: self._publish(partial, final, json.loads(meta), sums))
        except CheckpointException as error:  # is no Exception; every rank has the same one
            [(rank, (cause, _)), *_] = error.failures.items()
            raise self._failed(partial, f"rank {rank}: {_first_line(cause)}") from error
        except OSError as error:
            raise self._failed(partial, str(error)) from error
        return time.perf_counter() - start

    def _write_numbers(self, partial: Path, numbers: str) -> dict[str, str]:
        """This rank's random states; the checksums of all that it has written."""
        rank = self._world.rank
        own = partial / f"rng_{rank}.json"
        folder.write_text(own, numbers)
        return folder.digests(partial, [own, *partial.glob(f"state/__{rank}_*")])

    def _publish(
        self, partial: Path, final: Path, meta: dict[str, Any], parts: list[dict[str, str]]
    ) -> None:
        sums = {name: value for part in parts for name, value in part.items()}
        sums |= folder.digests(partial, [partial / "state" / ".metadata"])
        meta["bytes"] = {name: (partial / name).stat().st_size for name in sums}
        folder.write_text(partial / folder.META, json.dumps(meta))
        folder.write_sums(partial, sums | folder.digests(partial, [partial / folder.META]))
        folder.publish(partial, final)
        if self._max_to_keep:
            folder.keep_newest(self.directory, self._max_to_keep)

    def _on_main(self, work: Callable[[], None]) -> None:
        self._everywhere(work if self._world.is_main else lambda: None)

    def _everywhere(self, work: Callable[[], R]) -> list[R]:
        """Do `work` on every rank; what came of it, by rank. OSError on all where one fails."""
        result, problem = None, ""
        try:
            result = work()
        except OSError as error:
            problem = str(error)
        outcomes: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(outcomes, (result, problem), group=self._group)
        for rank, (_, words) in enumerate(outcomes):
            if words:
                raise OSError(f"rank {rank}: {words}")
        return [result for result, _ in outcomes]

    def _failed(self, partial: Path, problem: str) -> CheckpointError:
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # gives back what room it took
        whole = latest(self.directory)
        last = f"the last one is {whole}" if whole else "there is none yet"
        return CheckpointError(
            f"{partial}: the checkpoint could not be written: {problem}; make room there, or let "
            f"this user write there, and start again: the run goes on from its last checkpoint "
            f"({last})"
        )


def load(path: Path, parts: Parts, world: Dist) -> dict[str, Any]:
    """Restore parameters, optimizers and random states in place; return `{"step": ..., **extra}`.

    The number of ranks may differ from that of the run that saved (then ranks beyond it keep
    their random state). Parts of the checkpoint that are not asked for stay unread. Raises
    ConfigError when a file is missing or damaged, it lacks a part, or is another model's. Every
    rank takes part.
    """
    _verify(path, world)
    meta = folder.read_meta(path)
    for name, part in parts.items():
        _check_same_model(path, name, meta, part.model)
    with _on_device(parts):
        state = _state(parts)
        dcp.load(state, checkpoint_id=path / "state")
        for name, part in parts.items():
            groups = part.optimizer.param_groups
            settings = [{k: v for k, v in g.items() if k != "params"} for g in groups]
            set_state_dict(
                part.model,
                part.optimizer,
                model_state_dict=state[name]["model"],
                optim_state_dict=state[name]["optimizer"],
                options=TRAINED,
            )
            for group, ours in zip(part.optimizer.param_groups, settings, strict=True):
                group.update(ours)  # betas ... are the config's, which may have changed
            part.num_steps = meta["num_updates"][name]
    numbers = path / f"rng_{world.rank}.json"
    if numbers.is_file():
        set_random_state(json.loads(numbers.read_text()), world.device)
    return {"step": meta["step"]} | meta["extra"]


def load_weights(
    path: Path, part: str, model: PreTrainedModel, world: Dist | None = None
) -> dict[str, Any]:
    """Fill `model` with the weights of `part` (`actor`, `critic`); return `{"step": ..., **extra}`.
    ConfigError if it is another's, or a file is missing or damaged.

    Without `world` it needs no other rank, whatever the number that saved.
    """
    _verify(path, world)
    meta = folder.read_meta(path)
    _check_same_model(path, part, meta, model)
    weights = get_model_state_dict(model, options=TRAINED)
    with warnings.catch_warnings():  # it says that there is no other rank
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({part: {"model": weights}}, checkpoint_id=path / "state", no_dist=world is None)
    set_model_state_dict(model, weights, options=TRAINED)
    return {"step": meta["step"]} | meta["extra"]


def _verify(path: Path, world: Dist | None) -> None:
    """ConfigError on every rank when any file is not as it was written; each checks its share."""
    rank, size = (world.rank, world.world_size) if world else (0, 1)
    problem = ""
    try:
        folder.check_files(path, folder.read_sums(path)[rank::size])
    except ValueError as error:
        problem = str(error)
    problems = world.gather(problem) if world else [problem]
    for problem in filter(None, problems):
        raise folder.damaged(path, problem)


@contextmanager
def _on_device(parts: Parts) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts.values():
            stack.enter_context(part.on_device(optimizer=True))
        yield


def _state(parts: Parts) -> dict[str, Any]:
    return {name: _state_of(part) for name, part in parts.items()}


def _state_of(part: TrainedModel) -> dict[str, Any]:
    is_new = not part.optimizer.state
    model, optimizer = get_state_dict(part.model, part.optimizer, options=TRAINED)
    if is_new:  # torch has made its state, by a step of its own, which counts as one
        for state in part.optimizer.state.values():
            state["step"].zero_()
    return {"model": model, "optimizer": optimizer}


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _check_same_model(path: Path, part: str, meta: dict[str, Any], model: nn.Module) -> None:
    saved, here, scaling = meta["parameters"].get(part), _shapes(model), lora.scaling(model)
    restart = "set trainer.resume_mode=disable or another trainer.experiment_name"
    if saved == here:
        before = meta.get("adapter_scaling", {}).get(part, scaling)  # older ones do not say
        if before != scaling:
            raise ConfigError(
                f"{path}: its adapter was trained to count {before} times (model.lora_alpha / "
                f"model.lora_rank), and would now count {scaling} times: another policy; write "
                f"model.lora_alpha as it was, or {restart}"
            )
        return
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


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
