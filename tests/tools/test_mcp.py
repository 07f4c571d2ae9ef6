"""MCP tools against real servers: tests/tools/mcp_server.py, and one from the package index."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import yaml
from mcp_types import CallToolResult
from scripted_run import make_config, make_project, scripted_run

from minirl.config import ConfigError, MultiTurnConfig
from minirl.testing import byte_tokenizer
from minirl.tools import ToolCall, ToolError, ToolSession, load_tools, mcp_session
from minirl.tools.mcp import MCPTool, as_text, parse_config, select
from minirl.tools.mcp_session import Links
from minirl.types import TokenOutput, Trajectory

SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = {"command": [sys.executable, str(SERVER), "stdio"]}
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def url():
    """A server that comes back when it dies, as one under a supervisor does."""
    command = [sys.executable, str(SERVER), "http", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="module")
def listings(url):
    """What each of the two servers answers when it is asked for its tools; asking takes seconds."""
    return {key: MCPTool.load(config) for key, config in transports(url).items()}


def transports(url):
    return {"stdio": STDIO, "http": {"url": url}}


@pytest.fixture(params=["stdio", "http"])
def tools(request, url, listings):
    """The tools over one transport."""
    return new_tools(request.param, url, listings)


def new_tools(transport, url, listings, prefix="", **config):
    links = Links(parse_config({**transports(url)[transport], **config}))
    tools = [MCPTool(links, tool._tool, prefix) for tool in listings[transport]]
    return {tool.name: tool for tool in tools}


async def execute(tools, name, **arguments):
    return (await tools[name].execute("one", arguments))[0].text


async def close(tools):
    """Close, and see that no task and no process stays."""
    for tool in tools.values():
        await tool.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert processes() == []


def processes():
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.cmdline()[-1:] == ["stdio"]]


def write(tmp_path, *configs):
    entries = [{"class_name": "minirl.tools.mcp:MCPTool", "config": config} for config in configs]
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": entries}))
    return path


def one_turn():
    trajectory = Trajectory(prompt_ids=[0])
    trajectory.append_sampled(TokenOutput(token_ids=[1], logprobs=[0.0], finish_reason="stop"))
    return trajectory


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments, text="{}")


async def ask(session, *calls):
    return [m["content"] for m in await session.call(one_turn(), list(calls))]


async def test_a_file_with_two_servers_one_of_them_from_the_package_index(tmp_path, url):
    path = write(
        tmp_path,
        {"command": [sys.executable, "-m", "mcp_server_time"], "prefix": "clock."},
        {"url": url, "tools": ["recall", "add"]},
    )
    tools = load_tools(path)
    assert list(tools) == ["clock.get_current_time", "clock.convert_time", "add", "recall"]
    schema = tools["add"].tool_schema["function"]
    assert schema["description"] == "Add two integers."
    assert schema["parameters"]["required"] == ["a", "b"]
    assert "'x' is not of type 'integer'" in tools["add"].find_problem({"a": "x", "b": 1})
    noon = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Asia/Kolkata"}
    async with ToolSession(tools, MultiTurnConfig(), TOKENIZER) as session:
        calls = call("clock.convert_time", **noon), call("add", a=2, b=3), call("recall")
        time, *others = await ask(session, *calls)
        assert '"time_difference": "-3.5h"' in time
        assert others == ["5", ""]
        (mars,) = await ask(session, call("clock.get_current_time", timezone="Mars/Base"))
        assert mars.startswith("Error: ") and "Invalid timezone" in mars
    await close(tools)


async def test_results_of_every_kind_and_cancelled_calls(tools):
    assert await execute(tools, "add", a=1, b=2) == "3"
    assert await execute(tools, "picture") == "a cat\n[image/png, 123 bytes]"
    assert await execute(tools, "pages", megabytes=3) == "x" * (3 << 20)
    with pytest.raises(ToolError, match="Error executing tool fail"):
        await execute(tools, "fail")
    await cancel_some(tools)
    await close(tools)


async def cancel_some(tools):
    """A cancelled call leaves the session usable: the same server answers the next one."""
    process = await execute(tools, "pid")
    hanging = [asyncio.create_task(execute(tools, "hang")) for _ in range(5)]
    await asyncio.sleep(0.1)
    for task in hanging:
        task.cancel()
    ended = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert await execute(tools, "pid") == process


async def test_a_dead_server_is_told_at_once_logged_and_started_again(tools, caplog):
    await execute(tools, "remember", word="old")
    waiting = asyncio.create_task(execute(tools, "hang"))
    await asyncio.sleep(0.1)
    with pytest.raises(ToolError, match="ended before it answered; it is started again"):
        await execute(tools, "die")
    with pytest.raises(ToolError, match="ended before it answered"):
        await waiting
    assert await execute(tools, "recall") == ""  # another process
    await close(tools)
    lost = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert len(lost) == 1


async def test_a_server_is_replaced_when_it_dies_unseen_or_hangs_as_a_whole(
    url, listings, monkeypatch, caplog
):
    monkeypatch.setattr(mcp_session, "PROBE_TIMEOUT_S", 0.5)

    async def lost(process):
        while psutil.pid_exists(process) or "is lost" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        caplog.clear()

    async def try_for_a_moment(name):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await execute(tools, name)

    tools = new_tools("stdio", url, listings)
    first = int(await execute(tools, "pid"))
    os.kill(first, signal.SIGKILL)
    await lost(first)
    second = int(await execute(tools, "pid"))  # no call was told
    assert second != first
    await try_for_a_moment("hang")  # only this call hangs
    assert int(await execute(tools, "pid")) == second
    await try_for_a_moment("stall")
    await lost(second)
    third = int(await execute(tools, "pid"))
    os.kill(third, signal.SIGSTOP)
    await try_for_a_moment("pid")
    await lost(third)
    fourth = int(await execute(tools, "pid"))
    os.kill(fourth, signal.SIGSTOP)
    await close(tools)
    assert not psutil.pid_exists(fourth)


async def test_a_call_has_a_deadline_of_its_own(url, listings):
    tools = new_tools("http", url, listings, timeout_s=0.3)
    with pytest.raises(ToolError, match=r"'hang' did not answer within 0.3 s"):
        await execute(tools, "hang")
    await close(tools)


async def test_a_server_that_ends_again_and_again_stays_down_for_a_while(monkeypatch, listings):
    config = parse_config({"command": [sys.executable, "-c", "raise SystemExit('no licence')"]})
    tools = {tool.name: MCPTool(Links(config), tool._tool) for tool in listings["stdio"][:1]}
    for _ in range(mcp_session.MAX_STARTS):
        with pytest.raises(ToolError, match=r"cannot be reached: .*on stderr: no licence"):
            await execute(tools, "add", a=1, b=2)
    with pytest.raises(ToolError, match="was lost 4 times within 60 s and stays down for now"):
        await execute(tools, "add", a=1, b=2)
    monkeypatch.setattr(mcp_session, "START_WINDOW_S", 0.0)
    with pytest.raises(ToolError, match="no licence"):
        await execute(tools, "add", a=1, b=2)
    await close(tools)


async def test_a_session_that_waits_for_its_turn_to_start_is_closed_at_once(listings):
    links = Links(parse_config({**STDIO, "session": "trajectory"}))
    links._starting = asyncio.Semaphore(0)  # too many others start
    tools = {"add": MCPTool(links, listings["stdio"][0]._tool)}
    limits = MultiTurnConfig(tool_timeout_s=1)
    async with ToolSession(tools, limits, TOKENIZER) as session:
        (told,) = await ask(session, call("add", a=1, b=2))
        assert "did not answer within 1 s" in told
    await close(tools)


async def test_a_lack_of_files_is_told_at_once_and_the_next_call_starts_anew(
    url, listings, monkeypatch
):
    tools = new_tools("stdio", url, listings) | new_tools("http", url, listings, prefix="web_")

    def no_pipe():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", no_pipe)
        with pytest.raises(OSError, match="Too many open files"):
            await execute(tools, "add", a=1, b=2)
        assert await execute(tools, "web_add", a=1, b=2) == "3"  # has no stderr to read
    assert await execute(tools, "add", a=1, b=2) == "3"
    await close(tools)


async def test_a_session_for_each_trajectory_is_shared_by_its_tools(url, listings):
    tools = new_tools("stdio", url, listings, session="trajectory")

    async def trajectory(word):
        async with ToolSession(tools, MultiTurnConfig(), TOKENIZER) as session:
            await ask(session, call("remember", word=word))
            return await ask(session, call("recall"))

    assert await asyncio.gather(trajectory("red"), trajectory("blue")) == [["red"], ["blue"]]
    assert processes() == []
    await close(tools)


async def test_chaos(url, listings, monkeypatch):
    """Servers die and trajectories are cancelled under 50 of them; each call has its answer."""
    limits = MultiTurnConfig(tool_timeout_s=300)
    monkeypatch.setattr(mcp_session, "MAX_STARTS", 10_000)
    chance = random.Random(0)
    kinds = {"stdio": "server", "http": "server", "http_each": "trajectory"}
    tools = {}
    for kind, mode in kinds.items():
        transport = kind.removesuffix("_each")
        tools |= new_tools(transport, url, listings, prefix=f"{kind}_", session=mode)
    deaths = {10: "stdio", 20: "http", 30: "http_each"}

    async def trajectory(number):
        answers = []
        async with ToolSession(tools, limits, TOKENIZER) as session:
            for turn in range(3):
                said = [f"{number}/{turn}/{k}" for k in kinds]
                calls = [
                    call(f"{k}_echo", text=text, delay_s=chance.random() / 5)
                    for k, text in zip(kinds, said, strict=True)
                ]
                if turn == 1 and number in deaths:
                    calls.append(call(f"{deaths[number]}_die"))
                heard = await ask(session, *calls)
                assert len(heard) == len(calls)
                answers += zip(said, heard, strict=False)
                if number % 10 == 3 and turn == 1:
                    raise asyncio.CancelledError
        return answers

    done = await asyncio.gather(*map(trajectory, range(50)), return_exceptions=True)
    assert sum(isinstance(d, asyncio.CancelledError) for d in done) == 5
    answers = [answer for d in done if not isinstance(d, BaseException) for answer in d]
    assert len(answers) == 45 * 3 * len(kinds)
    wrong = [(said, heard) for said, heard in answers if said != heard]
    assert all(heard.startswith("Error: ") and "ended" in heard for _, heard in wrong), wrong
    assert 0 < len(wrong) < len(answers)
    async with ToolSession(tools, limits, TOKENIZER) as session:  # all is well again
        calls = [call(f"{kind}_echo", text=kind) for kind in kinds]
        assert await ask(session, *calls) == list(kinds)
    await close(tools)


@pytest.mark.parametrize("hangs", [False, True])
def test_no_server_survives_a_killed_trainer(hangs):
    program = f"""
        import asyncio
        from minirl.tools.mcp import MCPTool, Links, parse_config
        from mcp_types import Tool

        async def main():
            links = Links(parse_config({STDIO!r}))
            links.join("one")
            print((await links.call("one", "pid", {{}})).content[0].text, flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        server = psutil.Process(int(trainer.stdout.readline()))
        if hangs:
            server.suspend()
        trainer.kill()
    psutil.wait_procs([server], timeout=30)
    assert not server.is_running()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config: give either command:"),
        ({"command": ["x"], "url": "http://x"}, "config: give either command:"),
        ({"comand": ["x"]}, "config.comand: no such key; did you mean 'command'"),
        ({"command": ["x", 8000]}, r"config.command\[1\]: Expected `str`, got `int`"),
        ({"command": ["x"], "session": "mine"}, "config.session: Invalid enum value 'mine'"),
        ({"command": ["x"], "headers": {"a": "b"}}, "config.headers: has no meaning beside"),
        ({"url": "http://x", "env": {"a": "b"}}, "config.env: has no meaning beside"),
        ({"url": "http://x", "timeout_s": 0}, r"config.timeout_s: got 0.0; expected more than 0"),
        ({"command": ["no_such_program"]}, "config.command: .*No such file .*no_such_program"),
        (
            {"command": [sys.executable, "-c", "import no_such_module"]},
            "config.command: .*on stderr: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            {"command": ["sh", "-c", "cat >/dev/null"], "timeout_s": 0.2},
            r"MCP server 'sh -c cat >/dev/null' cannot be reached: no answer within 0.2 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "config.url: .*cannot be reached: ConnectError"),
    ],
)
def test_what_cannot_be_used_is_one_message_at_start(tmp_path, caplog, config, message):
    path = write(tmp_path, config)
    with pytest.raises(ConfigError, match=message) as error:
        load_tools(path)
    assert str(error.value).startswith(f"{path}: tools, entry 1: config")
    assert [record for record in caplog.records if record.name.startswith("minirl")] == []
    assert processes() == []


