from dataclasses import replace

import pytest
import torch
from trainer_helpers import alone, make_batch, make_config, save, save_model

from minirl.config import ConfigError, CriticConfig, OptimConfig
from minirl.trainer import checkpoint
from minirl.trainer.critic import CriticTrainer
from minirl.trainer.policy import PolicyTrainer


@pytest.fixture(scope="module", params=["qwen3", "qwen3_tied"])
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"))
    with alone(make_config(folder)) as world:
        yield world


def with_critic(folder, **critic):
    config = make_config(folder)
    optim = OptimConfig(lr=1e-2)
    return replace(config, critic=CriticConfig(**({"optim": optim} | critic)))


def trained(folder, world, steps=1, **critic):
    """A critic after some updates, and a batch with its values and the returns to learn."""
    trainer = CriticTrainer(with_critic(folder, **critic), world)
    batch = make_batch()
    batch.returns = torch.where(batch.sequence_ids % 2 == 0, 0.8, -0.2) * batch.response_mask
    metrics = {}
    for _ in range(steps):
        batch.values = trainer.compute_values(batch)
        metrics = trainer.update(batch)
    return trainer, batch, metrics


def test_the_value_of_a_token_is_read_one_position_before(folder, world):
    trainer, batch, _ = trained(folder, world)
    values = trainer.compute_values(batch)
    trainer.model.set_attn_implementation("eager")
    expected = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        with torch.no_grad():
            out = trainer.model(tokens[None]).logits[0, :, 0]
        expected += [torch.zeros(1), out[:-1]]
    expected = torch.cat(expected) * batch.response_mask
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)


def test_it_begins_at_zero_and_learns_the_returns(folder, world):
    trainer, batch, first = trained(folder, world, cliprange_value=None)
    assert not batch.values.any()
    assert set(first) == {f"critic/{name}" for name in (
        "vf_loss", "vf_clipfrac", "vpred_mean", "num_updates", "num_skipped_updates", "grad_norm",
        "lr",
    )}  # fmt: skip
    for _ in range(30):
        batch.values = trainer.compute_values(batch)
        last = trainer.update(batch)
    assert last["critic/vf_loss"] < 0.1 * first["critic/vf_loss"]


def test_the_range_clips(folder, world):
    """Values that move further than the range from those of the step's start stop there."""
    _, _, tight = trained(folder, world, cliprange_value=1e-4, ppo_epochs=3)
    _, _, free = trained(folder, world, cliprange_value=None, ppo_epochs=3)
    assert tight["critic/vf_clipfrac"] > 0.1 and free["critic/vf_clipfrac"] == 0


def test_gradient_does_not_depend_on_the_cut(folder, world):
    weights = [
        list(trained(folder, world, max_tokens_per_micro_batch=limit)[0].model.parameters())
        for limit in (1, 10_000)
    ]
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_own_settings_and_the_actors(folder, world):
    trainer, _, metrics = trained(folder, world, ppo_epochs=3, ppo_mini_batch_size=1)
    assert metrics["critic/num_updates"] == 3 * 4 and trainer.max_tokens == 64
    assert trained(folder, world)[2]["critic/num_updates"] == 2  # as the actor: 4 prompts by 2


def test_policy_and_critic_come_back_from_one_checkpoint(folder, world, tmp_path):
    trainer, batch, _ = trained(folder, world)
    policy = PolicyTrainer(trainer.config, world)
    path = save(policy, tmp_path, 1, {}, critic=trainer)
    metrics = trainer.update(batch)
    again = CriticTrainer(trainer.config, world)
    assert policy.load(path, again) == {"step": 1}
    assert again.num_steps == 1 and again.update(batch) == metrics
    assert all(map(torch.equal, again.model.parameters(), trainer.model.parameters()))
    assert PolicyTrainer(trainer.config, world).load(path) == {"step": 1}  # evaluation needs no V


def test_a_checkpoint_without_a_critic_is_refused(folder, world, tmp_path):
    policy = PolicyTrainer(make_config(folder), world)
    save(policy, tmp_path, 1, {})
    critic = CriticTrainer(with_critic(folder), world)
    with pytest.raises(ConfigError, match=r"the checkpoint of a run without critic; remove it"):
        policy.load(checkpoint.latest(tmp_path), critic)


def test_a_critic_that_is_no_model_is_refused(folder, world):
    with pytest.raises(ConfigError, match=r"^critic\.path: got '/nowhere'"):
        CriticTrainer(with_critic(folder, path="/nowhere"), world)
