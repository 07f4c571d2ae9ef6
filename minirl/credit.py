"""From rewards to what an advantage estimator sees: functions of a step's batch and groups."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.agreement import agreement_metrics
from minirl.algorithms import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    FixedKL,
    Segments,
    apply_kl_penalty,
    compute_advantages,
    explained_variance,
    kl_estimate,
    probs_diff_metrics,
    requirements,
    rollout_correction,
)
from minirl.algorithms.kl import KL_CONTROLLERS
from minirl.config import AlgorithmConfig, Config, RolloutCorrectionConfig
from minirl.registry import option_names
from minirl.rewards import reward_number, token_rewards
from minirl.trainer import packing
from minirl.types import Group, MicroBatch


def pack_groups(
    groups: Sequence[Group], config: Config, prompts: list[list[list[int]]] | None = None
) -> MicroBatch:
    """The groups' trajectories with their rewards; those of rollout.mask_terminations do not train.

    `prompts`, per group and trajectory, take the place of the trajectories' own.
    """
    masked = set(config.rollout.mask_terminations)
    members = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    samples = [(index, t.sample_index) for index, t in members]
    numbers = {sample: number for number, sample in enumerate(dict.fromkeys(samples))}
    return packing.pack(
        [t for _, t in members],
        [token_rewards(t, config.reward.tool_reward) for _, t in members],
        [index for index, _ in members],
        [t.termination not in masked for _, t in members],
        None if prompts is None else [ids for group in prompts for ids in group],
        [numbers[sample] for sample in samples],
    )


def estimator_needs(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Fields of AdvantageInputs that the estimator asks for, beside the rewards."""
    return requirements(ADV_ESTIMATORS.find(algorithm.adv_estimator)).needs


def needs_old_logprobs(config: Config) -> bool:
    """Whether anything wants the policy's log-probabilities before its update.

    If not, the forward pass of the only optimizer step gives them: with the weights of then.
    """
    actor, algorithm = config.actor, config.algorithm
    loss = requirements(POLICY_LOSSES.find(actor.policy_loss.loss_mode))
    return bool(
        actor.ppo_epochs > 1
        or config.mini_batch_size < config.data.train_batch_size
        or config.trainer.critic_warmup
        or loss.select
        or algorithm.rollout_correction
        or algorithm.use_kl_in_reward
        or {"logprobs", "logprob_stats", "hinted_logprobs"} & set(estimator_needs(algorithm))
    )


def estimator_options(algorithm: AlgorithmConfig) -> dict[str, object]:
    """Keyword arguments of the estimator: keys of `algorithm` and `algorithm.cpo` that it has, then
    `algorithm.options`."""
    known = option_names(ADV_ESTIMATORS.find(algorithm.adv_estimator))
    keys = vars(algorithm) | (vars(algorithm.cpo) if algorithm.cpo else {})
    return {key: value for key, value in keys.items() if key in known} | algorithm.options


def make_kl_controller(algorithm: AlgorithmConfig) -> FixedKL:
    """Of `algorithm.kl_ctrl`; ValueError for an unknown type."""
    ctrl = algorithm.kl_ctrl
    known = option_names(KL_CONTROLLERS.find(ctrl.type))
    return KL_CONTROLLERS.build(ctrl.type, {k: v for k, v in vars(ctrl).items() if k in known})()


def correction_options(correction: RolloutCorrectionConfig) -> dict[str, Any]:
    """Keyword arguments of `rollout_correction`."""
    return {
        "rollout_is": correction.rollout_is,
        "rollout_is_threshold": correction.rollout_is_threshold,
        "rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
        "rollout_rs": correction.rollout_rs,
        "rollout_rs_threshold": correction.rollout_rs_threshold,
    }


def correct_mismatch(
    batch: MicroBatch, correction: RolloutCorrectionConfig | None
) -> dict[str, float]:
    """Weigh or reject tokens by how far the engine's probabilities are from the trainer's.

    Sets rollout_is_weights and response_mask of the batch; the reward of a rejected token goes to
    the last one before it that stays. Returns the metrics on the mismatch, which without
    `correction` are all that happens.
    """
    assert batch.old_logprobs is not None
    pair = batch.old_logprobs, batch.rollout_logprobs, batch.response_mask
    options = correction_options(correction) if correction else {}
    corrected = rollout_correction(*pair, sequence_ids=batch.sequence_ids, **options)
    metrics = probs_diff_metrics(*pair) | agreement_metrics(batch) | corrected.metrics
    batch.rollout_is_weights, batch.response_mask = corrected.weights, corrected.response_mask
    batch.token_rewards = _rewards_where_kept(batch)
    return metrics


