"""Where the random number generators of a process are."""

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, numpy, torch and, if it is one, the CUDA device; fits into JSON."""
    version, words, gauss = random.getstate()
    name, keys, *more = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *more],  # type: ignore[union-attr]  # legacy: an array
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
