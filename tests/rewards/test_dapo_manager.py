import pytest

from minirl.config import ConfigError, OverlongBufferConfig, RewardConfig, RewardModelConfig
from minirl.rewards import load_reward_manager, reward_number
from minirl.types import TokenOutput, Trajectory

ROW = {"data_source": "calculator", "reward_model": {"ground_truth": "4"}}


@pytest.mark.parametrize(
    ("length", "penalty"), [(10, 0.0), (60, 0.0), (70, 0.125), (80, 0.25), (100, 0.5)]
)
async def test_the_penalty_grows_from_the_buffer_to_the_limit(length, penalty):
    buffer = OverlongBufferConfig(len=40, penalty_factor=0.5)
    config = RewardConfig(reward_manager="dapo", overlong_buffer=buffer)
    manager = load_reward_manager(config, response_length=100)
    trajectory = Trajectory(prompt_ids=[0])
    ids = [1] * length
    output = TokenOutput(token_ids=ids, logprobs=[-1.0] * length, finish_reason="stop")
    trajectory.append_sampled(output)
    await manager(trajectory, ROW, "#### 4")
    assert trajectory.reward == pytest.approx(1 - penalty)
    assert trajectory.reward_breakdown == pytest.approx({"score": 1, "overlong_reward": -penalty})


async def test_without_a_buffer_it_is_naive():
    manager = load_reward_manager(RewardConfig(reward_manager="dapo"), response_length=100)
    trajectory = Trajectory(prompt_ids=[0])
    await manager(trajectory, ROW, "#### 4")
    assert trajectory.reward == 1


@pytest.mark.parametrize("model", [None, RewardModelConfig(path="m", combine="only")])
def test_a_buffer_that_nothing_reads_is_refused(model):
    config = RewardConfig(overlong_buffer=OverlongBufferConfig(), reward_model=model)
    with pytest.raises(ConfigError, match=r"reward\.overlong_buffer: reward_manager=naive has no"):
        load_reward_manager(config, response_length=100)


def test_numbers_by_name():
    trajectory = Trajectory(prompt_ids=[], reward=0.5, reward_breakdown={"acc": 1.0}, uid="0-7")
    assert (reward_number(trajectory, "reward"), reward_number(trajectory, "acc")) == (0.5, 1.0)
    with pytest.raises(
        ValueError, match=r"prompt '0-7' has no reward component 'ac'; did you mean"
    ):
        reward_number(trajectory, "ac")
