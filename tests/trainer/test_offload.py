"""What leaves the device between computations comes back as it was."""

from dataclasses import replace

import pytest
import torch
from trainer_helpers import alone, make_batch, make_config, save, save_model

from minirl.config import OptimConfig, RefConfig
from minirl.trainer.determinism import parameter_hash
from minirl.trainer.offload import Offload, host_memory, optimizer_state, weights
from minirl.trainer.policy import PolicyTrainer, ReferencePolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3_tied")


def held(tensors):
    """Bytes that tensors hold on their device."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors())


def work(trainer):
    """Two updates, and all that is computed between; what each held when it rested."""
    resting, results = [], []
    for seed in range(2):
        batch = make_batch(seed=seed)
        batch.old_logprobs = trainer.compute_logprobs(batch)
        trainer.update(batch)
        resting.append([held(weights(trainer.model)), held(optimizer_state(trainer.optimizer))])
        sent = {name: t.clone() for bucket in trainer.weights for name, t in bucket}
        results.append((batch.old_logprobs, sent, torch.tensor(trainer.score([5, 6, 7]))))
    return resting, results


def test_weights_that_were_hashed_go_away_all_the_same(folder):
    hashes = set()
    for offload in ("none", "all"):
        config = make_config(folder, offload=offload)
        with alone(config) as world:
            trainer = PolicyTrainer(config, world)
            hashes |= {parameter_hash([trainer], world) for _ in range(2)}
            assert (held(weights(trainer.model)) == 0) == (offload == "all")
    assert len(hashes) == 1


def test_updates_are_the_same_bit_by_bit(folder, tmp_path):
    found = {}
    for offload in ("none", "optimizer", "all"):
        config = make_config(folder, offload=offload, optim=OptimConfig(lr=1e-2))
        with alone(config) as world:
            trainer = PolicyTrainer(config, world)
            resting, results = work(trainer)
            path = save(trainer, tmp_path / offload, 1, {})
            again = PolicyTrainer(config, world)
            again.load(path)
            batch = make_batch(seed=2)
            batch.old_logprobs = batch.rollout_logprobs
            metrics = [one.update(batch) for one in (trainer, again)]
            assert metrics[0] == metrics[1]
            with trainer.on_device(optimizer=True):
                full = held(weights(trainer.model)), held(optimizer_state(trainer.optimizer))
                states = [t.clone() for t in optimizer_state(trainer.optimizer)()]
            results.append((metrics[0], [p.clone() for p in states]))
        assert full[0] > 0 and full[1] > 0
        expected = {
            "none": [full[0], full[1]],
            "optimizer": [full[0], 0],
            "all": [0, 0],
        }[offload]
        assert resting == [expected, expected]
        found[offload] = results
    for offload in ("optimizer", "all"):
        for mine, plain in zip(found[offload], found["none"], strict=True):
            torch.testing.assert_close(mine, plain, atol=0, rtol=0)


def test_host_memory_has_the_size_of_what_rests_there(monkeypatch):
    pinned = {}
    monkeypatch.setattr("minirl.trainer.offload.pin_memory", pinned.__setitem__)
    monkeypatch.setattr("minirl.trainer.offload.unpin_memory", pinned.pop)
    memory = host_memory(3 * 2**20, pinned=True)
    assert pinned == {memory.data_ptr(): memory.untyped_storage().nbytes()}
    assert pinned[memory.data_ptr()] == 3 * 2**20
    del memory
    assert pinned == {}
    linear = torch.nn.Linear(3, 5)
    away = Offload(weights(linear))
    assert len(away._host) == (3 * 5 + 5) * 4
    place = away._host.data_ptr()
    with away.here():
        assert held(weights(linear)) == len(away._host)
    assert away._host.data_ptr() == place, "the same every time"


def test_the_reference_rests_too(folder):
    config = replace(make_config(folder, offload="all"), ref=RefConfig())
    with alone(config) as world:
        reference = ReferencePolicy(config, world)
        assert held(weights(reference.model)) == 0
        with reference.on_device(), reference.on_device():
            assert held(weights(reference.model)) > 0
        assert held(weights(reference.model)) == 0
        batch = make_batch()
        plain = ReferencePolicy(replace(make_config(folder), ref=RefConfig()), world)
        assert torch.equal(reference.compute_logprobs(batch), plain.compute_logprobs(batch))
