"""Models of published shapes; weights are random, since speed does not depend on them."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

QWEN3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "debug": {
        "vocab_size": 640,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "medium": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 5,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def random_model(name: str, device: str, dtype: torch.dtype) -> Path:
    """A folder with random weights at the shape `name`; made once."""
    return write_random(Path("build") / f"random_{name}", SHAPES[name], dtype, device)


def write_random(
    folder: Path, shape: dict[str, Any], dtype: torch.dtype, device: str, sharpness: float = 1.0
) -> Path:
    """The same for any shape; `sharpness` is a factor on all logits."""
    if not folder.exists():
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
        torch.nn.init.constant_(model.model.norm.weight, sharpness)
        partial = folder.with_name(f"{folder.name}.partial")
        model.to(dtype).save_pretrained(partial)
        partial.rename(folder)
    return folder
