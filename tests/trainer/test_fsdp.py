import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_helpers import MODELS, alone, make_batch, make_config, save_model

from minirl.config import ConfigError, ModelConfig
from minirl.trainer.buckets import WeightBuckets
from minirl.trainer.fsdp import check_model, check_model_folder, load_model, shard
from minirl.trainer.logprobs import token_logprobs, token_values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3_tied")


def test_a_folder_that_is_not_a_model_is_refused(folder, tmp_path):
    check_model_folder(str(folder))
    check_model_folder("Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"^ref\.path: got .*/missing', which is not a folder"):
        check_model_folder(str(tmp_path / "missing"), "ref.path")
    with pytest.raises(ConfigError, match=r"^model\.path: .* has no config\.json"):
        check_model_folder(str(tmp_path))
    MODELS["qwen3"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no weights .*save_pretrained"):
        check_model_folder(str(tmp_path))


def test_an_unreadable_config_is_refused(folder, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match=r"^model\.path: .* cannot be read: .*no_such_model"):
        check_model(ModelConfig(path=str(tmp_path)), 64)


def test_broken_weights_are_refused(folder, tmp_path):
    MODELS["qwen3"].save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    config = make_config(tmp_path)
    with alone(config) as world, pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path), config.model, world)


def test_a_weight_that_is_missing_is_not_drawn_at_random(folder, tmp_path):
    config = make_config(save_model(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with (
        alone(config) as world,
        pytest.raises(ConfigError, match=r"lacks 1 weights .* such as model\.norm\.weight"),
    ):
        load_model(str(tmp_path), config.model, world)


@pytest.mark.parametrize("head", ["vocabulary", "value"])
def test_nothing_is_told_of_views(folder, head):
    """FSDP warns of a module that returns one: of gradients that could be lost."""
    config = make_config(folder)
    compute = token_values if head == "value" else partial(token_logprobs, temperature=1.0)
    with alone(config) as world, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(load_model(str(folder), config.model, world, head=head), world, torch.float32)
        compute(model, make_batch())


def test_weights_of_a_world_of_one_come_in_the_engines_type(folder, caplog):
    config = make_config(folder)
    with alone(config) as world:
        model = load_model(str(folder), config.model, world)
    assert caplog.messages == [], "nothing is told of layers that were not sharded, or missing"
    named = dict(model.named_parameters())
    assert {p.dtype for p in named.values()} == {torch.float32}
    got = {n: t for bucket in WeightBuckets(model, 4000, torch.bfloat16) for n, t in bucket}
    assert got.keys() == named.keys() and "lm_head.weight" not in got
    for name, tensor in got.items():
        assert torch.equal(tensor, named[name].to(torch.bfloat16))
