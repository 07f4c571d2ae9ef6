"""The tool loop over a scripted engine: tokens, order, limits, and every way to end."""

import asyncio
import sys
from typing import ClassVar

import pytest
from scripted import QUESTION, TOKENIZER, call, check_invariants, run_script

from minirl.agent_loop import (
    ServerError,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    base,
    run_agent_loop,
)
from minirl.config import ConfigError
from minirl.testing import ScriptedServer, make_context
from minirl.tools import BaseTool, ToolResponse, function_tool, threads
from minirl.tools.calculator import CalculatorTool
from minirl.types import TokenOutput

ADD = call("calculator", expression="2 + 2")
TOOLS = [CalculatorTool({})]


def token_output(text, finish_reason):
    token_ids = TOKENIZER.encode(text)
    logprobs = [ScriptedServer.logprob(t) for t in token_ids]
    return TokenOutput(token_ids=token_ids, logprobs=logprobs, finish_reason=finish_reason)


async def test_tokens_of_a_conversation_are_those_that_were_sampled_and_observed():
    trajectory, server = await run_script([f"Let me see. {ADD}", "#### 4"], TOOLS)
    check_invariants(trajectory, server)
    assert trajectory.termination == "stop"
    assert TOKENIZER.decode(trajectory.response_ids) == (
        f"Let me see. {ADD}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n#### 4<|im_end|>"
    )
    [record] = trajectory.tool_calls
    assert (record.turn, record.name, record.status, record.result) == (0, "calculator", "ok", "4")
    assert record.arguments == '{"expression": "2 + 2"}'


async def test_what_the_model_sampled_is_never_tokenized_again():
    odd = "a\u2003b  \r\n <tool_call>"  # text that a template would trim
    sampled = [*TOKENIZER.encode(odd)[:-1], 0, 1, *TOKENIZER.encode(ADD), TOKENIZER.eos_token_id]
    first = TokenOutput(token_ids=sampled, logprobs=[-1.0] * len(sampled), finish_reason="stop")
    trajectory, server = await run_script([first, "4"], TOOLS)
    assert server.requests[1].prompt_ids[len(trajectory.prompt_ids) :][: len(sampled)] == sampled


async def test_results_are_in_the_order_of_the_calls_and_surplus_calls_are_told():
    finished = []

    @function_tool
    async def nap(name: str, turns: int) -> str:
        """Answer after some turns of the event loop."""
        for _ in range(turns):
            await asyncio.sleep(0)
        finished.append(name)
        return f"done {name}"

    calls = [call("nap", name=n, turns=t) for n, t in (("a", 30), ("b", 20), ("c", 1), ("d", 1))]
    trajectory, server = await run_script(
        ["".join(calls), "ok"], [nap], ["rollout.multi_turn.max_parallel_calls=3"]
    )
    check_invariants(trajectory, server)
    assert finished == ["c", "b", "a"]
    assert [r.result for r in trajectory.tool_calls] == [
        "done a",
        "done b",
        "done c",
        "Error: this call was not run: one turn may make 3 tool calls.",
    ]
    text = TOKENIZER.decode(trajectory.response_ids)
    assert (
        text.index("done a") < text.index("done b") < text.index("done c") < text.index("not run")
    )
    assert text.count("<|im_start|>user") == 1  # one observation for all results


@pytest.mark.parametrize(
    ("reason", "replies", "overrides", "num_turns"),
    [
        ("stop", ["#### 4"], [], 1),
        ("stop", [f"#### 4 {ADD}"], ["rollout.multi_turn.stop_when='####'"], 1),
        ("turn_length", ["long " * 10], ["rollout.multi_turn.max_tokens_per_turn=20"], 1),
        ("turn_length", [ADD + "x" * 90], ["rollout.multi_turn.max_tokens_per_turn=90"], 1),
        ("response_length", ["long " * 10], ["rollout.response_length=20"], 1),
        ("response_length", [ADD, "x" * 300], ["rollout.response_length=300"], 2),
        ("max_assistant_turns", [ADD] * 3, ["rollout.multi_turn.max_assistant_turns=2"], 2),
        ("max_user_turns", [ADD] * 4, ["rollout.multi_turn.max_user_turns=2"], 3),
        ("max_tool_calls", [ADD] * 4, ["rollout.multi_turn.max_tool_calls=2"], 3),
        (  # calls that were not run do not count
            "max_tool_calls",
            [ADD * 2, ADD, ADD],
            ["rollout.multi_turn={max_tool_calls: 2, max_parallel_calls: 1}"],
            3,
        ),
        ("observation_too_long", [ADD] * 2, ["rollout.response_length=90"], 1),
        ("prompt_too_long", [], ["data.max_prompt_length=100"], 0),
        ("prompt_too_long", [], ["rollout.max_model_len=100"], 0),
        ("response_length", ["x" * 2000], ["rollout.max_model_len=700"], 1),
        ("aborted", [token_output("half", "abort")], [], 1),
        ("aborted", [ADD, token_output("", "abort")], [], 1),
        ("error", [ADD], [], 1),  # the script ends: an exception in user code
    ],
)
async def test_termination(reason, replies, overrides, num_turns):
    trajectory, server = await run_script(replies, TOOLS, overrides)
    assert trajectory.termination == reason
    assert trajectory.num_turns == num_turns
    assert (trajectory.error is not None) == (reason == "error")
    check_invariants(trajectory, server)


