"""How a model is updated from a step's batch: the policy and the critic alike."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from minirl.config import Config, OptimConfig, require
from minirl.distributed import Dist
from minirl.trainer import packing
from minirl.trainer.model import PackedModel
from minirl.trainer.offload import Offload, optimizer_state
from minirl.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """What `actor` and `critic` say about their updates."""

    optim: OptimConfig
    ppo_epochs: int
    mini_batch_size: int
    """Prompts."""
    max_tokens: int
    """Per micro-batch."""
    grad_clip: float


class TrainedModel(PackedModel):
    """A model with its optimizer. A subclass says what its loss is.

    `total_steps` is needed by schedules that decay; ConfigError without it.
    """

    section: ClassVar[str]
    """Of the config, and the prefix of the metrics."""

    def __init__(
        self,
        config: Config,
        world: Dist,
        model: PreTrainedModel,
        settings: UpdateSettings,
        total_steps: int | None,
    ) -> None:
        super().__init__(config, world, model, settings.max_tokens)
        self.settings = settings
        self.total_steps = total_steps
        self.optimizer = make_optimizer(model, settings.optim)
        self._moments: Offload | None = None
        if config.actor.offload != "none":
            self._moments = Offload(optimizer_state(self.optimizer))
        self.num_steps = 0
        """Calls of `update` and `skip`: the place in the learning-rate schedule."""
        self.bad_sequences: list[int] = []
        """Of the last `update`'s batch: those with a loss or a gradient that is not finite."""

    def update(self, batch: MicroBatch) -> dict[str, float]:
        """Train on a whole step's batch: ppo_epochs x mini-batches, one optimizer step each.

        The batch needs what the loss needs, and is the same on every rank, as are the metrics that
        are returned. An optimizer step whose loss or gradient is not finite is not applied, and
        counted in `<section>/num_skipped_updates`.
        """
        return self._update(batch)[0]

    def skip(self) -> None:
        """A step that teaches nothing uses up its place in the schedule, too."""
        self.num_steps += 1

    def _update(self, batch: MicroBatch) -> tuple[dict[str, float], Tensor]:
        """The metrics, and what `_loss` said of each trained token in the last epoch: [N]."""
        settings = self.settings
        rate = learning_rate(settings.optim, self.num_steps, self.total_steps, self.section)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals, said = Totals(self.section), torch.zeros(batch.num_tokens)
        self.bad_sequences = []
        with self.on_device(optimizer=True):
            for epoch in range(settings.ppo_epochs):
                minis = packing.mini_batches(batch, settings.mini_batch_size)
                for index, sequences in enumerate(minis):
                    mini = self._prepare(batch.select(sequences), epoch, index)
                    bad, said[batch.places(sequences)] = self._optimizer_step(mini, totals)
                    self.bad_sequences += [sequences[b] for b in bad]
        self.bad_sequences = sorted(set(self.bad_sequences))
        self.num_steps += 1
        return totals.result(self.world) | {f"{self.section}/lr": rate}, said

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """See PackedModel."""
        moments = self._moments.here() if optimizer and self._moments else nullcontext()
        with super().on_device(), moments:
            yield

    @abstractmethod
    def _loss(
        self, micro: MicroBatch, counts: dict[str, float], totals: "Totals"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This micro-batch's part of the mini-batch's loss, the per-token loss [T], and what the
        model says of each token [T]: its log-probability, or its value.

        Parts add up over slots and ranks: `counts` are those of the whole mini-batch.
        """

    def _prepare(self, mini: MicroBatch, epoch: int, index: int) -> MicroBatch:
        """The mini-batch with what the loss needs to know of all of it."""
        return mini

    def _optimizer_step(self, mini: MicroBatch, totals: "Totals") -> tuple[list[int], Tensor]:
        """Apply the gradient of a mini-batch, or return the sequences why that cannot be done; and
        what the model said of each token before: [n]."""
        trained = packing.trained_per_sequence(mini)
        counts = {"num_tokens": float(trained.sum()), "num_sequences": float((trained > 0).sum())}
        suspects, said = torch.zeros(mini.num_sequences), torch.zeros(mini.num_tokens)
        if not counts["num_tokens"]:
            return [], said
        losses = []  # looked at behind the loop, so that the device does not have to stop in it
        for sequences, micro in self.micro_batches(mini):
            loss, per_token, output = self._loss(micro, counts, totals)
            loss.backward()
            losses.append((sequences, micro.sequence_ids, per_token.detach(), output.detach()))
        norm = gradient_norm(self.model)
        for sequences, sequence_ids, per_token, output in losses:
            broken = sequence_ids[~per_token.isfinite()].tolist()
            suspects[[sequences[b] for b in broken]] = 1
            if sequences:
                said[mini.places(sequences)] = output.cpu()
        both = self.world.sum_tensor(torch.cat([suspects, said]))
        suspects, said = both.split([mini.num_sequences, mini.num_tokens])
        finite = math.isfinite(norm) and not suspects.any()
        if finite:
            limit = torch.tensor(norm, device=self.world.device)
            clip_grads_with_norm_(self.model.parameters(), self.settings.grad_clip, limit)
            self.optimizer.step()
        self.optimizer.zero_grad()
        totals.finish_mini_batch(counts["num_tokens"], norm if finite else None)
        # A gradient can break where every loss is fine; then any sequence may be why.
        culprits = suspects if suspects.any() else trained
        return [] if finite else (culprits > 0).nonzero().squeeze(1).tolist(), said


class Totals:
    """Sums over micro-batches, kept on the device; reduced over ranks once per update."""

    def __init__(self, section: str) -> None:
        self._section = section
        self._parts: dict[str, Tensor] = {}  # of a mini-batch's loss
        self._tokens: dict[str, Tensor] = {}  # sums over tokens
        self._num_tokens = 0.0  # over all ranks, as are the following
        self._norms: list[float] = []
        self._num_updates = 0

    def add_part(self, name: str, part: Tensor) -> None:
        """Part of a loss of a mini-batch."""
        self._parts[name] = self._parts.get(name, 0.0) + part.detach()

    def add_tokens(self, values: dict[str, Tensor]) -> None:
        """Numbers per token, 0 where it does not train."""
        for name, per_token in values.items():
            self._tokens[name] = self._tokens.get(name, 0.0) + per_token.detach().sum()

    def finish_mini_batch(self, num_tokens: float, norm: float | None) -> None:
        """Count a mini-batch; `norm` None says that it was not applied."""
        self._num_tokens += num_tokens
        self._num_updates += 1
        if norm is not None:
            self._norms.append(norm)

    def result(self, world: Dist) -> dict[str, float]:
        """Means over tokens, or over mini-batches for losses; the same on every rank."""
        sums = self._parts | self._tokens
        values = world.sum_floats([float(v) for v in sums.values()])
        metrics = {
            name: value / (self._num_updates if name in self._parts else self._num_tokens)
            for name, value in zip(sums, values, strict=True)
        }
        skipped = self._num_updates - len(self._norms)
        metrics[f"{self._section}/num_updates"] = float(len(self._norms))
        metrics[f"{self._section}/num_skipped_updates"] = float(skipped)
        if self._norms:
            metrics[f"{self._section}/grad_norm"] = sum(self._norms) / len(self._norms)
        return metrics


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW, fused (three times faster than `foreach` on a CPU); decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True
    )


def learning_rate(
    optim: OptimConfig, step: int, total_steps: int | None, section: str = "actor"
) -> float:
    """The learning rate of training step `step` (from 0), which is all its optimizer steps.

    Warm-up is linear and reaches `lr` at step lr_warmup_steps; the decay ends at the last step.
    """
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / (optim.lr_warmup_steps + 1)
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    require(
        total_steps is not None,
        f"{section}.optim.lr_scheduler_type",
        optim.lr_scheduler_type,
        "needs the number of steps: set trainer.total_training_steps",
    )
    assert total_steps is not None
    span = max(1, total_steps - 1 - optim.lr_warmup_steps)
    done = min(1.0, (step - optim.lr_warmup_steps) / span)
    share = 1 - done if optim.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share)


def gradient_norm(model: nn.Module) -> float:
    """The 2-norm of the gradient over all parameters and ranks."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
