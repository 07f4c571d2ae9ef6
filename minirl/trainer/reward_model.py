"""The reward model: a frozen model with one output, applied to whole conversations."""

import torch
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PretrainedConfig

from minirl.config import Config, ConfigError, require
from minirl.distributed import Dist
from minirl.trainer import packing
from minirl.trainer.fsdp import check_model, load_model
from minirl.trainer.logprobs import token_scores
from minirl.trainer.model import PackedModel
from minirl.types import MicroBatch, Trajectory

KEY = "reward.reward_model"
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def check_reward_model(config: Config) -> PretrainedConfig:
    """Raise ConfigError for a model that cannot score; reads and returns its config.json."""
    settings = config.reward.reward_model
    assert settings is not None
    length = settings.max_length or config.max_model_len
    key, path = f"{KEY}.path", settings.path
    found = check_model(config.model, length, path=path, key=key)
    classes = found.architectures or []
    if not any(name.endswith(CLASSIFIERS) for name in classes) or found.num_labels != 1:
        raise ConfigError(
            f"{key}: {path!r} is {', '.join(classes) or found.model_type} with num_labels="
            f"{found.num_labels}; name one of AutoModelForSequenceClassification or "
            "AutoModelForTokenClassification with num_labels=1"
        )
    require(
        type(found) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        key,
        path,
        f"transformers has no {found.model_type} model for AutoModelForTokenClassification, in "
        "which form scores are computed; choose another model",
    )
    limit = getattr(found.get_text_config(), "max_position_embeddings", length)
    require(
        length <= limit,
        f"{KEY}.max_length",
        settings.max_length,
        f"the model reads at most {limit} tokens, and conversations may have "
        f"{config.max_model_len}; write at most {limit}",
    )
    return found


class RewardModel(PackedModel):
    """The model of `reward.reward_model`, on every rank.

    Raises ConfigError for a model that cannot be loaded.
    """

    def __init__(self, config: Config, world: Dist) -> None:
        settings = config.reward.reward_model
        assert settings is not None
        model = load_model(
            settings.path, config.model, world, key=f"{KEY}.path", head="score", frozen=True
        )
        max_tokens = settings.max_tokens_per_micro_batch
        super().__init__(config, world, model, max_tokens, offload=settings.param_offload)

    def score(self, batch: MicroBatch) -> list[float]:
        """One score per sequence of a batch of `pack_sequences`.

        Every rank passes the same batch and gets the whole result.
        """
        scores = self.evaluate(batch, lambda micro: token_scores(self.model, micro))
        self.world.release_memory()
        return scores[torch.cumsum(batch.lengths, 0) - 1].tolist()


def pack_sequences(sequences: list[list[int]]) -> MicroBatch:
    """Token sequences, each at least one token, of which the last is looked at."""
    wholes = [
        Trajectory(
            prompt_ids=ids[:-1],
            response_ids=ids[-1:],
            response_mask=[1],
            response_logprobs=[0.0],
        )
        for ids in sequences
    ]
    return packing.pack(wholes, [[0.0]] * len(wholes), list(range(len(wholes))))
