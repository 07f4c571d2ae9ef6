"""A simulated user: what answers the policy when it calls no tool."""

import asyncio
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.entries import load_entries, locate_class
from minirl.registry import nearest, require_methods
from minirl.tools.session import RELEASE_TIMEOUT_S
from minirl.types import RewardRecord, Trajectory
from minirl.waits import WAITS

Messages = list[dict[str, Any]]


class Interaction(ABC):
    """Subclass it; one object serves all conversations, told apart by `instance_id`.

    Per conversation: `start` once, `generate_response` after every turn that calls no tool,
    `finalize` always. What it says becomes observation tokens, which do not train.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start(self, instance_id: str | None = None, **interaction_kwargs: Any) -> str:
        """Prepare one conversation and return its id; `interaction_kwargs` are the row's."""
        return instance_id or uuid.uuid4().hex

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: Messages, **interaction_kwargs: Any
    ) -> tuple[str, bool, float]:
        """(what the user says, whether the conversation is over, reward of the turn before).

        `messages` is the conversation so far, the policy's turn last. When it is over, what the
        user says is not appended.
        """

    async def finalize(self, instance_id: str, **interaction_kwargs: Any) -> None:  # noqa: B027
        """Drop the state of one conversation; for as long as a tool's release may take (10 s)."""


@dataclass(frozen=True)
class User:
    """The interaction of one conversation."""

    interaction: Interaction
    instance_id: str
    kwargs: Mapping[str, Any]

    async def answer(self, trajectory: Trajectory) -> Messages:
        """What the user says to the last turn, as messages to append: none when it is over."""
        start = time.perf_counter()
        with WAITS.on("the simulated user"):
            text, done, reward = await self.interaction.generate_response(
                self.instance_id, list(trajectory.messages), **self.kwargs
            )
        if not math.isfinite(reward):  # it would reach every advantage of the step
            raise ValueError(f"generate_response() returned the reward {reward}")
        trajectory.turn_rewards[-1] += float(reward)
        end = time.perf_counter()
        record = RewardRecord(name="user", value=float(reward), start=start, end=end)
        trajectory.rewards.append(record)
        return [] if done else [{"role": "user", "content": text}]


@asynccontextmanager
async def simulated_user(
    interactions: Mapping[str, Interaction], row: Mapping[str, Any]
) -> AsyncIterator[User | None]:
    """The user of `extra_info.interaction_kwargs.name`, if any: started, in the end finalized."""
    kwargs = dict((row.get("extra_info") or {}).get("interaction_kwargs") or {})
    name = kwargs.pop("name", None)
    if name is None:
        yield None
        return
    check_interaction(name, interactions)
    interaction = interactions[name]
    with WAITS.on("the simulated user to start"):
        instance_id = await interaction.start(**kwargs)
    try:
        yield User(interaction, instance_id, kwargs)
    finally:
        with WAITS.on("the simulated user to finalize"):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):  # the trajectory's may be over already
                await interaction.finalize(instance_id, **kwargs)


def check_interaction(name: str, interactions: Mapping[str, Interaction]) -> None:
    """ValueError for a name that rollout.multi_turn.interaction_config_path does not have."""
    if name not in interactions:
        raise ValueError(
            f"no interaction {name!r} in rollout.multi_turn.interaction_config_path"
            f"{nearest(name, interactions)}"
        )


def load_interactions(path: str | Path) -> dict[str, Interaction]:
    """Build those of a file `interaction: [{name, class_name, config}]`, by name.

    ConfigError names the file, the entry, and what is wrong with it.
    """
    return load_entries(path, "interaction", _build)


def _build(entry: dict[str, Any]) -> Iterator[tuple[str, Interaction]]:
    found = locate_class(entry, "interaction", ("name", "class_name", "config"))
    if not isinstance(entry.get("name"), str):
        raise ValueError("name: missing; rows choose by extra_info.interaction_kwargs.name")
    if not (isinstance(found, type) and issubclass(found, Interaction)):
        raise ValueError(f"class_name: {entry['class_name']!r} is not an Interaction class")
    require_methods(found)
    yield entry["name"], found(entry.get("config") or {})
