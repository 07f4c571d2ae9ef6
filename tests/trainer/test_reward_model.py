import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_helpers import VOCAB_SIZE, alone, make_config, save_model, save_reward_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from minirl.config import Config, ConfigError, RewardConfig, RewardModelConfig
from minirl.trainer.reward_model import RewardModel, check_reward_model, pack_sequences

FORMS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


@pytest.fixture(scope="module", params=[("qwen3", "sequence"), ("llama", "token")])
def folder(request, tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("rm"), *request.param)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with alone(make_config(tmp_path_factory.mktemp("model"))) as world:
        yield world


def with_model(path: Path, **settings) -> Config:
    model = RewardModelConfig(path=str(path), **settings)
    return replace(make_config(path), reward=RewardConfig(reward_model=model))


def sequences(number: int = 13) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 60, (number,), generator=g).tolist()
    return [torch.randint(0, VOCAB_SIZE, (size,), generator=g).tolist() for size in sizes]


def expected(folder: Path) -> list[float]:
    """transformers' own forward pass, one sequence at a time."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    kind = "sequence" if "Sequence" in name else "token"
    model = FORMS[kind].from_pretrained(folder)
    with torch.no_grad():
        outputs = [model(torch.tensor([ids])).logits for ids in sequences()]
    return [float(o[0, 0] if kind == "sequence" else o[0, -1, 0]) for o in outputs]


@pytest.mark.parametrize("max_tokens", [1, 64, 100_000])
def test_a_score_is_that_of_transformers_however_sequences_are_packed(folder, world, max_tokens):
    model = RewardModel(with_model(folder, max_tokens_per_micro_batch=max_tokens), world)
    wanted = expected(folder)
    assert max(wanted) - min(wanted) > 0.1
    assert model.score(pack_sequences(sequences())) == pytest.approx(wanted, abs=1e-5)
    backwards = model.score(pack_sequences(sequences()[::-1]))
    assert backwards[::-1] == pytest.approx(wanted, abs=1e-5)


def test_nothing_to_score(folder, world):
    assert RewardModel(with_model(folder), world).score(pack_sequences([])) == []


def test_offloaded_shards_score_the_same(folder, world):
    model = RewardModel(with_model(folder, param_offload=True), world)
    assert model.score(pack_sequences(sequences())) == pytest.approx(expected(folder), abs=1e-5)


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_reward_model(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_cannot_score_is_refused(tmp_path, world):
    nothing = refused(with_model(tmp_path / "nothing"))
    assert nothing.startswith("reward.reward_model.path: got") and "not a folder" in nothing
    language_model = refused(with_model(save_model(tmp_path / "lm")))
    assert "Qwen3ForCausalLM" in language_model and "num_labels=1" in language_model
    two = refused(with_model(save_reward_model(tmp_path / "two", num_labels=2)))
    assert "Qwen3ForSequenceClassification with num_labels=2" in two
    short = save_reward_model(tmp_path / "short", max_position_embeddings=50)
    assert "at most 50 tokens, and conversations may have 96" in refused(with_model(short))
    assert check_reward_model(with_model(short, max_length=50)).vocab_size == VOCAB_SIZE
    headless = save_model(tmp_path / "headless")
    config = json.loads((headless / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "r"}}
    (headless / "config.json").write_text(json.dumps(config))
    check_reward_model(with_model(headless))  # its weights are read later, by every rank
    with pytest.raises(ConfigError, match=r"reward_model\.path: .* lacks .* such as score\.weight"):
        RewardModel(with_model(headless), world)


def test_a_classifier_without_a_token_form_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    config = {
        "model_type": "ctrl",
        "architectures": ["CTRLForSequenceClassification"],
        "id2label": {"0": "r"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has no ctrl model for AutoModelForTokenClassification" in refused(with_model(tmp_path))
