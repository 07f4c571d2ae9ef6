"""The receiving end of a weight sync, inside SGLang's schedulers, which import this module by name.

As with vLLM, the trainer writes a bucket of full tensors into a WeightBuffer that every scheduler
has mapped by CUDA IPC. SGLang carries only the description of the bucket: as a tensor of bytes,
since named tensors are what it hands to a custom weight loader.
"""

import pickle
from typing import Any

import msgspec
import torch
from torch import Tensor

from minirl.rollout.weight_buffer import open_cuda, view_tensors

LOADER = f"{__name__}.load_bucket"
"""For SGLang's `custom_weight_loader` and `load_format`."""

_BUFFERS: dict[bytes, Tensor] = {}
"""Of this process: the trainer's buffer, by its IPC handle."""


def payloads(init_info: dict[str, Any], update_info: dict[str, Any]) -> list[bytes]:
    """What each scheduler of an engine is sent for a bucket, by tensor-parallel rank.

    `init_info` is that of AsyncServerBase.init_weight_transfer, with one IPC handle per scheduler;
    `update_info` is WeightBuffer.write's. Plain pickles, which SGLang's restricted unpickler takes:
    its own serializer would put the bytes into shared memory.
    """
    common = {**update_info, "num_bytes": init_info["num_bytes"]}
    contents = [_to_tensor({**common, "handle": handle}) for handle in init_info["ipc_handles"]]
    return [pickle.dumps([("minirl", content)]) for content in contents]


def load_bucket(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load what the buffer holds; SGLang calls it in every scheduler with its payload."""
    [(_, content)] = named_tensors
    info = msgspec.msgpack.decode(content.cpu().numpy().tobytes())
    model.load_weights(view_tensors(_buffer(info), info))
    torch.cuda.synchronize()  # the trainer overwrites the buffer next


def _to_tensor(info: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(info)), dtype=torch.uint8)


def _buffer(info: dict[str, Any]) -> Tensor:
    """Mapped at the first bucket."""
    key = msgspec.msgpack.encode(info["handle"])
    if key not in _BUFFERS:
        device = torch.device("cuda", torch.cuda.current_device())
        _BUFFERS[key] = open_cuda(info["handle"], info["num_bytes"], device)
    return _BUFFERS[key]
