"""The policy's update, and the frozen reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from minirl.agent_loop import derive_seed
from minirl.algorithms import (
    POLICY_LOSSES,
    aggregate,
    check_agg_mode,
    kl_estimate,
    policy_loss,
    requirements,
)
from minirl.config import ActorConfig, Config, ConfigError
from minirl.distributed import Dist
from minirl.registry import option_names
from minirl.trainer import checkpoint, lora, packing
from minirl.trainer.attention import varlen_kernel
from minirl.trainer.buckets import WeightBuckets
from minirl.trainer.critic import CriticTrainer
from minirl.trainer.fsdp import check_lora, check_model, compute_dtype, load_model
from minirl.trainer.logprobs import token_logprobs
from minirl.trainer.model import LanguageModel
from minirl.trainer.update import Totals, TrainedModel, UpdateSettings, learning_rate
from minirl.types import LossInputs, MicroBatch


def check_config(config: Config) -> None:
    """Raise ConfigError for what the trainer cannot do; reads the models' config.json, no
    weights."""
    check_model(config.model, config.max_model_len)
    for section in ("ref", "critic"):
        path = getattr(getattr(config, section), "path", None)
        if path is not None:
            key = f"{section}.path"
            check_model(config.model, config.max_model_len, path=path, key=key)
    check_lora(config.model)
    loss_options(config.actor)


DRAWN_BY_THE_TRAINER = ("selected", "seed")


def loss_options(actor: ActorConfig) -> dict[str, Any]:
    """Keyword arguments of the policy loss: keys of `actor` that it has, then
    `policy_loss.options`."""
    name, given = actor.policy_loss.loss_mode, actor.policy_loss.options
    try:
        loss = POLICY_LOSSES.find(name)
        known = option_names(loss)
        options = {k: v for k, v in vars(actor).items() if k in known} | given
        POLICY_LOSSES.build(name, options)
        check_agg_mode(name, actor.loss_agg_mode)
        if requirements(loss).select and (drawn := given.keys() & set(DRAWN_BY_THE_TRAINER)):
            raise ValueError(
                f"options.{drawn.pop()} comes from trainer.seed and the mini-batch; leave it out"
            )
    except ValueError as error:
        raise ConfigError(f"actor.policy_loss: {error}") from error
    return options


class ReferencePolicy(LanguageModel):
    """The frozen policy of KL terms: `ref.path`, or the start policy."""

    def __init__(self, config: Config, world: Dist) -> None:
        assert config.ref is not None
        path = config.ref.path or config.model.path
        model = load_model(path, config.model, world, key="ref.path", frozen=True)
        super().__init__(config, world, model)


class PolicyTrainer(TrainedModel, LanguageModel):
    """The policy with its optimizer. `total_steps` is needed by schedules that decay.

    Raises ConfigError for a model, a loss or a schedule that cannot run.
    """

    section = "actor"

    def __init__(self, config: Config, world: Dist, total_steps: int | None = None) -> None:
        actor = config.actor
        self.loss_options = loss_options(actor)
        self.loss_needs = requirements(POLICY_LOSSES.find(actor.policy_loss.loss_mode))
        if total_steps is not None:
            total_steps -= config.trainer.critic_warmup  # steps that do not count in its schedule
        learning_rate(actor.optim, 0, total_steps)
        dtype = compute_dtype(config.model, world.device)
        varlen_kernel(world.device.type, dtype)  # says in the log which one computes attention
        seed = derive_seed(config.trainer.seed, "lora") if config.model.lora_rank else None
        model = load_model(config.model.path, config.model, world, adapter_seed=seed)
        settings = UpdateSettings(
            optim=actor.optim,
            ppo_epochs=actor.ppo_epochs,
            mini_batch_size=config.mini_batch_size,
            max_tokens=actor.max_tokens_per_micro_batch,
            grad_clip=actor.grad_clip,
        )
        super().__init__(config, world, model, settings, total_steps)
        megabytes = config.rollout.update_weights_bucket_megabytes
        self.weights = WeightBuckets(model, megabytes * 2**20, dtype, self.on_device)
        """The full weights in the engine's dtype; iterate on every rank."""

    def load(self, path: Path, critic: CriticTrainer | None = None) -> dict[str, Any]:
        """Go on from a checkpoint, the critic too; return `{"step": ..., **extra}`."""
        return checkpoint.load(path, trained_parts(self, critic), self.world)

    def load_latest(self, run_dir: Path) -> dict[str, Any] | None:
        """The weights of the newest checkpoint of a run, to be evaluated, and what `load` returns;
        None when there is none."""
        path = checkpoint.latest(run_dir / "checkpoints")
        if path is None:
            return None
        with self.on_device():
            return checkpoint.load_weights(path, "actor", self.model, self.world)

    def update(self, batch: MicroBatch) -> dict[str, float]:
        """See TrainedModel. Where a batch without `old_logprobs` is one optimizer step, its own
        forward pass gives and sets them; ValueError where it is several."""
        minis = packing.mini_batches(batch, self.settings.mini_batch_size)
        if batch.old_logprobs is None and self.settings.ppo_epochs * len(minis) > 1:
            raise ValueError("several optimizer steps need old_logprobs")
        metrics, logprobs = self._update(batch)
        if batch.old_logprobs is None:
            batch.old_logprobs = logprobs
        return metrics

    def _prepare(self, mini: MicroBatch, epoch: int, index: int) -> MicroBatch:
        """Choose the tokens of a loss that does so over the whole mini-batch."""
        if self.loss_needs.select is None:
            return mini
        correction = self.config.algorithm.rollout_correction
        bypass = correction is not None and correction.bypass_mode
        unchanged = epoch == index == 0 and not bypass  # old_logprobs are those of now
        logprobs = mini.old_logprobs if unchanged else self.compute_logprobs(mini)
        assert logprobs is not None
        seed = derive_seed(self.config.trainer.seed, "select", self.num_steps, epoch, index)
        options = self.loss_options | {"seed": seed}
        return replace(
            mini, selected=self.loss_needs.select(_loss_inputs(mini, logprobs), **options)
        )

    def _loss(
        self, micro: MicroBatch, counts: dict[str, float], totals: Totals
    ) -> tuple[Tensor, Tensor, Tensor]:
        actor, options = self.config.actor, self.loss_options
        logprobs, entropies = token_logprobs(
            self.model,
            micro,
            self.config.rollout.temperature,
            also="entropy_grad" if actor.entropy_coeff else "entropy",
        )
        if micro.selected is not None:
            options = options | {"selected": micro.selected}
        inputs = _loss_inputs(micro, logprobs)
        per_token, metrics = policy_loss(actor.policy_loss.loss_mode, inputs, **options)
        loss = self._aggregate(per_token, micro, counts)
        totals.add_part("actor/pg_loss", loss)
        totals.add_tokens(metrics | {"actor/entropy": entropies})
        if actor.use_kl_loss:
            assert micro.ref_logprobs is not None
            ref_logprobs = micro.ref_logprobs.masked_fill(micro.response_mask == 0, 0.0)
            kl = kl_estimate(logprobs, ref_logprobs, actor.kl_loss_type)
            kl_loss = self._aggregate(kl, micro, counts)
            totals.add_part("actor/kl_loss", kl_loss)
            loss = loss + actor.kl_loss_coef * kl_loss
            per_token = per_token + kl
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * self._aggregate(entropies, micro, counts)
        return loss, per_token, logprobs

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


def trained_parts(policy: PolicyTrainer, critic: CriticTrainer | None) -> dict[str, TrainedModel]:
    """What a checkpoint holds, by name."""
    return {"actor": policy} | ({"critic": critic} if critic else {})


class AdapterlessPolicy:
    """The reference policy of a LoRA run, without a copy: the policy with its adapter disabled."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy

    def compute_logprobs(self, batch: MicroBatch) -> Tensor:
        """See LanguageModel."""
        with lora.adapter_disabled(self._policy.model):
            return self._policy.compute_logprobs(batch)


def make_reference(
    config: Config, world: Dist, policy: PolicyTrainer
) -> ReferencePolicy | AdapterlessPolicy:
    """What `ref` asks for."""
    assert config.ref is not None
    if config.model.lora_rank and config.ref.path is None:
        return AdapterlessPolicy(policy)
    return ReferencePolicy(config, world)


def _loss_inputs(batch: MicroBatch, logprobs: Tensor) -> LossInputs:
    assert batch.advantages is not None
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=batch.ref_logprobs,
        rollout_is_weights=batch.rollout_is_weights,
        sequence_ids=batch.sequence_ids,
    )
