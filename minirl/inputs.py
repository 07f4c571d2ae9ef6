"""What the user gives: read and checked on rank 0 in seconds, before an engine starts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from minirl.agent_loop import (
    AGENT_LOOPS,
    TOOL_PARSERS,
    Interaction,
    load_agent_loops,
    load_interactions,
)
from minirl.agent_loop.base import AgentLoopFactory
from minirl.agent_loop.interaction import check_interaction
from minirl.chat import ChatBuilder, ChatTemplateError
from minirl.checks import check_algorithms
from minirl.config import Config, ConfigError, ModelConfig, require
from minirl.data import Row, filter_overlong, load_rows
from minirl.rewards import SCORERS, RewardManager, load_reward_manager
from minirl.rollout.modes import MODES
from minirl.rollout.server import SERVERS
from minirl.rollout.transformers_server import check_transformers
from minirl.rollout.vllm_server import check_vllm
from minirl.tools import BaseTool, load_tools
from minirl.tracking import check_trackers
from minirl.trainer.policy import check_config


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Checked and ready."""

    tokenizer: Any
    chat: ChatBuilder
    tools: dict[str, BaseTool]
    agent_loops: dict[str, AgentLoopFactory]
    interactions: dict[str, Interaction]
    """Of rollout.agent.agent_loop_config_path."""
    reward_manager: RewardManager
    train_rows: list[Row]
    val_rows: list[Row]


def read_inputs(config: Config, *, training: bool = True) -> Inputs:
    """Read everything that the config names.

    Raises:
        ConfigError: place, value and remedy of the first thing that cannot be used.
    """
    agent, files = config.rollout.agent, config.data
    _check_names(config)
    check_config(config)
    if training:
        check_algorithms(config)
    reward_manager = load_reward_manager(
        config.reward, response_length=config.rollout.response_length
    )
    agent_loops = load_agent_loops(path) if (path := agent.agent_loop_config_path) else {}
    _check_agent_loop("rollout.agent.default_agent_loop", agent.default_agent_loop, agent_loops)
    tools = load_tools(path) if (path := config.rollout.multi_turn.tool_config_path) else {}
    interactions = (
        load_interactions(path)
        if (path := config.rollout.multi_turn.interaction_config_path)
        else {}
    )
    tokenizer = _load_tokenizer(config.model)
    chat = _certified_chat(config, tokenizer, tools)
    read = partial(_read_rows, config, chat, tools, agent_loops, interactions)
    train_rows = read("data.train_files", files.train_files) if training else []
    need_val = files.val_files or not training
    val_rows = read("data.val_files", files.val_files) if need_val else []
    require(
        not training or len(train_rows) >= files.train_batch_size,
        "data.train_batch_size",
        files.train_batch_size,
        f"data.train_files have only {len(train_rows)} rows that can be used",
    )
    return Inputs(
        tokenizer=tokenizer,
        chat=chat,
        tools=tools,
        agent_loops=agent_loops,
        interactions=interactions,
        reward_manager=reward_manager,
        train_rows=train_rows,
        val_rows=val_rows,
    )


def _check_names(config: Config) -> None:
    """Every component that the config names exists; check_algorithms looks at the algorithm's."""
    _named("rollout.name", SERVERS.find, config.rollout.name)
    if config.rollout.name == "vllm":
        check_vllm()
    if config.rollout.name == "transformers":
        check_transformers(config.rollout)
    _named("rollout.mode", MODES.find, config.rollout.mode)
    _named("rollout.multi_turn.format", TOOL_PARSERS.find, config.rollout.multi_turn.format)
    check_trackers(config.trainer.logger)


def _named(key: str, find: Callable[..., Any], *arguments: Any) -> None:
    try:
        find(*arguments)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_agent_loop(key: str, name: str, agent_loops: dict[str, AgentLoopFactory]) -> None:
    if name not in agent_loops:
        _named(key, AGENT_LOOPS.find, name)


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


def _certified_chat(config: Config, tokenizer: Any, tools: dict[str, BaseTool]) -> ChatBuilder:
    try:
        chat = ChatBuilder(tokenizer, chat_template=config.model.chat_template)
        if tools:
            chat.certify(_schemas(tools))
    except ChatTemplateError as error:
        key = "model.chat_template" if config.model.chat_template else "model.path"
        raise ConfigError(f"{key}: the chat template cannot be used: {error}") from error
    return chat


def _schemas(tools: dict[str, BaseTool]) -> list[dict[str, Any]] | None:
    return [tool.tool_schema for tool in tools.values()] or None


def _read_rows(
    config: Config,
    chat: ChatBuilder,
    tools: dict[str, BaseTool],
    agent_loops: dict[str, AgentLoopFactory],
    interactions: dict[str, Interaction],
    key: str,
    files: list[str],
) -> list[Row]:
    require(bool(files), key, files, "name at least one .parquet or .jsonl file")
    rows = []
    for file in files:
        for number, row in enumerate(load_rows([file])):
            place = f"{file}: row {number}, column"
            if name := row.get("agent_name"):
                _check_agent_loop(f"{place} agent_name", name, agent_loops)
            user = ((row.get("extra_info") or {}).get("interaction_kwargs") or {}).get("name")
            if user is not None:
                column = f"{place} extra_info.interaction_kwargs.name"
                _named(column, check_interaction, user, interactions)
            if config.reward.custom_reward_function is None:
                _named(f"{place} data_source", SCORERS.find, row.get("data_source") or "")
            rows.append(row)

    def count_tokens(row: Row) -> int:
        try:
            return len(chat.prompt(row["prompt"], _schemas(tools)))
        except ChatTemplateError as error:
            problem = f"prompt {row['prompt']!r} cannot be rendered: {error}"
            raise ConfigError(f"{key}: {problem}") from error

    return filter_overlong(
        rows,
        count_tokens,
        max_prompt_length=config.data.max_prompt_length,
        filter_overlong_prompts=config.data.filter_overlong_prompts,
        truncation=config.data.truncation,
        place=key,
    )