def test_without_the_sdk_a_tool_config_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("minirl.tools.mcp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(
        ConfigError, match=r"ImportError: MCP tools need .* pip install 'mcp>"
    ) as error:
        load_tools(write(tmp_path, STDIO))
    assert "tools, entry 1: tool 'minirl.tools.mcp:MCPTool': it cannot" in str(error.value)


async def test_a_run_asks_for_its_tools_at_start_and_closes_them_at_its_end(tmp_path):
    path = write(tmp_path, {**STDIO, "tools": ["pid"]})
    tools = f"rollout.multi_turn.tool_config_path={path}"
    loop = "rollout.agent.default_agent_loop=tool_agent"
    async with scripted_run(make_config(make_project(tmp_path), "mcp", tools, loop)) as run:
        process = int(await execute(run.inputs.tools, "pid"))
        assert psutil.pid_exists(process)
    assert not psutil.pid_exists(process)
    assert processes() == []


def test_tools_are_taken_by_name(listings):
    offered = [tool._tool for tool in listings["stdio"]]
    config = parse_config({**STDIO, "tools": ["echoo"]})
    with pytest.raises(ValueError, match=r"config.tools: .* has no 'echoo'; did you mean 'echo'"):
        select(offered, config)


def test_contents_that_are_not_text_are_named():
    content = [
        {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
        {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAA="}},
        {"type": "resource_link", "uri": "file:///c", "name": "report"},
    ]
    expected = [
        "[audio/wav, 3 bytes]",
        "inside",
        "[binary, 2 bytes]",
        "[resource report: file:///c]",
    ]
    assert as_text(CallToolResult.model_validate({"content": content})).splitlines() == expected
    structured = {"content": [], "structuredContent": {"rows": [1, 2]}}
    assert as_text(CallToolResult.model_validate(structured)) == '{"rows":[1,2]}'
