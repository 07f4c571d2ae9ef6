"""The agent loop of agents that speak OpenAI's protocol."""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from minirl.agent_loop.base import (
    AgentLoopBase,
    AgentLoopContext,
    AgentLoopOutput,
    ServerError,
)
from minirl.openai.conversation import Conversation
from minirl.openai.endpoint import Access
from minirl.registry import locate
from minirl.rewards.managers import record_score
from minirl.tools.threads import run_function

logger = logging.getLogger(__name__)

GIVEN = ("base_url", "api_key", "model", "row")


class OpenAIAgentLoop(AgentLoopBase):
    """Lets `agent` (`package.module:function`) hold the conversation, over an OpenAI endpoint.

    It is called as `await agent(base_url=..., api_key=..., model=..., row=...)`; a plain function
    runs in a thread. `row` holds the columns of the dataset row. A number that it returns, or a
    mapping with `score`, is the reward; else the run's reward function is asked. An exception fails
    the trajectory, unless a limit of the run refused the latest request or cut its answer: then the
    trajectory ended for that.
    """

    def __init__(self, context: AgentLoopContext, *, agent: str) -> None:
        super().__init__(context)
        self._agent = load_agent(agent)

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """ValueError when the agent cannot be called, or there is nothing to serve HTTP with."""
        if "agent" not in options:
            raise ValueError("agent: missing; write package.module:function")
        load_agent(options["agent"])
        if importlib.util.find_spec("aiohttp") is None:
            raise ValueError("it needs aiohttp: pip install 'minirl[openai]'")

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Call the agent with the row, and return the trajectories of its requests."""
        conversation = Conversation(self, sampling_params)
        async with self.context.endpoint.serving(conversation) as access:
            result = await self._call(conversation, access, row)
        trajectories = conversation.finish()
        if trajectories[-1].num_turns and _is_reward(result):
            record_score(trajectories[-1], result)
        return trajectories

    async def _call(self, conversation: Conversation, access: Access, row: dict[str, Any]) -> Any:
        given = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        try:
            return await conversation.run(run_function(self._agent, **given, row=row))
        except ServerError:
            raise
        except Exception:
            if conversation.limit is None:
                raise
            logger.info("the agent gave up at the limit %s", conversation.limit, exc_info=True)


def load_agent(path: Any) -> Callable[..., Any]:
    """The function that `path` names; ValueError when it does not take what it is given."""
    if not isinstance(path, str):
        raise ValueError(f"agent: got {path!r}; write package.module:function")
    agent = locate(path, "agent")
    if not callable(agent):
        raise ValueError(f"agent: {path!r} is not a function")
    try:
        inspect.signature(agent).bind(**dict.fromkeys(GIVEN))
    except TypeError as error:
        words = f"it must take the keyword arguments {', '.join(GIVEN)}"
        raise ValueError(f"agent: {path!r}: {words}: {error}") from error
    return agent


def _is_reward(result: Any) -> bool:
    return isinstance(result, Mapping) or (
        hasattr(result, "__float__") and not isinstance(result, str)
    )
