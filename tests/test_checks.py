"""What does not fit together is refused at start, with the key, the value and the remedy."""

import pytest

from minirl.checks import check_algorithms
from minirl.config import Config, ConfigError, load_config


def load(*overrides: str) -> Config:
    return load_config(["model.path=m", *overrides])


REFUSED = [
    ("algorithm.adv_estimator=gae", r"algorithm\.adv_estimator: got 'gae'; .*write `critic: \{\}`"),
    ("critic={}", r"critic: got 'a section'; algorithm\.adv_estimator=grpo does not look at"),
    ("trainer.critic_warmup=3", r"trainer\.critic_warmup: got 3; there is no critic"),
    ("rollout.n=1", r"rollout\.n: got 1; algorithm\.adv_estimator=grpo compares"),
    (
        "rollout.n=1 & algorithm.adv_estimator=remax & algorithm.filter_groups={}",
        r"algorithm\.filter_groups: .*rollout\.n=1",
    ),
    ("algorithm.adv_estimator=cpo", r"algorithm\.cpo: got None; .*write `cpo: \{\}`"),
    ("algorithm.cpo={}", r"algorithm\.cpo: got 'a section'; .*takes no hints"),
    (
        "algorithm.adv_estimator=cpo & algorithm.cpo.hint_fn=x",
        r"algorithm\.cpo\.hint_fn: unknown hint function 'x'",
    ),
    ("algorithm.adv_estimator=grop", r"algorithm\.adv_estimator: .*did you mean 'grpo'"),
    (
        "algorithm.options={gama: 1}",
        r"algorithm\.adv_estimator: advantage estimator 'grpo' has no option 'gama'",
    ),
    ("actor.policy_loss.options={x: 1}", r"actor\.policy_loss: .*has no option 'x'"),
    ("actor.clip_ratio_c=1", r"actor\.policy_loss: clip_ratio_c: got 1\.0; must be greater than 1"),
    ("actor.policy_loss.loss_mode=gspo", r"set actor\.loss_agg_mode=seq-mean-token-mean"),
    ("actor.kl_loss_type=k9", r"actor\.kl_loss_type: unknown KL estimate 'k9'"),
    ("algorithm.kl_penalty=k9", r"algorithm\.kl_penalty: unknown KL estimate 'k9'"),
    ("algorithm.kl_ctrl.type=adaptiv", r"algorithm\.kl_ctrl: .*did you mean 'adaptive'"),
    ("algorithm.rollout_correction={rollout_rs: token_k7}", r"rollout_correction: rollout_rs"),
    (
        "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: '2_1'}",
        r"algorithm\.rollout_correction: rollout_is_threshold: got '2_1'",
    ),
    (
        "algorithm.rollout_correction={bypass_mode: true} & "
        "algorithm.adv_estimator=optimal_token_baseline",
        r"algorithm\.rollout_correction\.bypass_mode: got True; .*needs the pass",
    ),
    (
        "algorithm.rollout_correction={bypass_mode: true, rollout_is: token}",
        r"algorithm\.rollout_correction\.rollout_is: got 'token'; with bypass_mode",
    ),
    ("algorithm.use_kl_in_reward=true", r"ref: got null, but algorithm\.use_kl_in_reward=true"),
    ("actor.ppo_mini_batch_size=7", r"actor\.ppo_mini_batch_size: got 7; must divide"),
    ("critic.ppo_mini_batch_size=7", r"critic\.ppo_mini_batch_size: got 7; must divide"),
    ("rollout.top_k=5", r"rollout\.top_k: got 5; .*rollout\.allow_truncated_sampling=true"),
    ("rollout.min_p=0.1", r"rollout\.min_p: got 0\.1; .*rollout\.allow_truncated_sampling=true"),
    ("reward.overlong_buffer.len=5000", r"reward\.overlong_buffer\.len: got 5000; at most"),
    ("actor.logprobs_in_tail=true", r"actor\.logprobs_in_tail: got True; one optimizer step"),
    (
        "actor.logprobs_in_tail=true & actor.ppo_epochs=2 & algorithm.filter_groups={}",
        r"actor\.logprobs_in_tail: got True; filter_groups may draw",
    ),
    (
        "actor.logprobs_in_tail=true & actor.ppo_epochs=2 & actor.offload=all",
        r"actor\.logprobs_in_tail: got True; actor\.offload=all",
    ),
    (
        "actor.logprobs_in_tail=true & actor.ppo_epochs=2 & trainer.deterministic=true",
        r"actor\.logprobs_in_tail: got True; what ends first",
    ),
    (
        "rollout.over_sample_rate=0.5 & trainer.deterministic=true",
        r"rollout\.over_sample_rate: got 0\.5; what ends first",
    ),
    (
        "rollout.seeded_sampling=false & trainer.deterministic=true",
        r"rollout\.seeded_sampling: got False; without a seed of its own",
    ),
    ("rollout.over_sample_rate=-1", r"rollout\.over_sample_rate: got -1\.0; >= 0"),
    ("trainer.max_bad_steps=0", r"trainer\.max_bad_steps: got 0; must be greater than 0"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[o for o, _ in REFUSED])
def test_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_algorithms(load(*overrides.split(" & ")))


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=gae", "critic={}", "rollout.n=1", "trainer.critic_warmup=2"],
        ["algorithm.adv_estimator=cpo", "algorithm.cpo={}"],
        ["rollout.top_p=0.9", "rollout.allow_truncated_sampling=true"],
        ["algorithm.rollout_correction={rollout_is: sequence, rollout_is_threshold: '0.5_2'}"],
        ["algorithm.adv_estimator=remax", "rollout.n=1"],
        ["actor.policy_loss.loss_mode=clip_cov"],
    ],
    ids=str,
)
def test_what_fits_is_accepted(overrides: list[str]) -> None:
    assert refusal(load(*overrides)) is None


def refusal(config: Config) -> str | None:
    try:
        check_algorithms(config)
    except ConfigError as error:
        return str(error)
    return None
