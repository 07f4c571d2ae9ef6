"""Stretches of one conversation count as one member of their group."""

import pytest
import torch

from minirl.algorithms import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    compute_advantages,
    group_difficulty,
    requirements,
)

F64 = torch.float64
GROUP_ESTIMATORS = [
    name
    for name in ADV_ESTIMATORS
    if requirements(ADV_ESTIMATORS.find(name)).min_group_size > 1
    and "logprob_stats" not in requirements(ADV_ESTIMATORS.find(name)).needs
]
WHOLE = [(0, 0, 1.0, 6), (0, 1, 0.0, 2), (0, 2, 0.5, 3), (1, 3, 0.1, 2), (1, 4, 0.1, 4)]
CUT = [(0, 0, 1.0, 1), (0, 0, 1.0, 2), (0, 0, 1.0, 3), *WHOLE[1:4], *[(1, 4, 0.1, 1)] * 3]
CUT += [(1, 4, 0.1, 1)]
"""(group, conversation, reward, sampled tokens); in CUT the first and the last have stretches."""


def inputs_of(rows: list[tuple[int, int, float, int]], **more) -> AdvantageInputs:
    groups, samples, rewards, lengths = zip(*rows, strict=True)
    positions = torch.arange(6)
    ends = torch.tensor(lengths)[:, None]
    mask = (positions < ends).to(F64)
    rewards = torch.tensor(rewards, dtype=F64)
    fields = {
        "token_rewards": rewards[:, None] * (positions == ends - 1),
        "response_mask": mask,
        "group_ids": torch.tensor(groups),
        "sample_ids": torch.tensor(samples),
        "reward_components": {"score": rewards},
        "logprobs": torch.zeros_like(mask),
        "hinted_logprobs": torch.zeros_like(mask),
    }
    return AdvantageInputs(**{**fields, **more})


def by_conversation(name: str, rows: list[tuple[int, int, float, int]]) -> dict[int, float]:
    advantages, _ = compute_advantages(name, inputs_of(rows))
    result: dict[int, float] = {}
    for (_, sample, *_), value in zip(rows, advantages[:, 0].tolist(), strict=True):
        assert result.setdefault(sample, value) == value  # all stretches have the same
    return result


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_cutting_a_conversation_up_changes_no_advantage(name: str) -> None:
    whole = by_conversation(name, WHOLE)
    assert by_conversation(name, CUT) == pytest.approx(whole, abs=1e-12)
    assert whole[0] > 0
    uncounted = inputs_of(CUT, sample_ids=None)
    alone = compute_advantages(name, uncounted)[0][:, 0].tolist()
    if name != "opo":  # which weighs by tokens in any case
        assert alone[0] != pytest.approx(whole[0], abs=1e-3)


def test_equal_rewards_stay_exactly_without_advantage() -> None:
    """Whatever the rounding of a mean over three, four and one."""
    assert [by_conversation("grpo", CUT)[sample] for sample in (3, 4)] == [0.0, 0.0]


def test_rewards_of_turns_are_averaged_over_the_stretches() -> None:
    rows = [(0, 0, 1.0, 1), (0, 0, 2.0, 1), (0, 1, 0.0, 1)]
    assert by_conversation("rloo", rows) == {0: 1.5, 1: -1.5}


def test_a_stretch_that_does_not_train_does_not_count() -> None:
    """As one whose prompt was too long: it has no token, and no reward on one."""
    rows = [(0, 0, 1.0, 1), (0, 0, 0.0, 0), (0, 1, 0.0, 1)]
    advantages, _ = compute_advantages("rloo", inputs_of(rows))
    assert advantages[:, 0].tolist() == [1.0, 0.0, -1.0]


def test_difficulty_counts_conversations() -> None:
    rows = [(0, 0, 1.0, 1), (0, 0, 1.0, 1), (0, 0, 1.0, 1), (0, 1, 0.0, 1)]
    assert group_difficulty(inputs_of(rows)).tolist() == [0.5] * 4


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_baseline_per_position_weighs_the_stretches_of_a_conversation_as_one(name: str) -> None:
    rows = [(0, 0, 1.0, 1), (0, 0, 1.0, 1), (0, 1, 0.0, 1)]
    inputs = inputs_of(rows, logprob_stats=torch.ones(3, 6, dtype=F64))
    advantages, _ = compute_advantages(name, inputs)
    assert advantages[:, 0].tolist() == pytest.approx([0.5, 0.5, -0.5])


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([4, 1, 1], 4, [0.5, 0.75, 0.75, 0.75]),  # a third of the weight, and all of it
        ([4, 3], 1, [0.5, 1.0, 1.0, 1.0]),  # two stretches that are left are one conversation
    ],
)
def test_a_tail_is_what_one_conversation_has_for_itself(
    name: str, first: list[int], second: int, expected: list[float]
) -> None:
    rows = [*((0, 0, 1.0, length) for length in first), (0, 1, 0.0, second)]
    inputs = inputs_of(rows, logprob_stats=torch.ones(len(rows), 6, dtype=F64))
    advantages, _ = compute_advantages(name, inputs)
    assert advantages[0, :4].tolist() == pytest.approx(expected)
