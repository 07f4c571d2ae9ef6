import json

import pytest

from minirl.config import ConfigError, RewardConfig
from minirl.rewards import NaiveRewardManager, load_reward_manager, token_rewards
from minirl.types import TokenOutput, ToolCallRecord, Trajectory

ROW = {
    "data_source": "calculator",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": None,
}


def returns(value):
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return value

    return NaiveRewardManager(compute_score)


def conversation(*turns):
    """Turns of the given lengths with observations of two tokens between them."""
    trajectory = Trajectory(prompt_ids=[0])
    for number, (length, reward) in enumerate(turns):
        if number:
            trajectory.append_observation([9, 9])
        ids = [1] * length
        trajectory.append_sampled(
            TokenOutput(token_ids=ids, logprobs=[-1.0] * length, finish_reason="stop")
        )
        trajectory.turn_rewards[-1] = reward
    return trajectory


async def test_naive_manager_scores_by_the_row():
    manager = load_reward_manager(
        RewardConfig(reward_kwargs={"format_score": 0.1}), response_length=100
    )
    right, wrong = Trajectory(prompt_ids=[]), Trajectory(prompt_ids=[])
    await manager(right, ROW, "2 + 2\n#### 4")
    await manager(wrong, ROW, "#### 5")
    assert (right.reward, wrong.reward) == (1.0, 0.1)


async def test_a_mapping_is_a_score_and_numbers_to_log():
    trajectory = Trajectory(prompt_ids=[], reward_breakdown={"tool/a": 1.0})
    result = {"score": 1, "acc": True, "length": 3, "pred": 4, "note": "x", "none": None}
    await returns(result)(trajectory, ROW, "")
    assert trajectory.reward == 1.0
    assert trajectory.reward_breakdown == {"tool/a": 1.0, "acc": 1.0, "length": 3.0}
    assert trajectory.answer == "4"


async def test_an_answer_that_could_not_be_written_is_kept_as_text():
    trajectory = Trajectory(prompt_ids=[])
    await returns({"score": 1, "pred": json.loads(r'"a\ud83d"')})(trajectory, ROW, "")
    assert trajectory.answer == "a?"


async def test_the_reward_function_sees_facts_of_the_trajectory():
    seen = {}

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.update(extra_info)
        return 0.0

    trajectory = conversation((2, 0.0), (3, 0.0))
    trajectory.tool_calls = [
        ToolCallRecord(turn=0, name="x", arguments="", result="", status=status)
        for status in ("ok", "malformed", "ok", "timeout")
    ]
    row = {**ROW, "extra_info": {"index": 7, "num_turns": "the row's"}}
    await NaiveRewardManager(compute_score)(trajectory, row, "")
    assert seen == {"index": 7, "num_turns": 2, "num_tool_calls": 2, "response_length": 7}
    assert row["extra_info"] == {"index": 7, "num_turns": "the row's"}


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        {"acc": 1},
        float("nan"),
        {"score": float("inf")},
        {"score": 1.0, "acc": float("nan")},  # validation counts it
        {"score": 1.0, "acc": 100},
    ],
)
async def test_what_is_no_score_is_refused(value):
    trajectory = Trajectory(prompt_ids=[])
    with pytest.raises(ValueError, match="the reward function returned"):
        await returns(value)(trajectory, ROW, "")
    assert trajectory.reward is None


def test_unknown_manager():
    with pytest.raises(ConfigError, match=r"reward.reward_manager: .*did you mean 'naive'"):
        load_reward_manager(RewardConfig(reward_manager="naiv"), response_length=100)


@pytest.mark.parametrize(
    ("tool_reward", "expected"),
    [
        ("turn", [0, 0.5, 0, 0, -1, 0, 0, 0, 0, 2.25]),
        ("outcome", [0, 0, 0, 0, 0, 0, 0, 0, 0, 1.75]),
        ("log", [0, 0, 0, 0, 0, 0, 0, 0, 0, 2]),
    ],
)
def test_where_rewards_of_tools_go(tool_reward, expected):
    trajectory = conversation((2, 0.5), (1, -1.0), (3, 0.25))
    trajectory.reward = 2.0
    assert token_rewards(trajectory, tool_reward) == expected
    sampled = zip(expected, trajectory.response_mask, strict=True)
    assert all(mask == 1 for reward, mask in sampled if reward)


def test_token_rewards_without_a_response_or_a_reward():
    empty = Trajectory(prompt_ids=[1, 2], reward=0.0)
    assert token_rewards(empty, "turn") == []
    with pytest.raises(ValueError, match="has no reward"):
        token_rewards(conversation((2, 0.0)), "turn")