async def test_timeout_keeps_what_was_sampled_and_ends_with_a_turn():
    async def reply(request_id, turn, prompt_ids):
        await asyncio.sleep(3600 if turn else 0)
        return ADD

    trajectory, server = await run_script(reply, TOOLS, ["rollout.trajectory_timeout_s=2"])
    assert (trajectory.termination, trajectory.num_turns) == ("timeout", 1)
    assert "TimeoutError" in trajectory.error
    check_invariants(trajectory, server)


async def test_limits_of_the_response_are_exact():
    def response_length(trajectory):
        return len(trajectory.response_ids)

    whole, _ = await run_script([ADD, "#### 4"], TOOLS)
    observation = whole.response_mask.count(0)
    first = whole.turn_ends[0]
    fits = [f"rollout.response_length={first + observation + 1}"]
    cut, server = await run_script([ADD, "#### 4"], TOOLS, fits)
    assert (cut.termination, response_length(cut)) == ("response_length", first + observation + 1)
    assert server.requests[1].sampling_params["max_tokens"] == 1
    tight = [f"rollout.response_length={first + observation}"]
    cut, _ = await run_script([ADD, "#### 4"], TOOLS, tight)
    assert (cut.termination, response_length(cut)) == ("observation_too_long", first)


async def test_calls_beyond_the_total_are_told_and_the_model_may_still_answer():
    overrides = ["rollout.multi_turn.max_tool_calls=3"]
    trajectory, _ = await run_script([ADD + ADD, ADD + ADD, "#### 4"], TOOLS, overrides)
    assert [r.status for r in trajectory.tool_calls] == ["ok", "ok", "ok", "not_run"]
    assert "a conversation may make 3 tool calls" in trajectory.tool_calls[-1].result
    assert trajectory.termination == "stop"


