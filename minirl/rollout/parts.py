"""What agent loops are made of, apart from engines: the same in rank 0 and in worker processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from minirl.agent_loop import (
    AGENT_LOOPS,
    AgentLoopContext,
    Interaction,
    Server,
    load_agent_loops,
    load_interactions,
)
from minirl.agent_loop.base import AgentLoopFactory, require_agent_loop
from minirl.chat import ChatBuilder, ChatTemplateError, certify
from minirl.config import AgentConfig, Config, ConfigError, ModelConfig, require
from minirl.openai.endpoint import PolicyEndpoint
from minirl.rewards import RewardManager, load_reward_manager
from minirl.rollout.client import AsyncLLMServerManager, Generator
from minirl.rollout.worker import AgentLoopWorker
from minirl.tools import BaseTool, load_tools


@dataclass(frozen=True, kw_only=True)
class AgentParts:
    """Checked and ready."""

    tokenizer: Any
    chat: ChatBuilder
    tools: dict[str, BaseTool]
    agent_loops: dict[str, AgentLoopFactory]
    """Of rollout.agent.agent_loop_config_path."""
    interactions: dict[str, Interaction]
    """Of rollout.multi_turn.interaction_config_path."""
    reward_manager: RewardManager

    def make_worker(self, config: Config, server: Server) -> AgentLoopWorker:
        """Runs agent loops made of these."""
        context = AgentLoopContext(
            server=server,
            tokenizer=self.tokenizer,
            chat=self.chat,
            tools=self.tools,
            config=config,
            agent_loops=self.agent_loops,
            interactions=self.interactions,
        )
        context.endpoint = PolicyEndpoint(context)
        return AgentLoopWorker(config.rollout, context, self.reward_manager)


def load_parts(config: Config) -> AgentParts:
    """Make everything that the config names.

    Raises:
        ConfigError: place, value and remedy of the first thing that cannot be used.
    """
    agent, multi_turn = config.rollout.agent, config.rollout.multi_turn
    reward_manager = load_reward_manager(
        config.reward, response_length=config.rollout.response_length
    )
    agent_loops = load_agent_loops(path) if (path := agent.agent_loop_config_path) else {}
    check_agent_loop("rollout.agent.default_agent_loop", agent.default_agent_loop, agent_loops)
    tools = load_tools(path) if (path := multi_turn.tool_config_path) else {}
    interactions = load_interactions(path) if (path := multi_turn.interaction_config_path) else {}
    tokenizer = _load_tokenizer(config.model)
    return AgentParts(
        tokenizer=tokenizer,
        chat=_certified_chat(config, tokenizer, tools, bool(interactions)),
        tools=tools,
        agent_loops=agent_loops,
        interactions=interactions,
        reward_manager=reward_manager,
    )


def make_router(
    config: AgentConfig, servers: Sequence[Generator], *, first_server: int = 0
) -> AsyncLLMServerManager:
    """Routes to `servers` as rollout.agent says."""
    return AsyncLLMServerManager(
        servers,
        max_sticky_sessions=config.max_sticky_sessions,
        sticky_imbalance=config.sticky_imbalance,
        first_server=first_server,
    )


def named(key: str, find: Callable[..., Any], *arguments: Any) -> Any:
    """`find(*arguments)`; ConfigError that begins with `key` when that raises."""
    try:
        return find(*arguments)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_agent_loop(key: str, name: str, agent_loops: dict[str, AgentLoopFactory]) -> None:
    """ConfigError when there is no agent loop of that name, or it cannot run."""
    if name not in agent_loops:
        found = named(key, AGENT_LOOPS.find, name)
        named(key, require_agent_loop, repr(name), found)


def schemas(tools: dict[str, BaseTool]) -> list[dict[str, Any]] | None:
    """What the chat template is given."""
    return [tool.tool_schema for tool in tools.values()] or None


def _load_tokenizer(model: ModelConfig) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path: the tokenizer of {model.path!r} cannot be read: {reason}"
        ) from error
    # transformers makes an empty one where the folder has no files of a tokenizer
    remedy = "which has no tokenizer; save it there with save_pretrained"
    require(bool(tokenizer.encode("a")), "model.path", model.path, remedy)
    return tokenizer


def _certified_chat(
    config: Config, tokenizer: Any, tools: dict[str, BaseTool], has_users: bool
) -> ChatBuilder:
    try:
        chat = ChatBuilder(tokenizer, chat_template=config.model.chat_template)
        if tools or has_users:
            certify(chat, schemas(tools), with_results=bool(tools))
    except ChatTemplateError as error:
        key = "model.chat_template" if config.model.chat_template else "model.path"
        raise ConfigError(f"{key}: the chat template cannot be used: {error}") from error
    return chat
