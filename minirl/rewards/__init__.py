"""From a finished trajectory to its reward."""

from minirl.rewards.functions import SCORERS, RewardFunction, load_reward_function
from minirl.rewards.managers import (
    REWARD_MANAGERS,
    DapoRewardManager,
    NaiveRewardManager,
    RewardManager,
    load_reward_manager,
    reward_number,
    token_rewards,
)

__all__ = [
    "REWARD_MANAGERS",
    "SCORERS",
    "DapoRewardManager",
    "NaiveRewardManager",
    "RewardFunction",
    "RewardManager",
    "load_reward_function",
    "load_reward_manager",
    "reward_number",
    "token_rewards",
]
