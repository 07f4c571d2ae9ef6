"""A model on every rank, applied to a whole batch that is spread over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minirl.config import Config
from minirl.distributed import Dist
from minirl.trainer import packing
from minirl.trainer.fsdp import reshard
from minirl.trainer.logprobs import Also, token_logprobs
from minirl.trainer.offload import Offload, weights
from minirl.types import MicroBatch, Trajectory


class PackedModel:
    """A model, and the tokens that a rank puts through it at once.

    With `offload` (unless given: actor.offload=all) its weights are on the device only while it
    computes.
    """

    def __init__(
        self,
        config: Config,
        world: Dist,
        model: PreTrainedModel,
        max_tokens: int | None = None,
        offload: bool | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.model = model
        self.max_tokens = max_tokens or config.actor.max_tokens_per_micro_batch
        if offload is None:
            offload = config.actor.offload == "all"
        self._offload = Offload(weights(model)) if offload else None

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """What is kept in host memory is on the device inside; a trained model's `optimizer`."""
        with self._offload.here() if self._offload else nullcontext():
            yield

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.model.config.get_text_config().vocab_size

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch, function: Callable[[MicroBatch], Tensor]) -> Tensor:
        """`function` [..., T] of every micro-batch, put together to [..., N] float32 on the CPU.

        0 for sequences without a trained token. Every rank passes the same batch and gets the whole
        result.
        """
        result: Tensor | None = None
        with self.on_device():
            for sequences, micro in self.micro_batches(batch):
                part = function(micro).cpu()
                if result is None:
                    result = torch.zeros(*part.shape[:-1], batch.num_tokens)
                if sequences:
                    result[..., batch.places(sequences)] = part
            reshard(self.model)
        assert result is not None  # every rank has at least one slot
        return self.world.sum_tensor(result)

    def micro_batches(self, batch: MicroBatch) -> Iterator[tuple[list[int], MicroBatch]]:
        """This rank's micro-batches, on its device, and their sequences in `batch`.

        Sequences without a trained token are left out. A rank with nothing in a slot gets one
        token that does not train, so that all ranks meet in the same collectives.
        """
        kept = (packing.trained_per_sequence(batch) > 0).nonzero().squeeze(1).tolist()
        lengths = batch.lengths[kept].tolist()
        for members in packing.plan(lengths, self.world.world_size, self.max_tokens)[
            self.world.rank
        ]:
            sequences = [kept[m] for m in members]
            micro = batch.select(sequences) if sequences else packing.empty_like(batch)
            yield sequences, micro.to(self.world.device)


class LanguageModel(PackedModel):
    """A model that gives log-probabilities."""

    def compute_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] float32 (CPU) of the tokens with response_mask 1, 0 elsewhere.

        At rollout.temperature. Every rank passes the same batch and gets the whole result.
        """
        return self._compute(batch, "nothing")[0]

    def compute_logprobs_and_stats(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As `compute_logprobs`, and 1 - 2 pi + sum_v pi_v^2 at the same tokens [N]."""
        logprobs, stats = self._compute(batch, "stats")
        return logprobs, stats

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at rollout.temperature, of every token of one sequence; 0 for the first.

        Every rank takes part, with as many tokens as the others.
        """
        zeros = [0.0] * len(token_ids)
        whole = Trajectory(
            prompt_ids=[],
            response_ids=token_ids,
            response_mask=[1] * len(token_ids),
            response_logprobs=zeros,
        )
        sequence = packing.pack([whole], [zeros], [0])
        temperature = self.config.rollout.temperature
        with self.on_device():
            logprobs, _ = token_logprobs(self.model, sequence.to(self.world.device), temperature)
            reshard(self.model)
            return logprobs.tolist()

    def _compute(self, batch: MicroBatch, also: Also) -> Tensor:
        temperature = self.config.rollout.temperature
        return self.evaluate(
            batch,
            lambda micro: torch.stack(token_logprobs(self.model, micro, temperature, also=also)),
        )
