"""What the user gives: read and checked on rank 0 in seconds, before an engine starts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from minirl.agent_loop.base import AGENT_LOOPS, load_agent_loops
from minirl.agent_loop.tool_parser import TOOL_PARSERS
from minirl.chat import ChatBuilder, ChatTemplateError
from minirl.checks import check_algorithms
from minirl.config import Config, ConfigError
from minirl.data import Row, filter_overlong, load_rows
from minirl.registry import Registry
from minirl.rewards import REWARD_MANAGERS, load_reward_manager
from minirl.rollout.server import SERVERS
from minirl.rollout.vllm_server import check_vllm
from minirl.tools import BaseTool, load_tools
from minirl.tracking import TRACKERS
from minirl.trainer.policy import check_config


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Checked and ready."""

    tokenizer: Any
    chat: ChatBuilder
    tools: dict[str, BaseTool]
    reward_manager: Any
    train_rows: list[Row]
    val_rows: list[Row]


def read_inputs(config: Config, *, training: bool = True) -> Inputs:
    """Read everything that the config names.

    Raises:
        ConfigError: place, value and remedy of the first thing that cannot be used.
    """
    check_vllm()
    check_config(config)
    _check_names(config)
    if training:
        check_algorithms(config)
    tools = load_tools(path) if (path := config.rollout.multi_turn.tool_config_path) else {}
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    chat = _certified_chat(config, tokenizer, tools)
    reward_manager = load_reward_manager(
        config.reward, response_length=config.rollout.response_length
    )
    read = partial(_read_rows, config, chat, tools)
    train_rows = read("data.train_files", config.data.train_files) if training else []
    val_rows = read("data.val_files", config.data.val_files) if config.data.val_files else []
    if training and len(train_rows) < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size: got {config.data.train_batch_size}, but data.train_files have "
            f"only {len(train_rows)} rows"
        )
    return Inputs(
        tokenizer=tokenizer,
        chat=chat,
        tools=tools,
        reward_manager=reward_manager,
        train_rows=train_rows,
        val_rows=val_rows,
    )


def _check_names(config: Config) -> None:
    """Every component that the config names exists and takes the options it is given."""
    if path := config.rollout.agent.agent_loop_config_path:
        load_agent_loops(path)
    agent = config.rollout.agent.default_agent_loop
    named: list[tuple[str, Registry[Any], str, dict[str, Any]]] = [
        ("rollout.name", SERVERS, config.rollout.name, {}),
        ("rollout.agent.default_agent_loop", AGENT_LOOPS, agent, {}),
        ("rollout.multi_turn.format", TOOL_PARSERS, config.rollout.multi_turn.format, {}),
        ("reward.reward_manager", REWARD_MANAGERS, config.reward.reward_manager, {}),
        *[("trainer.logger", TRACKERS, name, {}) for name in config.trainer.logger],
    ]
    for key, registry, name, options in named:
        _named(key, registry.build, name, options)


def _named(key: str, find: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return find(*arguments)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _certified_chat(config: Config, tokenizer: Any, tools: dict[str, BaseTool]) -> ChatBuilder:
    schemas = [tool.tool_schema for tool in tools.values()] or None
    try:
        chat = ChatBuilder(tokenizer, chat_template=config.model.chat_template)
        if tools:
            chat.certify(schemas)
    except ChatTemplateError as error:
        key = "model.chat_template" if config.model.chat_template else "model.path"
        raise ConfigError(f"{key}: the chat template cannot be used: {error}") from error
    return chat


def _read_rows(
    config: Config, chat: ChatBuilder, tools: dict[str, BaseTool], key: str, files: list[str]
) -> list[Row]:
    if not files:
        raise ConfigError(f"{key}: got []; name at least one parquet or JSONL file")
    rows = load_rows(files)
    for number, row in enumerate(rows):
        if name := row.get("agent_name"):
            _named(f"{key}: row {number}, column agent_name", AGENT_LOOPS.find, name)
    schemas = [tool.tool_schema for tool in tools.values()] or None

    def count_tokens(row: Row) -> int:
        return len(chat.prompt(row["prompt"], schemas))

    return filter_overlong(
        rows,
        count_tokens,
        max_prompt_length=config.data.max_prompt_length,
        filter_overlong_prompts=config.data.filter_overlong_prompts,
        truncation=config.data.truncation,
    )
