"""`trainer.deterministic`: the same trajectories give the same parameters, to the last bit."""

import hashlib
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import transformers

from minirl.agent_loop import derive_seed
from minirl.config import Config, ConfigError
from minirl.distributed import Dist, num_threads, place
from minirl.trainer.buckets import WeightBuckets
from minirl.trainer.model import PackedModel

BUCKET_BYTES = 512 * 2**20
"""Of parameters that are gathered at once to be hashed."""


def check_deterministic(config: Config) -> None:
    """ConfigError for what trainer.deterministic cannot be had with; opens nothing."""
    if not config.trainer.deterministic:
        return
    device = place(config, os.environ).device
    if config.rollout.name == "transformers" and device.type == "cuda":
        raise ConfigError(
            "rollout.name: got 'transformers', which samples in the trainer's process by a "
            "cumulative sum, for which torch has no deterministic algorithm on a GPU; use another "
            "engine, trainer.device=cpu, or trainer.deterministic=false"
        )


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Have torch compute by deterministic algorithms inside, and raise RuntimeError, which names
    the operation, where it has none. To be entered before anything is on a GPU."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if enabled:
        # cuBLAS looks at it when it is first used; without it several streams share a workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Put the generators of Python and torch (all devices) where they are at the start of `step`,
    whatever happened before: a run that goes on from a checkpoint, or repeats a step, included."""
    number = derive_seed(seed, "generators", step, rank)
    random.seed(number)
    torch.manual_seed(number)


def parameter_hash(models: Iterable[PackedModel], world: Dist) -> str | None:
    """SHA-256 of the float32 parameters of `models`, on rank 0; every rank takes part.

    Of names and values in the order of `named_parameters`, whatever the number of ranks; an adapter
    counts as merged.
    """
    digest = hashlib.sha256()
    for packed in models:
        for bucket in WeightBuckets(packed.model, BUCKET_BYTES, torch.float32, packed.on_device):
            for name, tensor in bucket if world.is_main else []:
                digest.update(name.encode())
                # A copy: a storage that numpy has seen cannot be resized, as actor.offload does.
                digest.update(tensor.to("cpu", copy=True).contiguous().numpy().data)
    return digest.hexdigest() if world.is_main else None


def environment(world: Dist) -> dict[str, str]:
    """What beside config, weights and trajectories decides the bits of a step."""
    device = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    return {
        "the version of torch": str(torch.__version__),
        "the version of transformers": transformers.__version__,
        "the device": device,
        "the number of ranks": str(world.world_size),
        "the number of threads per rank": str(num_threads(os.environ)),
    }
