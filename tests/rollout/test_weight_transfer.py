import hashlib
import multiprocessing
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minirl.rollout.weight_buffer import ALIGNMENT, WeightBuffer, aligned
from minirl.rollout.weight_transfer import MinirlInitInfo, MinirlTransfer, MinirlUpdateInfo

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def make_bucket(seed: int) -> list[tuple[str, Tensor]]:
    """Tensors of every dtype, of sizes that do not fit together, one of them not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (torch.randn(3 + i, 5, generator=generator) * 50).to(dtype)
        for i, dtype in enumerate(DTYPES)
    ]
    tensors += [torch.randn(7, 4, generator=generator).T, torch.tensor(float(seed))]
    return [(f"layer.{i}.weight", tensor) for i, tensor in enumerate(tensors)]


def num_bytes(bucket: list[tuple[str, Tensor]]) -> int:
    return sum(aligned(tensor.numel() * tensor.element_size()) for _, tensor in bucket)


def digest(tensor: Tensor) -> str:
    """Of type, shape and every bit."""
    bits = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + bits).hexdigest()


class Model(nn.Module):
    """Takes weights as vLLM's models do; keeps nothing but what it saw."""

    def load_weights(self, weights: Any) -> None:
        self.seen = {name: digest(tensor) for name, tensor in weights}


def worker(init_info: dict[str, Any], pipe: Connection) -> None:
    """A worker of the engine, in its own process: maps the buffer, then loads what it is told."""
    transfer = object.__new__(MinirlTransfer)  # vLLM makes it with its own configuration
    transfer.model = Model()
    transfer.init_transfer_engine(MinirlInitInfo(**init_info))
    pipe.send("ready")
    while (update_info := pipe.recv()) is not None:
        transfer.receive_weights(MinirlUpdateInfo(**update_info))
        pipe.send(transfer.model.seen)
    transfer.shutdown()


def test_another_process_reads_what_was_written_bit_for_bit() -> None:
    buckets = [make_bucket(seed) for seed in range(3)]
    buffer = WeightBuffer(num_bytes(buckets[0]), CPU)
    ours, theirs = multiprocessing.Pipe()
    info = {"num_bytes": buffer.num_bytes, "path": buffer.path}
    process = multiprocessing.get_context("fork").Process(target=worker, args=(info, theirs))
    process.start()
    assert ours.recv() == "ready"  # mapped once, before anything is written
    for bucket in buckets:
        ours.send(buffer.write(bucket))
        assert ours.recv() == {name: digest(tensor) for name, tensor in bucket}
    assert mapped_names() == []  # the memory has no name at all
    ours.send(None)
    process.join(120)
    assert process.exitcode == 0
    buffer.close()


def mapped_names() -> list[str]:
    """Shared memory of this process that has a name, which could stay when it is killed."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = [line.rpartition("/dev/shm/")[2] for line in maps if "/dev/shm/" in line]
    return [name for name in found if not name.startswith("sem.") and "(deleted)" not in name]


def test_every_tensor_starts_at_a_multiple_of_the_alignment() -> None:
    bucket = make_bucket(0)
    buffer = WeightBuffer(num_bytes(bucket), CPU)
    info = buffer.write(bucket)
    assert all(offset % ALIGNMENT == 0 for offset in info["offsets"])
    assert info["names"] == [name for name, _ in bucket]
    assert info["dtypes"][:2] == ["float32", "bfloat16"]
    assert info["shapes"] == [list(tensor.shape) for _, tensor in bucket]
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in bucket]
    ends = [offset + size for offset, size in zip(info["offsets"], sizes, strict=True)]
    starts = [*info["offsets"][1:], buffer.num_bytes]
    assert all(0 <= start - end < ALIGNMENT for start, end in zip(starts, ends, strict=True))
    assert all(ALIGNMENT % dtype.itemsize == 0 for dtype in DTYPES)
    buffer.close()


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_aligned(size: int, expected: int) -> None:
    assert aligned(size) == expected


def test_a_bucket_that_does_not_fit_is_an_error() -> None:
    buffer = WeightBuffer(aligned(40), CPU)
    with pytest.raises(RuntimeError):
        buffer.write([("weight", torch.ones(17))])  # 68 bytes
    buffer.write([("weight", torch.ones(16))])
    buffer.close()


def test_closing_gives_descriptor_and_memory_back() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    path = None
    for _ in range(min(limit, 100)):
        buffer = WeightBuffer(1 << 20, CPU)
        path = buffer.path
        assert path is not None and os.path.exists(path)
        buffer.close()
    assert path is not None and not os.path.exists(path)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_the_buffer_is_in_no_segment_that_a_child_cannot_map(monkeypatch: Any) -> None:
    settings = "max_split_size_mb:64,expandable_segments:True"
    given: list[str] = []
    empty = torch.empty

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        given.append("the buffer")
        return empty(*args, **kwargs)

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(torch, "empty", recording)
    WeightBuffer(64, torch.device("meta"))
    assert given == ["expandable_segments:False", "the buffer", settings]
