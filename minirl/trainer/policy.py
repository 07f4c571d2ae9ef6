"""The policy's gradient: log-probabilities, the PPO update, and the frozen reference."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from minirl.algorithms import (
    POLICY_LOSSES,
    aggregate,
    check_agg_mode,
    kl_estimate,
    policy_loss,
    probs_diff_metrics,
    requirements,
    rollout_correction,
)
from minirl.config import ActorConfig, Config, ConfigError, OptimConfig, require
from minirl.distributed import Dist
from minirl.registry import option_names
from minirl.trainer import checkpoint, packing
from minirl.trainer.fsdp import WeightBuckets, check_model, compute_dtype, load_model, reshard
from minirl.trainer.logprobs import token_logprobs
from minirl.types import LossInputs, MicroBatch


def check_config(config: Config) -> None:
    """Raise ConfigError for what the trainer cannot do; reads the model's config.json, no
    weights."""
    check_model(config.model, config.max_model_len)
    if config.ref is not None and config.ref.path is not None:
        check_model(config.model, config.max_model_len, path=config.ref.path, key="ref.path")
    loss_options(config.actor)


def loss_options(actor: ActorConfig) -> dict[str, Any]:
    """Keyword arguments of the policy loss: keys of `actor` that it has, then
    `policy_loss.options`."""
    name, given = actor.policy_loss.loss_mode, actor.policy_loss.options
    try:
        known = option_names(POLICY_LOSSES.find(name))
        options = {k: v for k, v in vars(actor).items() if k in known} | given
        POLICY_LOSSES.build(name, options)
        check_agg_mode(name, actor.loss_agg_mode)
    except ValueError as error:
        raise ConfigError(f"actor.policy_loss: {error}") from error
    require(
        not requirements(POLICY_LOSSES.find(name)).whole_batch,
        "actor.policy_loss.loss_mode",
        name,
        "the trainer does not choose tokens over a whole mini-batch yet; use another loss",
    )
    return options


class _LogprobModel:
    """A model that computes log-probabilities of a whole batch, spread over the ranks."""

    def __init__(self, config: Config, world: Dist, model: PreTrainedModel) -> None:
        self.config = config
        self.world = world
        self.model = model

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.model.config.get_text_config().vocab_size

    @torch.no_grad()
    def compute_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] float32 (CPU) of the tokens with response_mask 1, 0 elsewhere.

        At rollout.temperature. Every rank passes the same batch and gets the whole result.
        """
        result = torch.zeros(batch.num_tokens)
        for sequences, micro in self._micro_batches(batch):
            logprobs, _ = token_logprobs(self.model, micro, self.config.rollout.temperature)
            if sequences:
                result[packing.token_places(batch, sequences)] = logprobs.cpu()
        reshard(self.model)
        return self.world.sum_tensor(result)

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at rollout.temperature, of every token of one sequence; 0 for the first.

        Every rank takes part, with as many tokens as the others.
        """
        zeros = torch.zeros(len(token_ids))
        size, none = torch.tensor([len(token_ids)]), torch.zeros(1, dtype=torch.int64)
        sequence = MicroBatch(
            tokens=torch.tensor(token_ids),
            positions=torch.arange(len(token_ids)),
            sequence_ids=zeros.long(),
            response_mask=zeros + 1,
            rollout_logprobs=zeros,
            token_rewards=zeros,
            lengths=size,
            prompt_lengths=none,
            group_ids=none,
        )
        temperature = self.config.rollout.temperature
        logprobs, _ = token_logprobs(self.model, sequence.to(self.world.device), temperature)
        reshard(self.model)
        return logprobs.tolist()

    def _micro_batches(self, batch: MicroBatch) -> Iterator[tuple[list[int], MicroBatch]]:
        """This rank's micro-batches, on its device, and their sequences in `batch`.

        Sequences without a trained token are left out. A rank with nothing in a slot gets one
        token that does not train, so that all ranks meet in the same collectives.
        """
        kept = (packing.trained_per_sequence(batch) > 0).nonzero().squeeze(1).tolist()
        lengths = batch.lengths[kept].tolist()
        limit = self.config.actor.max_tokens_per_micro_batch
        for members in packing.plan(lengths, self.world.world_size, limit)[self.world.rank]:
            sequences = [kept[m] for m in members]
            micro = batch.select(sequences) if sequences else packing.empty_like(batch)
            yield sequences, micro.to(self.world.device)


class ReferencePolicy(_LogprobModel):
    """The frozen policy of KL terms: `ref.path`, or the start policy."""

    def __init__(self, config: Config, world: Dist) -> None:
        assert config.ref is not None
        path = config.ref.path or config.model.path
        model = load_model(path, config.model, world, key="ref.path")
        super().__init__(config, world, model.requires_grad_(False))


class PolicyTrainer(_LogprobModel):
    """The policy with its optimizer. `total_steps` is needed by schedules that decay.

    Raises ConfigError for a model, a loss or a schedule that cannot run.
    """

    def __init__(self, config: Config, world: Dist, total_steps: int | None = None) -> None:
        self.loss_options = loss_options(config.actor)
        self.total_steps = total_steps
        learning_rate(config.actor.optim, 0, total_steps)
        super().__init__(config, world, load_model(config.model.path, config.model, world))
        self.optimizer = make_optimizer(self.model, config.actor.optim)
        self.num_steps = 0
        """Calls of `update`: the place in the learning-rate schedule."""
        megabytes = config.rollout.update_weights_bucket_megabytes
        dtype = compute_dtype(config.model, world.device)
        self.weights = WeightBuckets(self.model, megabytes * 2**20, dtype)
        """The full weights in the engine's dtype; iterate on every rank."""

    def update(self, batch: MicroBatch) -> dict[str, float]:
        """Train on a whole step's batch: ppo_epochs x mini-batches, one optimizer step each.

        The batch needs old_logprobs and advantages (and ref_logprobs under use_kl_loss), and is
        the same on every rank, as are the metrics that are returned.
        """
        rate = learning_rate(self.config.actor.optim, self.num_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals = _Totals()
        for _ in range(self.config.actor.ppo_epochs):
            for sequences in packing.mini_batches(batch, self.config.mini_batch_size):
                self._optimizer_step(batch.select(sequences), totals)
        self.num_steps += 1
        return totals.result(self.world) | {"actor/lr": rate}

    def save(
        self, directory: Path, step: int, extra: dict[str, Any], *, max_to_keep: int | None = None
    ) -> Path:
        """Write a checkpoint; see `minirl.trainer.checkpoint.save`."""
        extra = extra | {"num_updates": self.num_steps}
        state = self.model, self.optimizer, extra, self.world
        return checkpoint.save(directory, step, *state, max_to_keep=max_to_keep)

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint; return `{"step": ..., **extra}`."""
        extra = checkpoint.load(path, self.model, self.optimizer, self.world)
        self.num_steps = extra.pop("num_updates")
        return extra

    def load_latest(self, run_dir: Path) -> dict[str, Any] | None:
        """Go on from the newest checkpoint of a run; None when there is none."""
        path = checkpoint.latest(run_dir / "checkpoints")
        return None if path is None else self.load(path)

    def _optimizer_step(self, mini: MicroBatch, totals: "_Totals") -> None:
        trained = packing.trained_per_sequence(mini)
        counts = {"num_tokens": float(trained.sum()), "num_sequences": float((trained > 0).sum())}
        if not counts["num_tokens"]:
            return
        for _, micro in self._micro_batches(mini):
            self._loss(micro, counts, totals).backward()
        norm = gradient_norm(self.model)
        finite = math.isfinite(norm)
        if finite:
            limit = torch.tensor(norm, device=self.world.device)
            clip_grads_with_norm_(self.model.parameters(), self.config.actor.grad_clip, limit)
            self.optimizer.step()
        self.optimizer.zero_grad()
        totals.finish_mini_batch(counts["num_tokens"], norm if finite else None)

    def _loss(self, micro: MicroBatch, counts: dict[str, float], totals: "_Totals") -> Tensor:
        """This micro-batch's part of the mini-batch's loss: parts add up over slots and ranks."""
        actor = self.config.actor
        logprobs, entropies = token_logprobs(
            self.model,
            micro,
            self.config.rollout.temperature,
            entropy="grad" if actor.entropy_coeff else "value",
        )
        assert micro.old_logprobs is not None and micro.advantages is not None
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=micro.old_logprobs,
            advantages=micro.advantages,
            response_mask=micro.response_mask,
            rollout_logprobs=micro.rollout_logprobs,
            ref_logprobs=micro.ref_logprobs,
            sequence_ids=micro.sequence_ids,
        )
        per_token, metrics = policy_loss(actor.policy_loss.loss_mode, inputs, **self.loss_options)
        loss = self._aggregate(per_token, micro, counts)
        totals.add_parts({"actor/pg_loss": loss})
        totals.add_tokens(metrics | {"actor/entropy": entropies})
        if actor.use_kl_loss:
            assert micro.ref_logprobs is not None
            kl = kl_estimate(logprobs, micro.ref_logprobs, actor.kl_loss_type)
            kl_loss = self._aggregate(kl, micro, counts)
            totals.add_parts({"actor/kl_loss": kl_loss})
            loss = loss + actor.kl_loss_coef * kl_loss
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * self._aggregate(entropies, micro, counts)
        return loss

    def _aggregate(self, per_token: Tensor, micro: MicroBatch, counts: dict[str, float]) -> Tensor:
        actor = self.config.actor
        return aggregate(
            per_token,
            micro.response_mask,
            actor.loss_agg_mode,
            scale=actor.loss_scale_factor or float(self.config.rollout.response_length),
            sequence_ids=micro.sequence_ids,
            **counts,
        )


class _Totals:
    """Sums over micro-batches, kept on the device; reduced over ranks once per update."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}  # of a mini-batch's loss
        self._tokens: dict[str, Tensor] = {}  # sums over tokens
        self._num_tokens = 0.0  # over all ranks, as are the following
        self._norms: list[float] = []
        self._num_updates = 0

    def add_parts(self, parts: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + part.detach()

    def add_tokens(self, values: dict[str, Tensor]) -> None:
        for name, per_token in values.items():
            self._tokens[name] = self._tokens.get(name, 0.0) + per_token.detach().sum()

    def finish_mini_batch(self, num_tokens: float, norm: float | None) -> None:
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
        metrics["actor/num_updates"] = float(len(self._norms))
        metrics["actor/num_skipped_updates"] = float(self._num_updates - len(self._norms))
        if self._norms:
            metrics["actor/grad_norm"] = sum(self._norms) / len(self._norms)
        return metrics


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW, fused (three times faster than `foreach` on a CPU); decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True
    )


def learning_rate(optim: OptimConfig, step: int, total_steps: int | None) -> float:
    """The learning rate of training step `step` (from 0), which is all its optimizer steps.

    Warm-up is linear and reaches `lr` at step lr_warmup_steps; the decay ends at the last step.
    """
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / (optim.lr_warmup_steps + 1)
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    require(
        total_steps is not None,
        "actor.optim.lr_scheduler_type",
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


def mismatch_metrics(batch: MicroBatch) -> dict[str, float]:
    """How far old_logprobs and the engine's disagree on the sampled tokens of a step.

    `training/rollout_probs_diff_*` and `rollout_corr/*`, of the whole batch.
    """
    assert batch.old_logprobs is not None
    pair = batch.old_logprobs, batch.rollout_logprobs, batch.response_mask
    corrected = rollout_correction(*pair, sequence_ids=batch.sequence_ids)
    return probs_diff_metrics(*pair) | corrected.metrics
