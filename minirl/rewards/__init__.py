"""From a finished trajectory to its reward."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirl.rewards.batch import BatchRewardManager
    from minirl.rewards.functions import SCORERS, RewardFunction, load_reward_function
    from minirl.rewards.load import load_reward_manager
    from minirl.rewards.managers import (
        REWARD_MANAGERS,
        DapoRewardManager,
        NaiveRewardManager,
        RewardManager,
        reward_number,
        token_rewards,
    )
    from minirl.rewards.prime import PrimeRewardManager

__all__ = [
    "REWARD_MANAGERS",
    "SCORERS",
    "BatchRewardManager",
    "DapoRewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RewardFunction",
    "RewardManager",
    "load_reward_function",
    "load_reward_manager",
    "reward_number",
    "token_rewards",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that a reward function in a process of its own can have
    `minirl.rewards.gsm8k` without torch."""
    if name in __all__:
        import_module("minirl.rewards.load")  # all managers are registered
        for module in ("functions", "managers", "batch", "prime", "load"):
            found = vars(import_module(f"minirl.rewards.{module}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
