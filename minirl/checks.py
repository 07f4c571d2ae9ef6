"""Whether the parts of an algorithm fit together: refused at start, with key, value and remedy."""

import torch

from minirl.algorithms import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    Requirements,
    kl_estimate,
    policy_loss,
    requirements,
    rollout_correction,
)
from minirl.config import Config, ConfigError, RolloutConfig, require
from minirl.credit import (
    correction_options,
    estimator_options,
    make_kl_controller,
    needs_old_logprobs,
)
from minirl.hints import load_hint
from minirl.trainer.policy import loss_options
from minirl.types import LossInputs


def check_algorithms(config: Config) -> None:
    """Raise ConfigError for an estimator, a loss or a term that lacks what it needs."""
    name, key = config.algorithm.adv_estimator, "algorithm.adv_estimator"
    try:
        needed = requirements(ADV_ESTIMATORS.find(name))
        ADV_ESTIMATORS.build(name, estimator_options(config.algorithm))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    _check_sampling(config.rollout)
    _check_reward_model(config)
    _check_group_size(config, needed)
    _check_critic(config, "values" in needed.needs)
    _check_hints(config, "hinted_logprobs" in needed.needs)
    _check_loss(config)
    _check_kl(config)
    _check_correction(config, needed)
    _check_tail(config, needed)
    _check_deterministic(config)


def _check_sampling(rollout: RolloutConfig) -> None:
    for key, value, off in (
        ("top_p", rollout.top_p, 1.0),
        ("top_k", rollout.top_k, -1),
        ("min_p", rollout.min_p, 0.0),
    ):
        require(
            value == off or rollout.allow_truncated_sampling,
            f"rollout.{key}",
            value,
            f"the engine would not sample from the policy that is trained; write {off}, or "
            "rollout.allow_truncated_sampling=true to train all the same",
        )


def _check_reward_model(config: Config) -> None:
    require(
        config.reward.reward_model is None or config.algorithm.cpo is None,
        "reward.reward_model",
        "a section",
        "algorithm.cpo calls a prompt hard by the share of answers that succeed, and a model's "
        "score is no success; write null, or train with another algorithm.adv_estimator",
    )


def _check_group_size(config: Config, needed: Requirements) -> None:
    n, name = config.rollout.n, config.algorithm.adv_estimator
    require(
        n >= needed.min_group_size,
        "rollout.n",
        n,
        f"algorithm.adv_estimator={name} compares the answers to one prompt, so with fewer than "
        f"{needed.min_group_size} every advantage is 0; raise it, or choose an estimator without "
        "groups (gae, reinforce_plus_plus, remax)",
    )
    require(
        n > 1 or config.algorithm.filter_groups is None,
        "algorithm.filter_groups",
        config.algorithm.filter_groups,
        "with rollout.n=1 no group would ever stay; raise rollout.n, or write null",
    )


def _check_critic(config: Config, needs_values: bool) -> None:
    name, warmup = config.algorithm.adv_estimator, config.trainer.critic_warmup
    if config.critic is None:
        require(
            not needs_values,
            "algorithm.adv_estimator",
            name,
            "it needs the values of a critic; write `critic: {}`, or choose grpo, rloo ...",
        )
        require(
            warmup == 0,
            "trainer.critic_warmup",
            warmup,
            "there is no critic; write `critic: {}`, or trainer.critic_warmup=0",
        )
    else:
        require(
            needs_values,
            "critic",
            "a section",
            f"algorithm.adv_estimator={name} does not look at its values; write `critic: null`, or "
            "choose gae (your own estimator says so by @requires(needs=('values',)))",
        )


def _check_hints(config: Config, needs_hints: bool) -> None:
    name, cpo = config.algorithm.adv_estimator, config.algorithm.cpo
    require(
        not needs_hints or cpo is not None,
        "algorithm.cpo",
        cpo,
        f"algorithm.adv_estimator={name} needs hints; write `cpo: {{}}`",
    )
    require(
        needs_hints or cpo is None,
        "algorithm.cpo",
        "a section",
        f"algorithm.adv_estimator={name} takes no hints; write null, or set adv_estimator=cpo",
    )
    if cpo is not None:
        load_hint(cpo)


