"""What a session does beyond the tool loop; tests/agent_loop has calls, order, limits and chaos."""

import asyncio
import logging
import time
from typing import ClassVar

import pytest

from minirl.config import MultiTurnConfig
from minirl.testing import byte_tokenizer
from minirl.tools import BaseTool, ToolCall, ToolResponse, ToolSession, session
from minirl.types import TokenOutput, Trajectory

TOKENIZER = byte_tokenizer()


class Recorder(BaseTool):
    """Notes which of its methods were called with what."""

    schema: ClassVar = {"type": "function", "function": {"name": "recorder"}}

    def __init__(self, tool_schema=None):
        super().__init__({}, tool_schema)
        self.log = []

    async def create(self, instance_id=None, **kwargs):
        await asyncio.sleep(0)  # long enough for a second call to ask as well
        self.log.append(("create", kwargs))
        return "i"

    async def execute(self, instance_id, parameters, **kwargs):
        self.log.append(("execute", instance_id, parameters, kwargs))
        return ToolResponse("ok"), 0.5, {"pages": 2}

    async def calc_reward(self, instance_id, **kwargs):
        self.log.append(("calc_reward", instance_id, kwargs))
        return 1.0

    async def release(self, instance_id, **kwargs):
        self.log.append(("release", instance_id, kwargs))


def one_turn():
    trajectory = Trajectory(prompt_ids=[0])
    trajectory.append_sampled(TokenOutput(token_ids=[1], logprobs=[0.0], finish_reason="stop"))
    return trajectory


def call(x):
    return ToolCall(name="recorder", arguments={"x": x}, text="{}")


async def test_one_instance_per_trajectory_with_the_arguments_of_its_row():
    tool, trajectory = Recorder(), one_turn()
    methods = ("create", "execute", "calc_reward", "release")
    kwargs = {"recorder": {f"{m}_kwargs": {"of": m} for m in methods}}
    async with ToolSession({"recorder": tool}, MultiTurnConfig(), TOKENIZER, kwargs) as tools:
        await tools.call(trajectory, [call(1), call(2)])
        messages = await tools.call(trajectory, [call(3)])
        await tools.calc_rewards(trajectory)
    assert messages == [{"role": "tool", "name": "recorder", "content": "ok"}]
    assert tool.log == [
        ("create", {"of": "create"}),
        *[("execute", "i", {"x": x}, {"of": "execute"}) for x in (1, 2, 3)],
        ("calc_reward", "i", {"of": "calc_reward"}),
        ("release", "i", {"of": "release"}),
    ]
    assert trajectory.turn_rewards == [1.5]
    assert trajectory.reward_breakdown == {"tool/recorder": 1.0}
    assert trajectory.metrics["tool/recorder/pages"] == 6


async def test_a_reward_that_hangs_is_given_up_and_its_tool_released():
    class Endless(Recorder):
        async def calc_reward(self, instance_id, **kwargs):
            await asyncio.Event().wait()

    tool, limits = Endless(), MultiTurnConfig(tool_timeout_s=0.05)
    with pytest.raises(TimeoutError):
        async with ToolSession({"recorder": tool}, limits, TOKENIZER) as tools:
            tools._instances["recorder"] = "i"
            await tools.calc_rewards(one_turn())
    assert tool.log == [("release", "i", {})]


async def test_a_reward_that_is_not_finite_is_refused():
    class Broken(Recorder):
        async def calc_reward(self, instance_id, **kwargs):
            return float("nan")

    trajectory = one_turn()
    with pytest.raises(ValueError, match=r"tool 'recorder': calc_reward\(\) returned nan"):
        async with ToolSession({"recorder": Broken()}, MultiTurnConfig(), TOKENIZER) as tools:
            tools._instances["recorder"] = "i"
            await tools.calc_rewards(trajectory)
    assert trajectory.reward_breakdown == {}


async def test_a_release_may_take_longer_than_a_call():
    class Slow(Recorder):
        async def release(self, instance_id, **kwargs):
            await asyncio.sleep(0.1)
            await super().release(instance_id)

    tool, limits = Slow(), MultiTurnConfig(tool_timeout_s=0.05)
    async with ToolSession({"recorder": tool}, limits, TOKENIZER) as tools:
        tools._instances["recorder"] = "i"
    assert tool.log == [("release", "i", {})]


async def test_a_tool_that_is_not_called_is_not_created():
    tool = Recorder()
    async with ToolSession({"recorder": tool}, MultiTurnConfig(), TOKENIZER) as tools:
        await tools.calc_rewards(one_turn())
    assert tool.log == []


