import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager
from trainer_helpers import alone, make_batch, make_config, save, save_model

from minirl.config import ConfigError, OptimConfig
from minirl.trainer import checkpoint
from minirl.trainer.checkpoint import CheckpointError, Checkpoints
from minirl.trainer.checkpoint_folder import check_checkpoints, set_aside
from minirl.trainer.policy import PolicyTrainer, trained_parts


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
    save(trainer, tmp_path, 1, {"data": {"epoch": 0, "row": 4}})
    drawn = random.random(), torch.rand(3), np.random.rand()
    metrics = step(trainer, 2)

    resumed = PolicyTrainer(config, world)
    extra = resumed.load(checkpoint.latest(tmp_path))
    assert extra == {"step": 1, "data": {"epoch": 0, "row": 4}}
    assert random.random() == drawn[0] and torch.equal(torch.rand(3), drawn[1])
    assert np.random.rand() == drawn[2]
    assert step(resumed, 2) == metrics
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))


def test_a_checkpoint_before_the_first_update_changes_nothing(config, world, tmp_path):
    """As of a policy while trainer.critic_warmup lasts."""
    plain, saved, resumed = (PolicyTrainer(config, world) for _ in range(3))
    save(saved, tmp_path, 1, {})
    resumed.load(checkpoint.latest(tmp_path))
    for trainer in (plain, saved, resumed):
        for seed in (1, 2):
            step(trainer, seed)
    for trainer in (saved, resumed):
        assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))


def test_to_be_evaluated_a_policy_needs_no_moments(config, world, tmp_path):
    trainer, other = (PolicyTrainer(config, world) for _ in range(2))
    assert other.load_latest(tmp_path) is None
    step(trainer, 1)
    save(trainer, tmp_path / "checkpoints", 1, {"data": {"row": 4}})
    assert other.load_latest(tmp_path) == {"step": 1, "data": {"row": 4}}
    assert all(map(torch.equal, other.model.parameters(), trainer.model.parameters()))
    assert not other.optimizer.state


def test_a_resumed_run_has_the_optimizer_settings_of_its_config(config, world, folder, tmp_path):
    trainer = PolicyTrainer(config, world)
    step(trainer, 1)
    save(trainer, tmp_path, 1, {})
    changed = OptimConfig(lr=1e-3, weight_decay=0.5, betas=(0.8, 0.95), eps=1e-6)
    resumed = PolicyTrainer(make_config(folder, optim=changed), world)
    resumed.load(checkpoint.latest(tmp_path))
    groups = resumed.optimizer.param_groups
    assert [(g["weight_decay"], g["betas"], g["eps"]) for g in groups] == [
        (0.5, (0.8, 0.95), 1e-6),
        (0.0, (0.8, 0.95), 1e-6),
    ]
    assert resumed.optimizer.state.values()
    assert all(state["step"] == 2 for state in resumed.optimizer.state.values())


def test_only_complete_checkpoints_count_and_old_ones_go(config, world, tmp_path):
    trainer = PolicyTrainer(config, world)
    assert checkpoint.latest(tmp_path) is None
    for number in (2, 9, 10):
        save(trainer, tmp_path, number, {}, max_to_keep=2)
    (tmp_path / "step_000099").mkdir()
    (tmp_path / ".step_000098.partial").mkdir()
    assert [path.name for _, path in checkpoint.complete(tmp_path)] == [
        "step_000009",
        "step_000010",
    ]
    assert checkpoint.latest(tmp_path).name == "step_000010"
    save(trainer, tmp_path, 10, {"again": True}, max_to_keep=2)
    assert trainer.load(checkpoint.latest(tmp_path)) == {"step": 10, "again": True}
    assert not list(tmp_path.glob(".step_*"))


@pytest.fixture
def writes(monkeypatch):
    """While it is not set, nothing is written."""
    real, may_write = dcp.save, threading.Event()

    def save_later(*args, **kwargs):
        assert may_write.wait(180)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", save_later)
    yield may_write
    may_write.set()


