"""An adapter trains, the weights below it do not, and everybody gets the merged weights."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from trainer_helpers import alone, make_batch, make_config, save, save_model

from minirl.config import Config, ConfigError, ModelConfig, OptimConfig, RefConfig
from minirl.trainer import lora, policy
from minirl.trainer.fsdp import check_lora, read_weights, shard
from minirl.trainer.lora import has_adapter
from minirl.trainer.model import LanguageModel
from minirl.trainer.policy import AdapterlessPolicy, PolicyTrainer, ReferencePolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3_tied")


@pytest.fixture(scope="module")
def world(folder):
    with alone(make_config(folder)) as world:
        yield world


def lora_config(folder, **model) -> Config:
    config = make_config(folder, optim=OptimConfig(lr=1e-2))
    settings = ModelConfig(path=str(folder), lora_rank=4, lora_alpha=8, **model)
    return replace(config, model=settings, ref=RefConfig())


def trained(config, world):
    trainer = PolicyTrainer(config, world)
    batch = make_batch()
    batch.old_logprobs = trainer.compute_logprobs(batch)
    trainer.update(batch)
    return trainer, batch


def test_only_the_adapter_learns(folder, world):
    trainer = PolicyTrainer(lora_config(folder), world)
    batch = make_batch()
    batch.old_logprobs = trainer.compute_logprobs(batch)
    plain = PolicyTrainer(make_config(folder), world)
    assert torch.equal(batch.old_logprobs, plain.compute_logprobs(batch)), "B is 0 at the start"
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            {n for n, p in trainer.model.named_parameters() if p.grad is not None}
        )
    )
    trainer.update(batch)
    adapter = {name for name in before if ".lora_" in name}
    assert seen == [adapter, adapter] and len(adapter) == 2 * 2 * 7
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == adapter
    states = trainer.optimizer.state
    assert len(states) == len(adapter)
    assert (trainer.compute_logprobs(batch) - batch.old_logprobs).abs().max() > 1e-3


def test_merged_weights_compute_the_same(folder, world):
    config = lora_config(folder, lora_target_modules=["q_proj", "down_proj"])
    trainer, batch = trained(config, world)
    plain = read_weights(str(folder), config.model)
    sent = [pair for bucket in trainer.weights for pair in bucket]
    assert [name for name, _ in sent] == [name for name, _ in plain.named_parameters()]
    changed = set()
    for name, tensor in sent:
        if not torch.equal(plain.get_parameter(name), tensor):
            changed.add(name.rpartition(".weight")[0].rpartition(".")[2])
        plain.get_parameter(name).data.copy_(tensor)
    assert changed == {"q_proj", "down_proj"}
    merged = LanguageModel(config, world, plain)
    expected = trainer.compute_logprobs(batch)
    torch.testing.assert_close(merged.compute_logprobs(batch), expected, atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_policy_without_its_adapter(folder, world):
    config = lora_config(folder)
    trainer, batch = trained(config, world)
    reference = policy.make_reference(config, world, trainer)
    assert isinstance(reference, AdapterlessPolicy)
    assert torch.equal(reference.compute_logprobs(batch), batch.old_logprobs)
    now = trainer.compute_logprobs(batch)
    assert (now - batch.old_logprobs).abs().max() > 1e-3, "the adapter is on again"
    trainer.update(batch)
    assert not torch.equal(trainer.compute_logprobs(batch), now), "and trains"
    other = replace(config, ref=RefConfig(path=str(folder)))
    assert isinstance(policy.make_reference(other, world, trainer), ReferencePolicy)


def test_the_adapter_trains_in_float32_where_the_reference_computes_first(folder, world):
    config = lora_config(folder)
    model = read_weights(str(folder), config.model, dtype=torch.bfloat16)
    model.set_attn_implementation("eager")
    lora.add_adapter(model, config.model, seed=0)
    shard(model, world, torch.bfloat16)
    tokens = torch.tensor([[5, 6, 7]])
    with lora.adapter_disabled(model), torch.no_grad():
        model(tokens)
    model(tokens).logits.square().sum().backward()
    dtypes = {n: p.grad.dtype for n, p in model.named_parameters() if p.grad is not None}
    assert all(".lora_" in name for name in dtypes)
    assert set(dtypes.values()) == {torch.float32}


def test_a_checkpoint_has_the_adapter_alone(folder, world, tmp_path):
    config = lora_config(folder)
    trainer, batch = trained(config, world)
    path = save(trainer, tmp_path, 1, {})
    names = FileSystemReader(path / "state").read_metadata().state_dict_metadata
    assert any(".lora_" in name for name in names)
    assert not any("base_layer" in name or "embed_tokens" in name for name in names)
    again = PolicyTrainer(config, world)
    again.load(path)
    assert torch.equal(again.compute_logprobs(batch), trainer.compute_logprobs(batch))
    for one in (trainer, again):
        one.update(batch)
    assert all(map(torch.equal, trainer.model.parameters(), again.model.parameters()))
    with pytest.raises(ConfigError, match="the checkpoint of another model"):
        PolicyTrainer(make_config(folder), world).load(path)
    scaled = replace(config, model=replace(config.model, lora_alpha=16))
    with pytest.raises(ConfigError, match=r"count 2\.0 times .* now count 4\.0 times"):
        PolicyTrainer(scaled, world).load(path)


def test_gradient_checkpointing_changes_nothing(folder, world):
    plain, _ = trained(lora_config(folder), world)
    less, _ = trained(lora_config(folder, enable_gradient_checkpointing=True), world)
    for a, b in zip(plain.model.parameters(), less.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], "q_prj"),
        (["lm_head"], r"names lm_head \(Linear\); name linear modules of the decoder"),
        (["embed_tokens"], r"names model\.embed_tokens \(Embedding\)"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_before_weights_are_read(folder, targets, message):
    config = lora_config(folder, lora_target_modules=targets)
    with pytest.raises(ConfigError, match=rf"^model\.lora_target_modules: .*{message}"):
        policy.check_config(config)
    check_lora(lora_config(folder).model)


def test_without_the_library_it_is_refused(folder, monkeypatch):
    monkeypatch.setattr("minirl.trainer.lora.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora_rank: peft is not installed.*minirl\[lora\]"):
        check_lora(lora_config(folder).model)
    check_lora(make_config(folder).model)


def test_the_critic_has_no_adapter(folder, world):
    assert not has_adapter(PolicyTrainer(make_config(folder), world).model)
    with pytest.raises(ConfigError, match=r"model\.lora_rank: got -1"):
        ModelConfig(lora_rank=-1)