async def test_a_failed_create_is_told_and_tried_again_at_the_next_call():
    class Late(Recorder):
        async def create(self, instance_id=None, **kwargs):
            if not self.log:
                self.log.append("failed")
                raise ConnectionError("not up yet")
            return await super().create()

    tool, trajectory = Late(), one_turn()
    async with ToolSession({"recorder": tool}, MultiTurnConfig(), TOKENIZER) as tools:
        await tools.call(trajectory, [call(1)])
        await tools.call(trajectory, [call(2)])
    assert [r.status for r in trajectory.tool_calls] == ["error", "ok"]
    assert "ConnectionError: not up yet" in trajectory.tool_calls[0].result
    assert [entry[0] for entry in tool.log[1:]] == ["create", "execute", "release"]


async def test_a_schema_that_refers_to_nowhere_is_told():
    trajectory = one_turn()
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/missing"}}}
    tool = Recorder({"type": "function", "function": {"name": "recorder", "parameters": schema}})
    async with ToolSession({"recorder": tool}, MultiTurnConfig(), TOKENIZER) as tools:
        (message,) = await tools.call(trajectory, [call(1)])
    assert message["content"].startswith("Error: the tool 'recorder' failed: ")
    assert "'/$defs/missing' does not exist" in message["content"]
    assert trajectory.tool_calls[0].status == "error"


async def test_an_exception_in_the_block_is_kept_and_the_tool_released():
    tool = Recorder()
    with pytest.raises(KeyError, match="user"):
        async with ToolSession({"recorder": tool}, MultiTurnConfig(), TOKENIZER) as tools:
            await tools.call(one_turn(), [call(1)])
            raise KeyError("user")
    assert tool.log[-1] == ("release", "i", {})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("text", "not (ToolResponse, reward, metrics)"),
        (("text", 0.0, {}), "not (ToolResponse, reward, metrics)"),
        ((ToolResponse("a"), float("nan"), {}), "the reward nan"),
        ((ToolResponse("a"), 0.0, {"x": "y"}), "could not convert"),
    ],
)
async def test_what_is_no_answer_counts_as_an_exception(answer, told, caplog):
    class Wrong(Recorder):
        async def execute(self, instance_id, parameters, **kwargs):
            return answer

    trajectory = one_turn()
    async with ToolSession({"recorder": Wrong()}, MultiTurnConfig(), TOKENIZER) as tools:
        await tools.call(trajectory, [call(1), call(2)])
    assert [r.status for r in trajectory.tool_calls] == ["error", "error"]
    assert trajectory.turn_rewards == [0.0]
    assert told in trajectory.tool_calls[0].result
    [warning] = [r for r in caplog.records if "'recorder' raised" in r.message]  # once per tool
    assert warning.exc_info is not None


async def test_a_tool_may_have_neither_reward_nor_metrics():
    class Plain(Recorder):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse("ok"), None, None

    trajectory = one_turn()
    async with ToolSession({"recorder": Plain()}, MultiTurnConfig(), TOKENIZER) as tools:
        (message,) = await tools.call(trajectory, [call(1)])
    assert (message["content"], trajectory.tool_calls[0].status) == ("ok", "ok")
    assert trajectory.turn_rewards == [0.0]


async def test_a_tool_that_blocks_the_event_loop_is_named(monkeypatch, caplog):
    monkeypatch.setattr(session, "BLOCKING_S", 0.02)

    class Blocking(Recorder):
        async def execute(self, instance_id, parameters, **kwargs):
            await asyncio.sleep(0)
            time.sleep(0.03)  # noqa: ASYNC251
            return await super().execute(instance_id, parameters)

    trajectory = one_turn()
    caplog.set_level(logging.WARNING)
    async with ToolSession({"recorder": Blocking()}, MultiTurnConfig(), TOKENIZER) as tools:
        await tools.call(trajectory, [call(1), call(2)])
    assert [r.status for r in trajectory.tool_calls] == ["ok", "ok"]
    [warning] = [r.getMessage() for r in caplog.records if "blocked the event loop" in r.message]
    assert warning.startswith("tool 'recorder' blocked") and "run_in_thread" in warning


async def test_release_is_finished_before_a_cancellation_takes_effect():
    entered, may_go = asyncio.Event(), asyncio.Event()

    class Slow(Recorder):
        async def release(self, instance_id, **kwargs):
            entered.set()
            await may_go.wait()
            await super().release(instance_id)

    tool = Slow()

    async def conversation():
        async with ToolSession({"recorder": tool}, MultiTurnConfig(), TOKENIZER) as tools:
            await tools.call(one_turn(), [call(1)])

    task = asyncio.create_task(conversation())
    await entered.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_go.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert tool.log[-1] == ("release", "i", {})
