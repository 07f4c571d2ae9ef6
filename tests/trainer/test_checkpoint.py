import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_helpers import alone, make_batch, make_config, save_model

from minirl.config import ConfigError, OptimConfig
from minirl.trainer import checkpoint
from minirl.trainer.policy import PolicyTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(folder):
    return make_config(folder, optim=OptimConfig(lr=1e-3, lr_warmup_steps=5))


@pytest.fixture(scope="module")
def world(config):
    with alone(config) as world:
        yield world


def step(trainer, seed):
    batch = make_batch(seed=seed)
    batch.old_logprobs = trainer.compute_logprobs(batch)
    return trainer.update(batch)


def test_resumed_run_goes_on_bit_by_bit(config, world, tmp_path):
    trainer = PolicyTrainer(config, world)
    step(trainer, 1)
    trainer.save(tmp_path, 1, {"data": {"epoch": 0, "row": 4}})
    drawn = random.random(), torch.rand(3)
    metrics = step(trainer, 2)

    resumed = PolicyTrainer(config, world)
    extra = resumed.load(checkpoint.latest(tmp_path))
    assert extra == {"step": 1, "data": {"epoch": 0, "row": 4}}
    assert random.random() == drawn[0] and torch.equal(torch.rand(3), drawn[1])
    assert step(resumed, 2) == metrics
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))


def test_only_complete_checkpoints_count_and_old_ones_go(config, world, tmp_path):
    trainer = PolicyTrainer(config, world)
    assert checkpoint.latest(tmp_path) is None
    for number in (2, 9, 10):
        trainer.save(tmp_path, number, {}, max_to_keep=2)
    (tmp_path / "step_000099").mkdir()
    (tmp_path / ".step_000098.partial").mkdir()
    assert [path.name for _, path in checkpoint.complete(tmp_path)] == [
        "step_000009",
        "step_000010",
    ]
    assert checkpoint.latest(tmp_path).name == "step_000010"
    trainer.save(tmp_path, 10, {"again": True}, max_to_keep=2)
    assert trainer.load(checkpoint.latest(tmp_path)) == {"step": 10, "again": True}
    assert not list(tmp_path.glob(".step_*"))


def test_a_checkpoint_of_another_model_is_refused(config, world, tmp_path, tmp_path_factory):
    path = PolicyTrainer(config, world).save(tmp_path, 1, {})
    tied = make_config(save_model(tmp_path_factory.mktemp("tied"), "qwen3_tied"))
    with pytest.raises(ConfigError, match=r"another model: lm_head\.weight .* not there in model"):
        PolicyTrainer(tied, world).load(path)


def test_a_kill_while_saving_leaves_the_last_checkpoint(config, world, folder, tmp_path):
    """A process saves without pause until it is killed; what is complete can be loaded."""
    here = Path(__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(here)!r}); from pathlib import Path;"
        "from trainer_helpers import *; from minirl.trainer.policy import PolicyTrainer;"
        f"config = make_config(Path({str(folder)!r}))\n"
        "with alone(config) as world:\n"
        "    trainer = PolicyTrainer(config, world)\n"
        "    for step in range(10**6):\n"
        f"        trainer.save(Path({str(tmp_path)!r}), step, {{}}, max_to_keep=2)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."})
    while len(checkpoint.complete(tmp_path)) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    trainer = PolicyTrainer(config, world)
    found = checkpoint.complete(tmp_path)
    assert found
    for number, path in found:
        assert trainer.load(path) == {"step": number}