def test_the_training_goes_on_while_a_checkpoint_is_written(config, world, tmp_path, writes):
    trainer = PolicyTrainer(config, world)
    step(trainer, 1)
    expected = [p.detach().clone() for p in trainer.model.parameters()]
    checkpoints, extra = Checkpoints(tmp_path, world), {"data": {"row": 4}}
    checkpoints.save(1, trained_parts(trainer, None), extra)
    extra["data"]["row"] = 8
    step(trainer, 2)
    assert not any(map(torch.equal, trainer.model.parameters(), expected))
    assert checkpoint.latest(tmp_path) is None and checkpoints.poll() == 0
    second = threading.Thread(target=checkpoints.save, args=(2, trained_parts(trainer, None), {}))
    second.start()  # which waits for the first
    assert [path.name for path in tmp_path.iterdir()] == [".step_000001.partial"]
    writes.set()
    second.join()
    checkpoints.wait()
    assert checkpoints.poll() > 0 and checkpoints.poll() == 0
    assert [number for number, _ in checkpoint.complete(tmp_path)] == [1, 2]
    resumed = PolicyTrainer(config, world)
    assert resumed.load(tmp_path / "step_000001") == {"step": 1, "data": {"row": 4}}
    assert resumed.num_steps == 1
    assert all(map(torch.equal, resumed.model.parameters(), expected))
    resumed.load(tmp_path / "step_000002")
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))


def test_it_saves_again_where_torch_closes_its_stager(config, world, tmp_path, monkeypatch):
    """As torch 2.11 does, with which vLLM 0.25 comes."""
    stage = DefaultStager.stage

    def stage_and_close(stager, *args, **kwargs):
        staged = stage(stager, *args, **kwargs)
        stager.close()
        return staged

    monkeypatch.setattr(DefaultStager, "stage", stage_and_close)
    checkpoints, parts = (
        Checkpoints(tmp_path, world),
        trained_parts(PolicyTrainer(config, world), None),
    )
    for number in (1, 2):
        checkpoints.save(number, parts, {})
    checkpoints.wait()
    assert [number for number, _ in checkpoint.complete(tmp_path)] == [1, 2]


def test_a_run_that_ends_early_gives_a_write_a_moment(config, world, tmp_path, writes):
    checkpoints = Checkpoints(tmp_path, world)
    checkpoints.save(1, trained_parts(PolicyTrainer(config, world), None), {})
    checkpoints.close(0.01)
    assert checkpoint.latest(tmp_path) is None
    writes.set()
    checkpoints.close(180)
    assert checkpoint.latest(tmp_path)


def test_what_a_killed_run_left_is_removed_or_put_back(world, tmp_path):
    for name in (".step_000098.partial", ".step_000002.deleted", "step_000005", "other"):
        (tmp_path / name).mkdir()
    for name in (".step_000005.replaced", ".step_000007.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").touch()
    Checkpoints(tmp_path, world)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other",
        "step_000005",
        "step_000007",
    ]
    assert checkpoint.latest(tmp_path).name == "step_000007"


@contextmanager
def full_disk():
    """No file of this process can grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_the_last_checkpoint(config, world, tmp_path):
    trainer = PolicyTrainer(config, world)
    checkpoints = Checkpoints(tmp_path, world, max_to_keep=1)
    checkpoints.save(1, trained_parts(trainer, None), {})
    checkpoints.wait()
    with full_disk():
        checkpoints.save(2, trained_parts(trainer, None), {})
        with pytest.raises(CheckpointError) as failed:
            checkpoints.wait()
    with pytest.raises(CheckpointError):
        checkpoints.poll()  # the run must not miss it
    place = rf"{tmp_path}/\.step_000002\.partial: the checkpoint could not be written: "
    assert re.match(place + r"rank 0: .*; make room there", str(failed.value))
    assert f"(the last one is {tmp_path}/step_000001)" in str(failed.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert trainer.load(tmp_path / "step_000001") == {"step": 1}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit in a shard": ("state/__0_0.distcp", flip, "is damaged: its checksum"),
    "a cut shard": ("state/__0_0.distcp", lambda p: os.truncate(p, 999), "is damaged"),
    "a shard that is gone": ("state/__0_0.distcp", Path.unlink, "is missing"),
    "a flipped bit in the index": ("state/.metadata", flip, "is damaged: its checksum"),
    "a flipped bit in the random states": ("rng_0.json", flip, "is damaged: its checksum"),
    "a flipped bit in what the run adds": ("meta.json", flip, "is damaged: its checksum"),
    "no checksums": ("SHA256SUMS", Path.unlink, "is missing"),
    "an empty list of checksums": ("SHA256SUMS", lambda p: os.truncate(p, 0), "is damaged"),
}


@pytest.fixture(scope="module")
def trainer(config, world):
    return PolicyTrainer(config, world)


@pytest.fixture(scope="module")
def three(trainer, tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3, of which 2 is damaged."""
    directory = tmp_path_factory.mktemp("three")
    for number in (1, 2, 3):
        save(trainer, directory, number, {})
    flip(directory / "step_000002" / "meta.json")
    return directory


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_with_the_checkpoint_that_is_whole(trainer, three, tmp_path, name):
    directory = shutil.copytree(three, tmp_path / "checkpoints")
    file, damage, words = DAMAGES[name]
    place = directory / "step_000003" / file
    damage(place)
    remedy = (
        f"{directory}/step_000001 is whole: rename or remove {directory}/step_000003 to go on "
        "from it, or trainer.resume_mode=disable starts anew"
    )
    with pytest.raises(ConfigError) as told:
        trainer.load(checkpoint.latest(directory))
    assert f"the checkpoint cannot be used: {place} {words}" in str(told.value)
    assert str(told.value).endswith(remedy)