def _rewards_where_kept(batch: MicroBatch) -> Tensor:
    """token_rewards [N], each at the last token of its sequence up to it that trains: estimators
    per token do not look at the others, and the outcome stands on the very last. Where no token
    before it trains, a reward stays: none could have earned it, but the sum is the trajectory's."""
    here = torch.arange(batch.num_tokens)
    kept = torch.where(batch.response_mask > 0, here, -1).cummax(0).values
    in_sequence = kept >= here - batch.positions
    places = torch.where(in_sequence, kept, here)
    return torch.zeros_like(batch.token_rewards).index_add(0, places, batch.token_rewards)


def penalize_kl(batch: MicroBatch, controller: FixedKL, kind: str) -> dict[str, float]:
    """Take coefficient x KL(policy, ref) away from every token's reward; move the coefficient.

    The KL that the controller and the metric see is the mean over sequences of the mean over their
    sampled tokens, as in verl.
    """
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind)
    kl = kl.masked_fill(batch.response_mask == 0, 0.0)  # nan x 0 is nan
    coefficient = controller.value
    batch.token_rewards = apply_kl_penalty(
        batch.token_rewards, kl, batch.response_mask, coefficient
    )
    trains = packing.trained_per_sequence(batch) > 0
    if not trains.any():
        return {}
    sequences = Segments(batch.sequence_ids, batch.num_sequences)
    mean_kl = float(sequences.mean(kl, batch.response_mask)[trains].mean())
    controller.update(mean_kl, n_steps=int(trains.sum()))
    return {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}


def estimate(
    batch: MicroBatch, groups: Sequence[Group], algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [N] of the whole step; `groups` are those that were packed.

    Raises ValueError for a trajectory without a reward component that the estimator wants.
    """
    if not groups:
        return torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    needs = estimator_needs(algorithm)
    names = algorithm.options.get("gdpo_reward_keys")
    inputs = advantage_inputs(
        batch,
        greedy_rewards=greedy_rewards(groups) if "greedy_rewards" in needs else None,
        reward_components=reward_components(groups, names)
        if "reward_components" in needs
        else None,
    )
    options = estimator_options(algorithm)
    advantages, returns = compute_advantages(algorithm.adv_estimator, inputs, **options)
    return packing.from_rows(batch, advantages), packing.from_rows(batch, returns)


def advantage_inputs(
    batch: MicroBatch,
    *,
    greedy_rewards: Tensor | None = None,
    reward_components: dict[str, Tensor] | None = None,
) -> AdvantageInputs:
    """Rows [B, T] of everything that the batch holds, B sequences in its order."""

    def rows(name: str) -> Tensor | None:
        return None if getattr(batch, name) is None else packing.to_rows(batch, name)

    return AdvantageInputs(
        token_rewards=packing.to_rows(batch, "token_rewards"),
        response_mask=packing.to_rows(batch, "response_mask"),
        group_ids=batch.group_ids,
        sample_ids=batch.sample_ids,
        values=rows("values"),
        logprob_stats=rows("logprob_stats"),
        logprobs=rows("old_logprobs"),
        hinted_logprobs=rows("hinted_logprobs"),
        greedy_rewards=greedy_rewards,
        reward_components=reward_components,
    )


def greedy_rewards(groups: Sequence[Group]) -> Tensor:
    """[B]: each trajectory's group's."""
    return torch.tensor([group.greedy_reward for group in groups for _ in group.trajectories])


def reward_components(
    groups: Sequence[Group], names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Component -> [B]; without `names` all that the reward function returned for any trajectory.

    Raises ValueError, which names the trajectory, where a component is missing.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    found = {name for t in trajectories for name in t.reward_breakdown}
    # What a tool returned is no component: only who called it has it.
    names = names or sorted(name for name in found if not name.startswith("tool/"))
    if trajectories and not names:
        raise ValueError(
            "algorithm.adv_estimator wants the components of the reward, but the reward function "
            "returns a single number; return a mapping with `score` and one entry per component"
        )
    return {name: torch.tensor([reward_number(t, name) for t in trajectories]) for name in names}


def batch_metrics(batch: MicroBatch) -> dict[str, float]:
    """critic/{advantages,returns,values}/{mean,max,min} over the sampled tokens, and the share of
    the returns' variance that the values explain (`critic/vf_explained_var`), where they vary."""
    sampled = batch.response_mask > 0
    metrics: dict[str, float] = {}
    for name in ("advantages", "returns", "values"):
        values = getattr(batch, name)
        if values is not None and sampled.any():
            there = values[sampled]
            for statistic in ("mean", "max", "min"):
                metrics[f"critic/{name}/{statistic}"] = float(getattr(there, statistic)())
    if batch.values is not None and batch.returns is not None:
        explained = explained_variance(batch.values, batch.returns, batch.response_mask)
        if explained == explained:  # not nan
            metrics["critic/vf_explained_var"] = explained
    return metrics


def broken_sequences(batch: MicroBatch) -> list[int]:
    """Sequences with an advantage or a return that is not finite."""
    assert batch.advantages is not None and batch.returns is not None
    broken = ~(batch.advantages.isfinite() & batch.returns.isfinite())
    return batch.sequence_ids[broken].unique().tolist()
