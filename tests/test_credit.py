import math
from dataclasses import replace

import pytest
import torch

from minirl import credit
from minirl.algorithms import AdaptiveKL, FixedKL
from minirl.config import Config, ModelConfig, RolloutCorrectionConfig
from minirl.curriculum import hard_groups
from minirl.rollout.manager import varied_groups
from minirl.types import Group, MicroBatch, TokenOutput, Trajectory

CONFIG = Config(model=ModelConfig(path="m"))


def answer(reward, num_tokens=2, **breakdown):
    trajectory = Trajectory(prompt_ids=[1], reward=reward, reward_breakdown=breakdown, uid="0-1")
    logprobs = [-1.0] * num_tokens
    trajectory.append_sampled(
        TokenOutput(token_ids=[2] * num_tokens, logprobs=logprobs, finish_reason="stop")
    )
    trajectory.termination = "stop"
    return trajectory


def batch_of(*groups) -> tuple[MicroBatch, list[Group]]:
    made = [Group(uid=str(i), row={}, trajectories=list(g)) for i, g in enumerate(groups)]
    for group in made:
        for index, trajectory in enumerate(group.trajectories):
            trajectory.sample_index = index
    batch = credit.pack_groups(made, CONFIG)
    batch.old_logprobs = batch.rollout_logprobs.clone()
    return batch, made


def test_groups_are_packed_and_masked_reasons_do_not_train():
    late = answer(1.0)
    late.termination = "timeout"
    batch, groups = batch_of([answer(0.5, 3), late], [answer(0.0)])
    assert batch.response_mask.tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert batch.token_rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 1, 0, 0, 0]
    assert batch.group_ids.tolist() == [0, 0, 1]
    other = credit.pack_groups(groups, CONFIG, [[[7, 8], [7]], [[]]])
    assert other.tokens.tolist() == [7, 8, 2, 2, 2, 7, 2, 2, 2, 2]
    assert other.prompt_lengths.tolist() == [2, 1, 0]


def test_without_a_section_the_mismatch_is_only_measured():
    batch, _ = batch_of([answer(1.0)])
    batch.old_logprobs = batch.rollout_logprobs + math.log(2) * batch.response_mask
    metrics = credit.correct_mismatch(batch, None)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(2), rel=1e-5)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(math.exp(-1), rel=1e-5)
    assert batch.rollout_is_weights is None and batch.response_mask.sum() == 2


def test_weights_and_rejection():
    batch, _ = batch_of([answer(1.0), answer(0.0)])
    batch.old_logprobs = batch.rollout_logprobs.clone()
    batch.old_logprobs[[1, 2]] += torch.tensor([math.log(1.5), math.log(8)])
    correction = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold=4.0,
        rollout_rs="token_k1",
        rollout_rs_threshold=5.0,
    )
    metrics = credit.correct_mismatch(batch, correction)
    assert metrics["training/logprob_diff_max/turn_1"] == pytest.approx(math.log(8))  # rejected
    assert batch.rollout_is_weights.tolist() == pytest.approx([0, 1.5, 4, 0, 1, 1])
    assert batch.response_mask.tolist() == [0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "rloo"])
def test_the_outcome_survives_the_rejection_of_its_token(name):
    batch, groups = batch_of([answer(1.0, 3), answer(0.0)], [answer(0.0), answer(0.5, 1)])
    assert batch.old_logprobs is not None
    batch.old_logprobs[[3, 11]] += 9  # the last token of the first, the only one of the last
    batch.values = torch.zeros(batch.num_tokens)
    for group in groups:
        group.greedy_reward = 0.0
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=5.0)
    credit.correct_mismatch(batch, correction)
    assert batch.response_mask.tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0]
    assert batch.token_rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0.5]
    advantages, _ = credit.estimate(batch, groups, replace(CONFIG.algorithm, adv_estimator=name))
    assert advantages[1] == advantages[2] > max(0, advantages[5])
    assert advantages[[3, 11]].eq(0).all()


def test_kl_comes_out_of_the_rewards_and_moves_the_controller():
    batch, _ = batch_of([answer(1.0, 1), answer(0.0, 3)])
    batch.ref_logprobs = batch.old_logprobs - torch.tensor([9, 0.2, math.nan, 0.1, 0.3, 0.8])
    controller = AdaptiveKL(kl_coef=0.5, target_kl=0.1, horizon=10)
    metrics = credit.penalize_kl(batch, controller, "k1")
    assert batch.token_rewards.tolist() == pytest.approx([0, 0.9, 0, -0.05, -0.15, -0.4])
    mean = (0.2 + (0.1 + 0.3 + 0.8) / 3) / 2  # sequences count alike, as in verl
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    batch.response_mask.zero_()
    assert credit.penalize_kl(batch, FixedKL(), "k1") == {}


def test_components_of_the_reward():
    _, groups = batch_of([answer(1.0, a=0.5, b=0.25), answer(0.0, a=1.0, b=0.75)])
    assert {k: v.tolist() for k, v in credit.reward_components(groups).items()} == {
        "a": [0.5, 1.0],
        "b": [0.25, 0.75],
    }
    assert list(credit.reward_components(groups, ["b", "reward"])) == ["b", "reward"]
    groups[0].trajectories[0].reward_breakdown["tool/calculator"] = 0.5  # the other called none
    assert list(credit.reward_components(groups)) == ["a", "b"]
    del groups[0].trajectories[1].reward_breakdown["a"]
    with pytest.raises(
        ValueError, match="trajectory 1 of prompt '0-1' has no reward component 'a'"
    ):
        credit.reward_components(groups)


def test_hard_groups_by_their_mean_success():
    batch, _ = batch_of([answer(1.0), answer(0.0)], [answer(0.0), answer(0.0)], [answer(0.2)])
    assert hard_groups(batch, 0.5) == [1, 2]
    assert hard_groups(batch, 0.9) == [1]
    late = answer(0.0)
    late.termination = "timeout"
    assert hard_groups(batch_of([answer(1.0), answer(1.0), late], [late])[0], 0.5) == []


def test_only_answers_that_train_make_a_group_varied():
    late = answer(0.0)
    late.termination = "timeout"
    batch, groups = batch_of([answer(1.0), answer(1.0), late], [answer(1.0), answer(0.0), late])
    advantages, _ = credit.estimate(batch, groups, CONFIG.algorithm)
    carry_signal = batch.group_ids[batch.sequence_ids[advantages != 0]].unique().tolist()
    varied = varied_groups(groups, "reward", CONFIG.rollout.mask_terminations)
    assert [group.uid for group in varied] == ["1"] and carry_signal == [1]


def test_what_is_not_finite_is_found_by_sequence():
    batch, _ = batch_of([answer(1.0), answer(0.0)], [answer(0.5)])
    batch.advantages, batch.returns = torch.zeros(9), torch.zeros(9)
    assert credit.broken_sequences(batch) == []
    batch.advantages[4], batch.returns[8] = math.inf, math.nan
    assert credit.broken_sequences(batch) == [1, 2]


def test_metrics_of_values_and_returns():
    batch, _ = batch_of([answer(1.0), answer(0.0)])
    batch.advantages = batch.response_mask * 2
    batch.returns = torch.tensor([0, 1.0, 1.0, 0, 0, 0])
    batch.values = torch.tensor([5, 0.5, 0.5, 5, 0, 0])
    metrics = credit.batch_metrics(batch)
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75)
    assert metrics["critic/values/max"] == 0.5 and metrics["critic/advantages/min"] == 2
    batch.returns = torch.ones(6)
    assert "critic/vf_explained_var" not in credit.batch_metrics(batch)