async def test_a_turn_that_was_cut_calls_nothing(monkeypatch):
    """Nor is it read: in a long one that repeats `<tool_call>` to its end that takes seconds."""
    monkeypatch.delattr(base.AgentLoopBase, "parse_tool_calls")
    overrides = [f"rollout.multi_turn.max_tokens_per_turn={len(TOKENIZER.encode(ADD))}"]
    trajectory, _ = await run_script([ADD], TOOLS, overrides)
    assert (trajectory.termination, trajectory.tool_calls) == ("turn_length", [])


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        (call("calculater", expression="1"), "unknown_tool", "no tool 'calculater'. Available"),
        ("<tool_call>{oops}</tool_call>", "malformed", "cannot be read: it is not valid JSON"),
        (call("calculator", expr="1"), "bad_arguments", "'expression' is a required property"),
        (call("calculator", expression="1/0"), "error", "Error: division by zero"),
        (call("broken"), "error", "the tool 'broken' failed: KeyError: 'x'"),
        (call("cancels"), "error", "the tool 'cancels' failed: CancelledError"),
        (call("exits"), "error", "the tool 'exits' failed: SystemExit: 3"),
        (call("panics"), "error", "the tool 'panics' failed: Panic: at the end"),
        (call("unprintable"), "error", "the tool 'unprintable' failed: Unprintable"),
        (call("hangs"), "timeout", "the tool 'hangs' did not answer within 1 s"),
        (call("own_timeout"), "error", "the tool 'own_timeout' failed: TimeoutError"),
        (call("surrogate"), "ok", "a?b"),
    ],
)
async def test_the_model_is_told_and_the_conversation_goes_on(text, status, told):
    @function_tool
    def broken() -> str:
        """Raise."""
        raise KeyError("x")

    @function_tool
    async def cancels() -> str:
        """Cancel itself, as libraries that use cancellation within do."""
        raise asyncio.CancelledError

    @function_tool
    async def exits() -> str:
        """End the program, as argparse does."""
        sys.exit(3)

    class Panic(BaseException):
        pass

    @function_tool
    async def panics() -> str:
        """Crash, as libraries written in Rust do."""
        raise Panic("at the end")

    class Unprintable(Exception):
        def __str__(self):
            raise LookupError

    @function_tool
    def unprintable() -> str:
        """Raise what has no words."""
        raise Unprintable

    @function_tool
    async def hangs() -> str:
        """Never answer."""
        await asyncio.Event().wait()

    @function_tool
    async def own_timeout() -> str:
        """Time out by itself."""
        raise TimeoutError("upstream")

    @function_tool
    def surrogate() -> str:
        """Return what is not Unicode."""
        return "a\ud800b"

    tools = [*TOOLS, broken, cancels, exits, panics, unprintable, hangs, own_timeout, surrogate]
    overrides = [f"rollout.multi_turn.tool_timeout_s={1 if status == 'timeout' else 60}"]
    trajectory, server = await run_script([text + ADD, "#### 4"], tools, overrides)
    assert [r.status for r in trajectory.tool_calls] == [status, "ok"]
    assert told in trajectory.tool_calls[0].result
    observation = TOKENIZER.decode(server.requests[1].prompt_ids)
    assert observation.index(told) < observation.index("<tool_response>\n4\n")
    assert trajectory.termination == "stop"


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "(truncated)...78901234567890123456789"),
        ("middle", "01234567890...(truncated)...0123456789"),
        ("right", "0123456789012345678901234...(truncated)"),
    ],
)
async def test_long_results_are_cut(side, expected):
    @function_tool
    def digits() -> str:
        """Return a long text."""
        return "0123456789" * 10

    overrides = [
        "rollout.multi_turn.max_tool_response_length=38",
        f"rollout.multi_turn.tool_response_truncate_side={side}",
    ]
    trajectory, _ = await run_script([call("digits"), "ok"], [digits], overrides)
    result = trajectory.tool_calls[0].result
    assert len(TOKENIZER.encode(result)) == 38
    head, marker, tail = expected.partition("(truncated)")
    assert marker in result
    assert result.startswith(head[:5]) and result.endswith(tail[-5:])


async def test_long_texts_are_the_same_off_the_event_loop(monkeypatch):
    @function_tool
    def essay() -> str:
        """Return a text of some length."""
        return "word " * 50

    replies = [call("essay"), "#### 4"]
    inline, _ = await run_script(replies, [essay])
    monkeypatch.setattr(threads, "LONG_TEXT", 1)
    threaded, server = await run_script(replies, [essay])
    assert threaded.token_ids == inline.token_ids
    check_invariants(threaded, server)


async def test_single_turn_agent():
    trajectory, server = await run_script(["#### 4"], TOOLS, loop_class=SingleTurnAgentLoop)
    check_invariants(trajectory, server)
    assert (trajectory.termination, trajectory.num_turns) == ("stop", 1)
    assert "calculator" not in TOKENIZER.decode(trajectory.prompt_ids)
    long = ["data.max_prompt_length=10"]
    trajectory, server = await run_script(["4"], (), long, loop_class=SingleTurnAgentLoop)
    assert (trajectory.termination, server.requests) == ("prompt_too_long", [])


@pytest.mark.parametrize("side", ["left", "right", "middle"])
async def test_a_long_prompt_is_cut_where_the_config_says(side):
    whole, _ = await run_script(["4"], loop_class=SingleTurnAgentLoop)
    overrides = ["data.max_prompt_length=11", f"data.truncation={side}"]
    cut, _ = await run_script(["4"], (), overrides, loop_class=SingleTurnAgentLoop)
    kept = {
        "left": whole.prompt_ids[-11:],
        "right": whole.prompt_ids[:11],
        "middle": whole.prompt_ids[:6] + whole.prompt_ids[-5:],
    }
    assert cut.prompt_ids == kept[side]
    assert cut.termination == "stop"


