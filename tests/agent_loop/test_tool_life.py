"""Many conversations with stateful tools at once: none meets another's state, none leaks a tool."""

import asyncio
import random
import uuid

import pytest
from scripted import TOKENIZER, call, check_invariants

from minirl.agent_loop import ToolAgentLoop, run_agent_loop
from minirl.testing import ScriptedServer, make_context
from minirl.tools import BaseTool, ToolResponse, session

NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Write a word down and read all of them.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}


class Notebook(BaseTool):
    """Remembers the words of each trajectory; slow at random."""

    schema = NOTE

    def __init__(self, config):
        super().__init__(config)
        self.random = random.Random(config.get("seed", 0))
        self.words = {}
        self.created, self.released = [], []

    async def pause(self, owner):
        await asyncio.sleep(self.random.random() * self.config["delay_s"])

    async def create(self, instance_id=None, *, owner, **kwargs):
        await self.pause(owner)
        instance_id = uuid.uuid4().hex
        self.words[instance_id] = [owner]
        self.created.append(instance_id)
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        await self.pause(self.words[instance_id][0])
        self.words[instance_id].append(parameters["word"])
        return ToolResponse(" ".join(self.words[instance_id])), 0.0, {}

    async def release(self, instance_id, **kwargs):
        await self.pause(self.words[instance_id][0])
        self.released.append(instance_id)
        del self.words[instance_id]


def row(name):
    return {
        "raw_prompt": [{"role": "user", "content": f"I am {name}."}],
        "uid": name,
        "extra_info": {"tools_kwargs": {"note": {"create_kwargs": {"owner": name}}}},
    }


def reply(request_id, turn, prompt_ids):
    """Three turns of two calls, with words that only this conversation uses; then an answer."""
    name = TOKENIZER.decode(prompt_ids).split("I am ")[1].split(".")[0]
    if turn == 3:
        return f"bye {name}"
    return call("note", word=f"{name}-{turn}a") + call("note", word=f"{name}-{turn}b")


def server():
    draw = random.Random(1)
    return ScriptedServer(TOKENIZER, reply, delay_s=lambda request_id, turn: draw.random() / 200)


async def test_conversations_never_mix():
    names = [f"n{i}" for i in range(40)]
    tool = Notebook({"delay_s": 0.005})
    scripted = server()
    context = make_context(scripted, tools=[tool], overrides=["rollout.response_length=4000"])
    results = await asyncio.gather(
        *(run_agent_loop(ToolAgentLoop(context), {}, row(name)) for name in names)
    )
    for name, [trajectory] in zip(names, results, strict=True):
        assert (trajectory.uid, trajectory.termination) == (name, "stop"), trajectory.error
        assert [r.status for r in trajectory.tool_calls] == ["ok"] * 6
        words = {w for r in trajectory.tool_calls for w in r.result.split()}
        assert words == {name} | {f"{name}-{turn}{x}" for turn in range(3) for x in "ab"}
        prefix = trajectory.token_ids
        own = [r for r in scripted.requests if r.prompt_ids == prefix[: len(r.prompt_ids)]]
        assert len({r.request_id for r in own}) == 1 and len(own) == 4
    assert len(tool.created) == len(names)
    assert sorted(tool.released) == sorted(tool.created)


class Saboteur(Notebook):
    """Now and then fails, hangs, or has its own conversation cancelled, once or twice."""

    def __init__(self, config):
        super().__init__(config)
        self.conversations = {}

    async def pause(self, owner):
        await super().pause(owner)
        fate = self.random.random()
        if fate < 0.1:
            raise OSError("disk full")
        if fate < 0.2:
            await asyncio.Event().wait()
        if fate < 0.3:
            self.conversations[owner].cancel()
            await asyncio.sleep(0)
        if fate < 0.25:
            self.conversations[owner].cancel()

    async def release(self, instance_id, **kwargs):
        owner = self.words.pop(instance_id)[0]
        self.released.append(instance_id)
        await self.pause(owner)


async def test_every_tool_is_released_once_whatever_happens(monkeypatch):
    monkeypatch.setattr(session, "RELEASE_TIMEOUT_S", 0.2)
    tool = Saboteur({"delay_s": 0.005})
    limits = ["rollout.response_length=4000", "rollout.multi_turn.tool_timeout_s=0.2"]
    context = make_context(server(), tools=[tool], overrides=limits)
    for i in range(60):
        work = run_agent_loop(ToolAgentLoop(context), {}, row(f"n{i}"))
        tool.conversations[f"n{i}"] = asyncio.create_task(work)
    tasks = tool.conversations.values()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(o) for o in outcomes} == {list, asyncio.CancelledError}
    assert len(tool.created) > 20
    assert sorted(tool.released) == sorted(tool.created)
    assert not tool.words
    assert not asyncio.all_tasks() - {asyncio.current_task()}
    statuses = {r.status for o in outcomes if isinstance(o, list) for r in o[0].tool_calls}
    assert {"timeout", "error"} <= statuses


async def test_a_hanging_tool_is_released_when_its_conversation_is_cancelled():
    executing = asyncio.Event()

    class Hanging(Notebook):
        async def execute(self, instance_id, parameters, **kwargs):
            executing.set()
            await asyncio.Event().wait()

    tool = Hanging({"delay_s": 0})
    task = asyncio.create_task(
        run_agent_loop(ToolAgentLoop(make_context(server(), tools=[tool])), {}, row("n"))
    )
    await executing.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert tool.released == tool.created != []


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError, Panic])
async def test_a_failing_release_ends_its_trajectory_only_after_all_were_released(error):
    class Stuck(Notebook):
        async def release(self, instance_id, **kwargs):
            raise error("cannot close")

    other = {**NOTE, "function": {**NOTE["function"], "name": "other"}}
    stuck, fine = Stuck({"delay_s": 0}), Notebook({"delay_s": 0})
    fine.tool_schema, fine.name = other, "other"
    text = call("other", word="a") + call("note", word="b")
    scripted = ScriptedServer(TOKENIZER, [text, "bye"])
    context = make_context(scripted, tools=[fine, stuck])
    kwargs = {name: {"create_kwargs": {"owner": "n"}} for name in ("note", "other")}
    given = {**row("n"), "extra_info": {"tools_kwargs": kwargs}}
    [trajectory] = await run_agent_loop(ToolAgentLoop(context), {}, given)
    assert trajectory.termination == "error"
    assert "tool 'note' could not be released" in trajectory.error
    assert fine.released == fine.created
    check_invariants(trajectory, scripted)
