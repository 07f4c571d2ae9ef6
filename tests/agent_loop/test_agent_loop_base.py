import sys

import pytest
from scripted import QUESTION, TOKENIZER, check_invariants

from minirl.agent_loop import (
    AgentLoopBase,
    derive_seed,
    load_agent_loops,
    make_agent_loop,
    run_agent_loop,
)
from minirl.config import ConfigError
from minirl.testing import ScriptedServer, make_context


class Rewriting(AgentLoopBase):
    """Asks several times, each time with a new history: one trajectory per stretch."""

    def __init__(self, context, *, stretches: int = 2):
        super().__init__(context)
        self.stretches = stretches

    async def run(self, sampling_params, **row):
        for number in range(self.stretches):
            trajectory = await self.start([{"role": "user", "content": f"stretch {number}"}])
            await self.generate(trajectory, sampling_params)
            user = [{"role": "user", "content": "Sure?"}]
            await self.append_observation(trajectory, user)
            await self.generate(trajectory, sampling_params)
            self.finish(trajectory, "stop")
        return self.trajectories


class Unfinished(AgentLoopBase):
    async def run(self, sampling_params, **row):
        return await self.start(row["raw_prompt"])


class Broken(AgentLoopBase):
    async def run(self, sampling_params, **row):
        trajectory = await self.start(row["raw_prompt"])
        await self.generate(trajectory, sampling_params)
        await self.append_observation(trajectory, [{"role": "user", "content": "Go on."}])
        raise KeyError("user code")


class Late(AgentLoopBase):
    """A time-out of its own is not rollout.trajectory_timeout_s."""

    async def run(self, sampling_params, **row):
        raise TimeoutError("upstream")


class Exiting(AgentLoopBase):
    async def run(self, sampling_params, **row):
        sys.exit("no \udcff licence")


class Panic(BaseException):
    """As pyo3's PanicException, with which libraries written in Rust crash, it is no Exception."""