def _check_loss(config: Config) -> None:
    options = loss_options(config.actor)
    name, correction = config.actor.policy_loss.loss_mode, config.algorithm.rollout_correction
    there = {
        "ref_logprobs": (config.ref is not None, "write `ref: {}`"),
        "rollout_is_weights": (
            correction is not None and correction.rollout_is is not None,
            "set algorithm.rollout_correction.rollout_is",
        ),
    }
    for field in requirements(POLICY_LOSSES.find(name)).needs:
        given, remedy = there.get(field, (True, ""))
        require(given, "actor.policy_loss.loss_mode", name, f"it needs {field}; {remedy}")
    if not POLICY_LOSSES.find(name).__module__.startswith("minirl."):
        return  # a user's may count its calls
    one = torch.ones(1)
    inputs = LossInputs(
        logprobs=-one,
        old_logprobs=-one,
        advantages=one,
        response_mask=one,
        rollout_logprobs=-one,
        ref_logprobs=-one,
        rollout_is_weights=one,
        sequence_ids=torch.zeros(1, dtype=torch.int64),
    )
    try:
        policy_loss(name, inputs, **options)
    except ValueError as error:
        raise ConfigError(f"actor.policy_loss: {error}") from error


def _check_kl(config: Config) -> None:
    one = torch.zeros(1)
    for key, kind in (
        ("actor.kl_loss_type", config.actor.kl_loss_type),
        ("algorithm.kl_penalty", config.algorithm.kl_penalty),
    ):
        try:
            kl_estimate(one, one, kind)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    try:
        make_kl_controller(config.algorithm)
    except ValueError as error:
        raise ConfigError(f"algorithm.kl_ctrl: {error}") from error


def _check_correction(config: Config, needed: Requirements) -> None:
    correction = config.algorithm.rollout_correction
    if correction is None:
        return
    one = torch.ones(1, 1)
    try:
        rollout_correction(-one, -one, one, **correction_options(correction))
    except ValueError as error:
        raise ConfigError(f"algorithm.rollout_correction: {error}") from error
    require(
        not (correction.bypass_mode and "logprob_stats" in needed.needs),
        "algorithm.rollout_correction.bypass_mode",
        True,
        f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs the pass that it saves; "
        "write false",
    )


def _check_tail(config: Config, needed: Requirements) -> None:
    correction = config.algorithm.rollout_correction
    for refused, reason in (
        (not needs_old_logprobs(config), "one optimizer step on the whole batch needs no pass"),
        (bool(correction and correction.bypass_mode), "bypass_mode needs no pass"),
        ("logprob_stats" in needed.needs, "the estimator asks for more than log-probabilities"),
        (config.algorithm.filter_groups is not None, "filter_groups may draw another batch"),
        (config.actor.offload == "all", "actor.offload=all has the weights in host memory then"),
    ):
        require(
            not (config.actor.logprobs_in_tail and refused),
            "actor.logprobs_in_tail",
            True,
            f"{reason}; write false",
        )


def _check_deterministic(config: Config) -> None:
    require(
        config.rollout.seeded_sampling or not config.trainer.deterministic,
        "rollout.seeded_sampling",
        False,
        "without a seed of its own no answer can be repeated; leave it out, or write "
        "trainer.deterministic=false",
    )
    for key, value in (
        ("rollout.over_sample_rate", config.rollout.over_sample_rate),
        ("actor.logprobs_in_tail", config.actor.logprobs_in_tail),
    ):
        require(
            not (config.trainer.deterministic and value),
            key,
            value,
            "what ends first is then computed otherwise, so nothing can be repeated; leave it out, "
            "or write trainer.deterministic=false",
        )
