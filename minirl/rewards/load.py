"""The reward manager that a config names."""

from collections.abc import Mapping
from typing import Any

from minirl.config import ConfigError, RewardConfig
from minirl.registry import option_names
from minirl.rewards import batch, prime  # noqa: F401  # they register themselves
from minirl.rewards.functions import load_reward_function
from minirl.rewards.managers import REWARD_MANAGERS, RewardManager
from minirl.types import Trajectory


async def left_to_the_model(
    trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
) -> None:
    """The manager of reward.reward_model.combine=only: the reward comes behind the rollout."""


OWNERS = {"overlong_buffer": "dapo", "batch": "batch", "pool": "prime"}
"""Sections of `reward` that one manager reads, and which does."""


def load_reward_manager(config: RewardConfig, *, response_length: int) -> RewardManager:
    """The manager of reward.reward_manager, with its reward function; ConfigError names the key.

    `response_length` is the limit in tokens (rollout.response_length).
    """
    try:
        manager = REWARD_MANAGERS.find(config.reward_manager)
    except ValueError as error:
        raise ConfigError(f"reward.reward_manager: {error}") from error
    known = option_names(manager)
    given = {
        "overlong_buffer": config.overlong_buffer,
        "batch": config.batch,
        "pool": config.pool,
        "custom_reward_function": config.custom_reward_function,
        "reward_kwargs": config.reward_kwargs,
        "response_length": response_length,
    }
    for section, owner in OWNERS.items():
        if given[section] is not None and section not in known:
            raise ConfigError(
                f"reward.{section}: reward_manager={config.reward_manager} has no such option; "
                f"set reward.reward_manager={owner}, or reward.{section}=null"
            )
    if config.is_model_only:
        return left_to_the_model
    options = {name: value for name, value in given.items() if name in known}
    function = load_reward_function(config)
    try:
        return manager(function, **options)
    except ConfigError:
        raise
    except Exception as error:  # of the user's class, whatever it is
        problem = f"{config.reward_manager!r}: {type(error).__name__}: {error}"
        raise ConfigError(f"reward.reward_manager: {problem}") from error
