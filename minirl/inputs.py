"""What the user gives: read and checked on rank 0 in seconds, before an engine starts."""

import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from minirl.agent_loop import AGENT_LOOPS, TOOL_PARSERS
from minirl.agent_loop.base import selected_tools
from minirl.agent_loop.interaction import check_interaction
from minirl.chat import ChatBuilder, ChatTemplateError
from minirl.checks import check_algorithms
from minirl.config import Config, ConfigError, require
from minirl.data import Row, filter_overlong, load_rows, prompt_loader
from minirl.rewards import REWARD_MANAGERS, SCORERS
from minirl.rewards.model import RewardModelInput, load_input
from minirl.rollout.modes import MODES
from minirl.rollout.parts import AgentParts, check_agent_loop, load_parts, named, schemas
from minirl.rollout.server import SERVERS
from minirl.rollout.sglang_server import check_sglang
from minirl.rollout.transformers_server import check_transformers
from minirl.rollout.vllm_server import check_vllm
from minirl.rollout.wire import to_wire
from minirl.tracing import check_traces
from minirl.tracking import check_trackers
from minirl.trainer.checkpoint_folder import check_checkpoints
from minirl.trainer.determinism import check_deterministic
from minirl.trainer.fsdp import check_model
from minirl.trainer.policy import check_config
from minirl.trainer.reward_model import check_reward_model


@dataclass(frozen=True, kw_only=True)
class Inputs(AgentParts):
    """Checked and ready."""

    train_rows: list[Row]
    val_rows: list[Row]
    reward_model_input: RewardModelInput | None
    modules: list[str]
    """In which the components are registered that config and rows name."""


def read_inputs(config: Config, *, training: bool = True) -> Inputs:
    """Read everything that the config names.

    Raises:
        ConfigError: place, value and remedy of the first thing that cannot be used.
    """
    files = config.data
    require(
        config.max_model_len > files.max_prompt_length,
        "rollout.max_model_len",
        config.max_model_len,
        f"a prompt of data.max_prompt_length={files.max_prompt_length} would leave no room for an "
        "answer; raise it, lower that, or write null",
    )
    _check_names(config)
    check_config(config)
    check_deterministic(config)
    going_on_from = None
    if training:
        check_algorithms(config)
        going_on_from = check_checkpoints(config)
    parts = load_parts(config)
    read = partial(_read_rows, config, parts)
    train_rows = read("data.train_files", files.train_files) if training else []
    need_val = files.val_files or not training
    val_rows = read("data.val_files", files.val_files) if need_val else []
    require(
        not training or len(train_rows) >= files.train_batch_size,
        "data.train_batch_size",
        files.train_batch_size,
        f"data.train_files have only {len(train_rows)} rows that can be used",
    )
    if going_on_from:
        prompt_loader(config, train_rows).load_state_dict(going_on_from["data"])
    loops = {row.get("agent_name") or config.rollout.agent.default_agent_loop for row in train_rows}
    multi_turn = config.rollout.multi_turn
    for key, unused, what in (
        ("tool_config_path", parts.tools, "calls no tool"),
        ("interaction_config_path", parts.interactions, "asks no user"),
    ):
        require(
            not unused or loops != {"single_turn_agent"},
            f"rollout.multi_turn.{key}",
            getattr(multi_turn, key),
            f"single_turn_agent, which answers all rows, {what}; set "
            "rollout.agent.default_agent_loop=tool_agent, or the rows' agent_name",
        )
    return Inputs(
        **vars(parts),
        reward_model_input=_reward_model_input(config, parts, train_rows + val_rows),
        train_rows=train_rows,
        val_rows=val_rows,
        modules=_modules(config, parts, train_rows + val_rows),
    )


def _check_names(config: Config) -> None:
    """Every component that the config names exists; check_algorithms looks at the algorithm's."""
    named("rollout.name", SERVERS.find, config.rollout.name)
    if config.rollout.name == "vllm":
        check_vllm()
    if config.rollout.name == "sglang":
        check_sglang(config)
    if config.rollout.name == "transformers":
        check_transformers(config.rollout)
    named("rollout.mode", MODES.find, config.rollout.mode)
    named("rollout.multi_turn.format", TOOL_PARSERS.find, config.rollout.multi_turn.format)
    check_trackers(config.trainer.logger)
    check_traces(config)


def _reward_model_input(
    config: Config, parts: AgentParts, rows: list[Row]
) -> RewardModelInput | None:
    """How the reward model reads conversations, tried out on the prompts of `rows`."""
    settings = config.reward.reward_model
    if settings is None:
        return None
    found = check_reward_model(config)
    reads = load_input(
        settings,
        parts.chat,
        found.get_text_config().vocab_size,
        trust_remote_code=config.model.trust_remote_code,
    )
    reads.check((row["prompt"] for row in rows), with_tools=bool(parts.tools))
    return reads


