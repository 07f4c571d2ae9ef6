"""Curriculum policy optimization: what to tell the policy about a prompt that it mostly fails.

The hint goes into the prompt; the policy then scores the answers it gave without it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from minirl.chat import ChatBuilder
from minirl.config import ConfigError, CPOConfig
from minirl.registry import Registry, option_names
from minirl.tools import BaseTool
from minirl.tools.threads import run_function
from minirl.types import Group, Trajectory

Row = Mapping[str, Any]
Judge = Callable[[Row, Trajectory], Coroutine[Any, Any, str]]
Hint = Callable[[Row, Sequence[Trajectory]], Coroutine[Any, Any, str]]

HINTS: Registry[Callable[..., Any]] = Registry("hint function")
"""`(row, trajectories) -> str`, plain (then it runs in a thread) or async; with a keyword `judge`
it gets the judge as an async function."""

JUDGES: Registry[Callable[..., Any]] = Registry("judge")
"""`(row, trajectory) -> str`: a remark on an answer, "" for none; plain or async."""

SUCCESS = 1.0
"""Reward from which on an answer needs no remark."""


def load_hint(config: CPOConfig) -> Hint:
    """The function of algorithm.cpo.hint_fn, with the judge if it asks for one.

    Raises ConfigError for a name that is not there.
    """
    hint = _find(HINTS, "hint_fn", config.hint_fn)
    judge = _find(JUDGES, "judge_fn", config.judge_fn)
    given = {"judge": partial(run_function, judge)} if "judge" in option_names(hint) else {}
    return partial(run_function, hint, **given)


def _find(registry: Registry[Any], key: str, name: str) -> Callable[..., Any]:
    try:
        return registry.find(name)
    except ValueError as error:
        raise ConfigError(f"algorithm.cpo.{key}: {error}") from error


@HINTS.register("ground_truth")
async def ground_truth(row: Row, trajectories: Sequence[Trajectory], *, judge: Judge) -> str:
    """The right answer, and the judge's remarks on the wrong ones, each once."""
    answer = (row.get("reward_model") or {}).get("ground_truth")
    if answer is None:
        raise ConfigError(
            f"algorithm.cpo.hint_fn: 'ground_truth' has no hint for the row {row['uid']}, which "
            "has no reward_model.ground_truth; add it, or name a hint_fn of your own"
        )
    remarks = [await judge(row, trajectory) for trajectory in trajectories]
    return " ".join(
        [f"Hint: the correct answer is {answer}.", *dict.fromkeys(filter(None, remarks))]
    )


@JUDGES.register("verified")
def verified(row: Row, trajectory: Trajectory) -> str:
    """What went wrong where answers are verified by a rule."""
    score = trajectory.reward_breakdown.get("score", trajectory.reward)  # before dapo's penalty
    if score is None or score >= SUCCESS:
        return ""
    if trajectory.termination != "stop":
        return "An earlier attempt was cut off before it had answered: be brief."
    failed = [call for call in trajectory.tool_calls if call.status not in ("ok", "not_run")]
    if failed:
        return f"In an earlier attempt the call of {failed[0].name} failed: {failed[0].result}"
    if trajectory.answer is not None:
        return f"The answer {trajectory.answer} is wrong."
    return "An earlier attempt gave a wrong answer, or none in the form that is asked for."


async def hinted_prompts(
    groups: Sequence[Group], hint: Hint, chat: ChatBuilder, tools: Mapping[str, BaseTool]
) -> list[list[list[int]]]:
    """Per group and trajectory, the tokens of its prompt with the group's hint in it.

    Raises ValueError when a prompt cannot be rendered again: then the agent loop, or
    data.truncation, made it otherwise than from the row's `prompt` and tools.
    """
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(hint(group.row, group.trajectories)) for group in groups]
    return [
        [_render(group.row, t, task.result(), chat, tools) for t in group.trajectories]
        for group, task in zip(groups, tasks, strict=True)
    ]


def with_hint(messages: Sequence[Mapping[str, Any]], hint: str) -> list[dict[str, Any]]:
    """The messages, the hint at the end of the last one of the user."""
    changed = [dict(message) for message in messages]
    last = max((i for i, m in enumerate(changed) if m["role"] == "user"), default=len(changed) - 1)
    content = changed[last]["content"]
    if isinstance(content, str):
        changed[last]["content"] = f"{content}\n\n{hint}"
    else:
        changed[last]["content"] = [*content, {"type": "text", "text": hint}]
    return changed


def _render(
    row: Row, trajectory: Trajectory, hint: str, chat: ChatBuilder, tools: Mapping[str, BaseTool]
) -> list[int]:
    selection = (row.get("extra_info") or {}).get("tool_selection")
    schemas = [tools[name].tool_schema for name in (tools if selection is None else selection)]
    for candidate in (schemas or None, None):  # a loop may do without the tools
        if chat.prompt(row["prompt"], candidate) == trajectory.prompt_ids:
            return chat.prompt(with_hint(row["prompt"], hint), candidate)
    raise ValueError(
        f"algorithm.cpo: the prompt of row {row['uid']} cannot be rendered again with a hint, "
        "because its agent loop or data.truncation changed it; train with an agent loop that "
        "begins with `self.start(raw_prompt)`, or with another algorithm.adv_estimator"
    )