def test_a_cut_file_and_a_folder_without_rights_are_told_before_anything_starts(
    config, three, tmp_path
):
    def config_at(run_dir, **settings):
        settings |= {"default_local_dir": str(run_dir.parent), "experiment_name": run_dir.name}
        return replace(config, trainer=replace(config.trainer, **settings))

    run_dir = tmp_path / "run"
    shutil.copytree(three, run_dir / "checkpoints")
    check_checkpoints(config_at(run_dir, save_freq=1))
    shard = run_dir / "checkpoints" / "step_000003" / "state" / "__0_0.distcp"
    os.truncate(shard, 999)
    with pytest.raises(ConfigError, match=rf"{shard} has 999 bytes instead of \d+; .* is whole"):
        check_checkpoints(config_at(run_dir))
    check_checkpoints(config_at(run_dir, resume_mode="disable"))
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard} is missing; "):
        check_checkpoints(config_at(run_dir))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with somebody_without_rights():
        for settings in ({"save_freq": 1}, {}):
            with pytest.raises(ConfigError, match=r"Permission denied.*; give this user the right"):
                check_checkpoints(config_at(closed / "run" if settings else run_dir, **settings))


@contextmanager
def somebody_without_rights():
    """Root may read and write everything."""
    os.seteuid(65534 if os.geteuid() == 0 else os.geteuid())
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def test_checkpoints_of_an_earlier_run_are_set_aside(three, tmp_path):
    directory = tmp_path / "checkpoints"
    assert set_aside(directory) is None
    for number in (1, 2):
        shutil.copytree(three, directory)
        assert set_aside(directory) == tmp_path / f"checkpoints.{number}"
    assert not directory.exists()


def test_a_checkpoint_of_another_model_is_refused(config, world, tmp_path, tmp_path_factory):
    path = save(PolicyTrainer(config, world), tmp_path, 1, {})
    tied = make_config(save_model(tmp_path_factory.mktemp("tied"), "qwen3_tied"))
    with pytest.raises(ConfigError, match=r"another model: lm_head\.weight .* not there in model"):
        PolicyTrainer(tied, world).load(path)


def test_a_kill_while_saving_leaves_the_last_checkpoint(config, world, folder, tmp_path):
    """A process saves without pause until it is killed; what is complete can be loaded."""
    here = Path(__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(here)!r}); from pathlib import Path;"
        "from trainer_helpers import *; from minirl.trainer.policy import *;"
        "from minirl.trainer.checkpoint import Checkpoints;"
        f"config = make_config(Path({str(folder)!r}))\n"
        "with alone(config) as world:\n"
        "    trainer = PolicyTrainer(config, world)\n"
        f"    checkpoints = Checkpoints(Path({str(tmp_path)!r}), world, max_to_keep=2)\n"
        "    for step in range(10**6):\n"
        "        checkpoints.save(step, trained_parts(trainer, None), {})\n"
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