def _modules(config: Config, parts: AgentParts, rows: list[Row]) -> list[str]:
    """Which modules agent-loop workers must import to know every registered name in use.

    A module that was loaded from a file (reward.custom_reward_function.path) is loaded so there.
    """
    loops = {row.get("agent_name") or config.rollout.agent.default_agent_loop for row in rows}
    components: list[Any] = [AGENT_LOOPS.find(name) for name in loops - parts.agent_loops.keys()]
    components.append(TOOL_PARSERS.find(config.rollout.multi_turn.format))
    components.append(REWARD_MANAGERS.find(config.reward.reward_manager))
    if config.reward.by_data_source:
        components += [SCORERS.find(name) for name in {row["data_source"] for row in rows}]
    modules = {component.__module__ for component in components}
    require(
        "__main__" not in modules or not config.rollout.agent.num_workers,
        "rollout.agent.num_workers",
        config.rollout.agent.num_workers,
        "the main program registers a component, and worker processes do not run it; move the "
        "component to a module that it imports, or set 0",
    )
    return sorted(name for name in modules if name in sys.modules and _has_spec(name))


def _has_spec(name: str) -> bool:
    """Whether the module can be imported by its name, here and in another process."""
    return name != "__main__" and importlib.util.find_spec(name) is not None


def _check_role(role: str, messages: list[Any], chat: ChatBuilder, place: str) -> None:
    """ConfigError for a role that the chat template does not know, and whose messages it skips."""
    other = [
        # a turn that calls tools may be shown without what it says beside
        {**m, "content": "other words"} if m["role"] == role and not m.get("tool_calls") else m
        for m in messages
    ]
    with suppress(ChatTemplateError):  # a prompt that cannot be rendered is told as a whole
        if other != messages and chat.render(other) == chat.render(messages):
            raise ConfigError(
                f"{place}: the chat template leaves out messages of role {role!r}; write one that "
                "it knows, such as user"
            )


def _check_row(row: Row, config: Config, parts: AgentParts, place: str) -> None:
    """ConfigError for what a row, at `place`, has and cannot be used."""
    extra_info = row.get("extra_info") or {}
    for column in ("images", "videos", "audios"):
        if row.get(column):
            raise ConfigError(f"{place}, column {column}: a policy reads text only; drop such rows")
    if name := row.get("agent_name"):
        check_agent_loop(f"{place}, column agent_name", name, parts.agent_loops)
    if (name or config.rollout.agent.default_agent_loop) == "tool_agent":
        named(place, selected_tools, row, parts.tools)
    user = (extra_info.get("interaction_kwargs") or {}).get("name")
    if user is not None:
        column = f"{place}, column extra_info.interaction_kwargs.name"
        named(column, check_interaction, user, parts.interactions)
    if config.reward.by_data_source:
        named(f"{place}, column data_source", SCORERS.find, row.get("data_source") or "")
    if config.rollout.agent.num_workers:
        for column, value in row.items():
            to_wire(value, f"{place}, column {column}")


def _check_vocabulary(config: Config, parts: AgentParts, row: Row) -> None:
    """ConfigError where the template's own tokens, or others of a prompt, are not the model's."""
    known = check_model(config.model, config.max_model_len).get_text_config().vocab_size
    largest = max(parts.chat.prompt(row["prompt"], schemas(parts.tools)), default=0)
    words = (
        f"the model knows {known} tokens, and its tokenizer writes a prompt with token {largest}"
    )
    words += "; give the model more (resize_token_embeddings)"
    require(largest < known, "model.path", config.model.path, words)


def _read_rows(config: Config, parts: AgentParts, key: str, files: list[str]) -> list[Row]:
    require(bool(files), key, files, "name at least one .parquet or .jsonl file")
    rows, roles = [], set[str]()
    for file in files:
        for number, row in enumerate(load_rows([file])):
            place = f"{file}: row {number}"
            for role in {message["role"] for message in row["prompt"]} - roles:
                roles.add(role)
                _check_role(role, row["prompt"], parts.chat, f"{place}, column prompt")
            _check_row(row, config, parts, place)
            rows.append(row)

    def count_tokens(row: Row) -> int:
        try:
            text = parts.chat.render(row["prompt"], schemas(parts.tools))
        except ChatTemplateError as error:
            problem = f"prompt {row['prompt']!r} cannot be rendered: {error}"
            raise ConfigError(f"{key}: {problem}") from error
        # No token is shorter than a character, and to encode a million prompts takes minutes.
        fits = text.isascii() and len(text) <= config.data.max_prompt_length
        return len(text) if fits else len(parts.chat.encode(text))

    kept = filter_overlong(
        rows,
        count_tokens,
        max_prompt_length=config.data.max_prompt_length,
        filter_overlong_prompts=config.data.filter_overlong_prompts,
        truncation=config.data.truncation,
        place=key,
    )
    for row in kept[:1]:
        _check_vocabulary(config, parts, row)
    return kept
