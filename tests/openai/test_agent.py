"""OpenAIAgentLoop: the user's agent, from its name in a file to its trajectories."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_run import make_config, make_project, scripted_run
from talks import ASK, CHAT, TOKENIZER, check_tokens, load, sampled

from minirl.agent_loop import (
    AgentLoopContext,
    ServerError,
    load_agent_loops,
    make_agent_loop,
    run_agent_loop,
)
from minirl.config import ConfigError
from minirl.openai.endpoint import PolicyEndpoint
from minirl.testing import ScriptedServer
from minirl.types import Trajectory


def loop_file(folder: Path, agent: str) -> Path:
    path = folder / "agents.yaml"
    path.write_text(
        "- name: mine\n  _target_: minirl.openai:OpenAIAgentLoop\n"
        f"  agent: {agent if ':' in agent else f'openai_user:{agent}'}\n"
    )
    return path


@asynccontextmanager
async def running(
    folder: Path, agent: str, replies: Any, *overrides: str, **row: Any
) -> AsyncIterator[tuple[list[Trajectory], ScriptedServer]]:
    """The trajectories of one row."""
    script = ScriptedServer(TOKENIZER, replies)
    context = AgentLoopContext(
        server=script, tokenizer=TOKENIZER, chat=CHAT, tools={}, config=load(*overrides)
    )
    context.endpoint = PolicyEndpoint(context)
    context.agent_loops = load_agent_loops(loop_file(folder, agent))
    row = {"prompt": [ASK], "raw_prompt": [ASK], **row}
    try:
        loop = make_agent_loop("mine", context)
        yield await run_agent_loop(loop, {"temperature": 1.0, "seed": 1}, row), script
    finally:
        await context.endpoint.aclose()


@pytest.mark.parametrize("agent", ["one_question", "assistant", "heir", "decorated"])
async def test_the_reward_function_scores_what_is_not_scored(tmp_path: Path, agent: str) -> None:
    async with running(tmp_path, agent, ["42"], uid="0-3") as ([trajectory], script):
        check_tokens([trajectory], script)
        assert sampled(trajectory) == "42<|im_end|>" and trajectory.termination == "stop"
        assert trajectory.reward is None and trajectory.uid == "0-3"


@pytest.mark.parametrize(
    ("returns", "reward", "breakdown"),
    [(0.5, 0.5, {}), (True, 1.0, {}), ({"score": 1, "steps": 3}, 1.0, {"steps": 3.0})],
)
async def test_what_an_agent_returns_is_the_reward(
    tmp_path: Path, returns: Any, reward: float, breakdown: dict[str, float]
) -> None:
    async with running(tmp_path, "rewards_itself", ["42"], returns=returns) as ([t], _):
        assert (t.reward, t.reward_breakdown, t.error) == (reward, breakdown, None)


@pytest.mark.parametrize("returns", [{"answer": 3}, float("nan")])
async def test_a_reward_that_is_none_fails_the_trajectory(tmp_path: Path, returns: Any) -> None:
    async with running(tmp_path, "rewards_itself", ["42"], returns=returns) as ([t], _):
        assert t.termination == "error" and "expected a finite number" in (t.error or "")


async def test_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    async with running(tmp_path, "blocking", ["41", "42"]) as ([t], script):
        check_tokens([t], script)
        assert sampled(t) == "41<|im_end|>42<|im_end|>"
        assert (t.reward, t.reward_breakdown["turns"]) == (0.75, 2.0)


@pytest.mark.parametrize(
    ("agent", "error"),
    [("fails", "ZeroDivisionError: planted"), ("exits", "SystemExit('planted')")],
)
async def test_an_exception_is_a_failure_with_what_was_sampled(
    tmp_path: Path, agent: str, error: str
) -> None:
    async with running(tmp_path, agent, ["42"]) as ([t], _):
        assert t.termination == "error" and error in (t.error or "")
        assert sampled(t) == "42<|im_end|>"


@pytest.mark.parametrize(
    ("override", "termination"),
    [
        ("rollout.multi_turn.max_assistant_turns=2", "max_assistant_turns"),
        ("rollout.response_length=64", "observation_too_long"),
        ("data.max_prompt_length=8", "prompt_too_long"),
        ("rollout.response_length=3", "response_length"),
    ],
)
async def test_an_agent_that_gives_up_at_a_limit_has_not_failed(
    tmp_path: Path, override: str, termination: str
) -> None:
    async with running(tmp_path, "endless", lambda *_: "more", override) as ([t], _):
        assert (t.termination, t.error) == (termination, None)


async def test_a_request_that_is_refused_behind_an_answer_that_was_cut(tmp_path: Path) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if turn:
            raise ValueError("the engine does not like it")
        return "long " * 9

    limit = "rollout.multi_turn.max_tokens_per_turn=9"
    async with running(tmp_path, "endless", reply, limit) as ([t], _):
        assert t.termination == "error" and "does not like it" in (t.error or "")


async def test_the_time_of_a_trajectory(tmp_path: Path) -> None:
    limit = "rollout.trajectory_timeout_s=0.5"
    async with running(tmp_path, "hangs", lambda *_: "42", limit) as ([t], _):
        assert t.termination == "timeout"


async def test_an_agent_that_asks_somebody_else_has_failed(tmp_path: Path) -> None:
    async with running(tmp_path, "silent", []) as ([t], _):
        assert t.termination == "error" and "made no request" in (t.error or "")


@pytest.mark.parametrize("num_cut", [0, 1])
async def test_a_lost_engine_is_no_failure_of_the_agent(tmp_path: Path, num_cut: int) -> None:
    """Nor a limit that it gives up at, when its answer before was cut."""

    async def lost(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if turn < num_cut:
            return "long " * 9
        raise ServerError("the engine died")

    limit = "rollout.multi_turn.max_tokens_per_turn=9"
    with pytest.raises(ServerError, match="the engine died"):
        async with running(tmp_path, "endless", lost, limit):
            pass


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ("openai_user:nobody", "has no 'nobody'"),
        ("no_such_module:agent", "no module 'no_such_module'"),
        ("not_a_function", "'openai_user:not_a_function' is not a function"),
        ("takes_nothing", "must take the keyword arguments base_url, api_key, model, row: "),
    ],
)
def test_an_agent_that_cannot_be_called(tmp_path: Path, agent: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"agents\.yaml: entry 1: agent.*{problem}"):
        load_agent_loops(loop_file(tmp_path, agent))


def test_an_agent_must_be_named(tmp_path: Path) -> None:
    path = tmp_path / "agents.yaml"
    path.write_text("- {name: mine, _target_: 'minirl.openai:OpenAIAgentLoop'}")
    with pytest.raises(ConfigError, match=r"entry 1: agent: missing; write package\.module:f"):
        load_agent_loops(path)


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_a_whole_run_in_rank_0_and_in_a_worker(tmp_path: Path, num_workers: int) -> None:
    """With the real service to the engine, and threads of agents in each process."""
    project = make_project(tmp_path)
    config = make_config(
        project, "run", f"rollout.agent.num_workers={num_workers}", "rollout.n=2",
        f"rollout.agent.agent_loop_config_path={loop_file(tmp_path, 'blocking')}",
        "rollout.agent.default_agent_loop=mine", "rollout.response_length=256",
    )  # fmt: skip
    async with scripted_run(config) as run:
        assert run.inputs and run.manager
        rows = [{**row, "uid": f"0-{i}"} for i, row in enumerate(run.inputs.train_rows[:4])]
        trajectories = await run.manager.generate_sequences(rows, step=1)
    assert [(t.num_turns, t.reward, t.error) for t in trajectories] == [(2, 0.75, None)] * 8
    processes = {t.reward_breakdown["process"] for t in trajectories}
    assert len(processes) == 1