class Panicking(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise BaseExceptionGroup("tasks", [Panic("index out of bounds")])


class ByHand(AgentLoopBase):
    """Writes to the tokens, and ends with an observation, past the methods that keep them right."""

    async def run(self, sampling_params, **row):
        trajectory = await self.start(row["raw_prompt"])
        await self.generate(trajectory, sampling_params)
        if row["uid"] == "tokens":
            trajectory.response_ids.append(7)
        else:
            await self.append_observation(trajectory, [{"role": "user", "content": "Go on."}])
        trajectory.termination = "stop"
        return trajectory


class Unmeasured(AgentLoopBase):
    async def run(self, sampling_params, **row):
        trajectory = await self.start(row["raw_prompt"])
        await self.generate(trajectory, sampling_params)
        trajectory.metrics["depth"] = None
        return self.finish(trajectory, "stop")


class Nothing(AgentLoopBase):
    async def run(self, sampling_params, **row):
        return None


async def test_a_loop_may_return_several_trajectories():
    server = ScriptedServer(TOKENIZER, ["a", "b", "c", "d", "e", "f"])
    loop = Rewriting(make_context(server), stretches=3)
    trajectories = await run_agent_loop(loop, {"seed": 1}, {"raw_prompt": QUESTION, "uid": "u"})
    assert [t.num_turns for t in trajectories] == [2, 2, 2]
    assert {t.uid for t in trajectories} == {"u"}
    assert {r.request_id for r in server.requests} == {loop.request_id}
    assert len({r.sampling_params["seed"] for r in server.requests}) == 6
    text = TOKENIZER.decode(trajectories[2].response_ids)
    assert (
        text == "e<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nf<|im_end|>"
    )


@pytest.mark.parametrize(
    ("loop_class", "error", "num_turns"),
    [
        (Unfinished, "call self.finish(trajectory, reason)", 0),
        (Broken, "KeyError: 'user code'", 1),
        (Nothing, "run() returned None", 0),
        (Unmeasured, "run() returned a trajectory with metrics['depth'] = None", 1),
        (Late, "TimeoutError: upstream", 0),
        (Exiting, r"SystemExit: no \udcff licence", 0),  # escaped: it could not be written
        (Panicking, "Panic: index out of bounds", 0),
    ],
)
async def test_exceptions_of_user_code_become_data(loop_class, error, num_turns):
    server = ScriptedServer(TOKENIZER, ["a", "b"])
    row = {"raw_prompt": QUESTION, "uid": "u"}
    [trajectory] = await run_agent_loop(loop_class(make_context(server)), {}, row)
    assert (trajectory.termination, trajectory.uid) == ("error", "u")
    assert error in trajectory.error and "Traceback" in trajectory.error
    assert trajectory.num_turns == num_turns
    check_invariants(trajectory, server)


@pytest.mark.parametrize("uid", ["tokens", "observation"])
async def test_what_does_not_fit_together_is_a_failure(uid):
    server = ScriptedServer(TOKENIZER, ["a"])
    row = {"raw_prompt": QUESTION, "uid": uid}
    [trajectory] = await run_agent_loop(ByHand(make_context(server)), {}, row)
    assert trajectory.termination == "error"
    assert "do not fit one another" in trajectory.error


async def test_a_trajectory_ends_once():
    loop = Broken(make_context(ScriptedServer(TOKENIZER, ["a"])))
    trajectory = await loop.start(QUESTION)
    await loop.generate(trajectory, {})
    loop.finish(trajectory, "aborted")
    assert loop.finish(trajectory, "stop").termination == "aborted"
    assert not await loop.append_observation(trajectory, [{"role": "user", "content": "Go on."}])
    assert await loop.generate(trajectory, {}) == ""  # and asks the engine for nothing
    assert trajectory.num_turns == 1


async def test_a_loop_that_does_not_look_whether_its_turn_was_cut():
    settings = ["rollout.multi_turn.max_tokens_per_turn=5"]
    server = ScriptedServer(TOKENIZER, ["long " * 9, "a", "b"])
    loop = Rewriting(make_context(server, overrides=settings))
    trajectories = await run_agent_loop(loop, {}, {"raw_prompt": QUESTION})
    assert [(t.termination, t.num_turns, t.error) for t in trajectories] == [
        ("turn_length", 1, None),
        ("stop", 2, None),
    ]


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        (tmp_path / "loops.yaml").write_text(text)
        return load_agent_loops(tmp_path / "loops.yaml")

    return write_and_load


def test_agent_loops_from_a_file(load):
    loops = load(
        "- {name: rewriting, _target_: test_agent_loop_base.Rewriting, stretches: 4}\n"
        "- {name: broken, _target_: 'test_agent_loop_base:Broken'}\n"
    )
    context = make_context(ScriptedServer(TOKENIZER, []))
    context.agent_loops = loops
    assert make_agent_loop("rewriting", context).stretches == 4
    assert isinstance(make_agent_loop("broken", context), Broken)
    assert type(make_agent_loop("tool_agent", context)).__name__ == "ToolAgentLoop"
    assert isinstance(make_agent_loop("test_agent_loop_base:Broken", context), Broken)
    with pytest.raises(ValueError, match="did you mean 'tool_agent'"):
        make_agent_loop("tool_agnt", context)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x", "expected a list"),
        ("- {name: x}", "entry 1: needs `name` and `_target_"),
        ("- {name: x, _target_: 'test_agent_loop_base:Brken'}", "did you mean 'Broken'"),
        ("- {name: x, _target_: 'minirl.config:Config'}", "not a subclass of AgentLoopBase"),
        (
            "- {name: x, _target_: 'test_agent_loop_base:Rewriting', streches: 1}",
            "entry 1: streches: .*did you mean 'stretches'",
        ),
        ("- &a {name: x, _target_: 'test_agent_loop_base:Broken'}\n- *a", "entry 2: .*already"),
    ],
)
def test_errors_in_an_agent_loop_file_name_the_entry(load, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_seeds_are_stable_and_differ():
    assert derive_seed(0, "prompt", 1) == derive_seed(0, "prompt", 1) == 322776276
    seeds = {derive_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed("a", "b") != derive_seed("ab") != derive_seed("ab", "")
    assert derive_seed(1) != derive_seed("1")
