"""A tiny model folder, batches, and worlds of ranks for the tests of the gradient side."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from minirl.config import ActorConfig, Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from minirl.distributed import Dist, distributed
from minirl.trainer import packing
from minirl.trainer.checkpoint import Checkpoints
from minirl.trainer.critic import CriticTrainer
from minirl.trainer.policy import PolicyTrainer, trained_parts
from minirl.types import MicroBatch, TokenOutput, Trajectory

VOCAB_SIZE = 101  # odd, so that two ranks get parts of unequal size

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
}


def save_model(folder: Path, name: str = "qwen3") -> Path:
    """Write a random model of about 20k parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # sharper than HF's start: log-probs that differ
    model.save_pretrained(folder)
    return folder


def save_reward_model(
    folder: Path, name: str = "qwen3", form: str = "sequence", **settings: Any
) -> Path:
    """Write a random classifier of sequences or tokens, with one label unless said otherwise."""
    torch.manual_seed(1)
    config = type(MODELS[name])(**MODELS[name].to_dict() | {"num_labels": 1} | settings)
    auto = (
        AutoModelForSequenceClassification
        if form == "sequence"
        else AutoModelForTokenClassification
    )
    model = auto.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def make_config(model: Path, **actor: Any) -> Config:
    """Mini-batches of two prompts, small micro-batches, CPU."""
    settings = {"ppo_mini_batch_size": 2, "max_tokens_per_micro_batch": 64} | actor
    return Config(
        data=DataConfig(train_batch_size=4, max_prompt_length=32),
        model=ModelConfig(path=str(model)),
        actor=ActorConfig(**settings),
        rollout=RolloutConfig(n=3, response_length=64, sync_check=None),
        trainer=TrainerConfig(device="cpu", collective_timeout_s=60),
    )


def make_batch(num_groups: int = 4, group_size: int = 3, seed: int = 0) -> MicroBatch:
    """Two-turn trajectories of random tokens and very different lengths, with advantages."""
    g = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(0, VOCAB_SIZE, (size,), generator=g).tolist()

    trajectories = []
    for _ in range(num_groups * group_size):
        t = Trajectory(prompt_ids=tokens(1, 12))
        for turn in range(2):
            if turn:
                t.append_observation(tokens(1, 5))
            ids = tokens(1, 14)
            t.append_sampled(
                TokenOutput(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop")
            )
        trajectories.append(t)
    rewards = [[0.0] * (len(t.response_ids) - 1) + [1.0] for t in trajectories]
    groups = [i // group_size for i in range(len(trajectories))]
    batch = packing.pack(trajectories, rewards, groups)
    batch.advantages = torch.randn(batch.num_tokens, generator=g) * batch.response_mask
    return batch


def save(
    policy: PolicyTrainer,
    directory: Path,
    step: int,
    extra: dict[str, Any],
    *,
    critic: CriticTrainer | None = None,
    max_to_keep: int | None = None,
) -> Path:
    """Write a checkpoint, and wait for it."""
    checkpoints = Checkpoints(directory, policy.world, max_to_keep=max_to_keep, background=False)
    return checkpoints.save(step, trained_parts(policy, critic), extra)


@contextmanager
def alone(config: Config) -> Iterator[Dist]:
    """A world of one in this process."""
    with distributed(config) as world:
        torch.set_num_threads(1)  # tests share the machine; threads that wait for each other crawl
        yield world


def spawn(
    test: Callable[[Dist, Config, Path], None],
    config: Config,
    folder: Path,
    *,
    num_ranks: int = 2,
) -> None:
    """Run `test(world, config, folder)` on gloo ranks; an exception on any of them fails. With the
    fixture `forkserver` they start quickly."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = (num_ranks, test, config, folder, port)
    mp.start_processes(_rank, arguments, nprocs=num_ranks, start_method="forkserver")


def _rank(
    rank: int,
    num_ranks: int,
    test: Callable[[Dist, Config, Path], None],
    config: Config,
    folder: Path,
    port: int,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with distributed(config) as world:
        torch.set_num_threads(1)
        test(world, config, folder)