async def test_sampling_params_of_the_turns():
    params = {"temperature": 0.7, "seed": 5}
    overrides = ["rollout.multi_turn.max_tokens_per_turn=400", "rollout.response_length=450"]
    runs = [await run_script([ADD, "4"], TOOLS, overrides, params=params) for _ in range(2)]
    first, second = ([r.sampling_params for r in server.requests] for _, server in runs)
    assert first == second  # the same seeds, whatever the request id
    assert first[0]["seed"] != first[1]["seed"]
    assert [p["temperature"] for p in first] == [0.7, 0.7]
    assert first[0]["stop_token_ids"] == [TOKENIZER.eos_token_id]
    trajectory, server = runs[0]
    observed = len(server.requests[1].prompt_ids) - len(trajectory.prompt_ids)
    assert [p["max_tokens"] for p in first] == [400, 450 - observed]
    assert params == {"temperature": 0.7, "seed": 5}


async def test_tool_selection_and_labels_of_the_row():
    @function_tool
    def other() -> str:
        """Another tool."""
        return "other"

    trajectory, _ = await run_script(
        [call("other") + ADD, "4"],
        [*TOOLS, other],
        extra_info={"tool_selection": ["calculator"]},
        uid="p7",
        sample_index=3,
        data_source="calculator",
        reward_model={"ground_truth": "4"},
    )
    assert '"name": "other"' not in TOKENIZER.decode(trajectory.prompt_ids)
    assert [r.status for r in trajectory.tool_calls] == ["unknown_tool", "ok"]
    labels = (trajectory.uid, trajectory.sample_index, trajectory.data_source)
    assert labels == ("p7", 3, "calculator")
    assert trajectory.ground_truth == "4"
    bad, _ = await run_script(["4"], TOOLS, extra_info={"tool_selection": ["calculater"]})
    assert bad.termination == "error"
    assert "did you mean 'calculator'" in bad.error


async def test_rewards_of_tools_land_on_their_turn():
    class Grader(BaseTool):
        schema: ClassVar = {"type": "function", "function": {"name": "grade"}}

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse("noted"), parameters["points"], {"graded": 1}

        async def calc_reward(self, instance_id, **kwargs):
            return kwargs["best"]

    kwargs = {"grade": {"calc_reward_kwargs": {"best": 9.0}, "create_kwargs": None}}
    two = call("grade", points=0.5) + call("grade", points=0.25)
    trajectory, _ = await run_script(
        [two, call("grade", points=-1.0), call("grade", points=1.0), "end"],
        [Grader({})],
        extra_info={"tools_kwargs": kwargs},
    )
    assert trajectory.turn_rewards == [0.75, -1.0, 1.0, 0.0]
    assert trajectory.reward_breakdown == {"tool/grade": 9.0}
    assert trajectory.metrics["tool/grade/graded"] == 4


async def test_cancelling_is_not_a_failure_and_engine_errors_pass():
    class Dead:
        tokenizer = TOKENIZER

        async def generate(self, request_id, *, prompt_ids, sampling_params):
            raise ServerError("engine 0 is gone")

    context = make_context(Dead())
    with pytest.raises(ServerError):
        await run_agent_loop(ToolAgentLoop(context), {}, {"raw_prompt": QUESTION})

    class Parallel(ToolAgentLoop):
        async def run(self, sampling_params, **row):
            async with asyncio.TaskGroup() as group:
                trajectory = await self.start(row["raw_prompt"])
                group.create_task(self.generate(trajectory, sampling_params))
            return self.finish(trajectory, "stop")

    with pytest.raises(ExceptionGroup):
        await run_agent_loop(Parallel(context), {}, {"raw_prompt": QUESTION})

    waiting = make_context(ScriptedServer(TOKENIZER, ["4"], delay_s=3600))
    task = asyncio.create_task(run_agent_loop(ToolAgentLoop(waiting), {}, {"raw_prompt": QUESTION}))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_settings_that_name_nothing_are_refused():
    server = ScriptedServer(TOKENIZER, [])
    with pytest.raises(ConfigError, match=r"multi_turn.format: .*did you mean 'hermes'"):
        make_context(server, overrides=["rollout.multi_turn.format=hermis"])
    with pytest.raises(ConfigError, match=r"multi_turn.stop_when: got '\('; not a regular"):
        make_context(server, overrides=["rollout.multi_turn.stop_when='('"])
