"""Programs that mean harm, in every isolation that this machine has."""

import asyncio
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
import yaml

from minirl.config import ConfigError
from minirl.tools import PythonTool, load_tools
from minirl.tools.sandbox import ISOLATIONS, SandboxError

LIMITS = {"timeout_s": 20, "memory_mb": 512, "processes": 12, "disk_mb": 4, "output_bytes": 10_000}


@functools.cache
def make(isolation, **config):
    return PythonTool({**LIMITS, "isolation": isolation, **config})


INSTALLED = [name for name in ISOLATIONS if name != "bwrap" or shutil.which("bwrap")]


def works(isolation):
    try:
        return bool(make(isolation))
    except ValueError:  # the kernel, or the container that we are in, does not allow it
        return False


@pytest.fixture(params=INSTALLED)
def isolation(request):
    if request.param != "none" and not works(request.param):
        pytest.skip(f"isolation {request.param!r} does not work here")
    return request.param


@pytest.fixture
def tool(isolation):
    return make(isolation)


def needs(tool, name):
    if not tool.protection[name]:
        pytest.skip(f"{name} is not protected here")


async def run(tool, code):
    response, reward, metrics = await tool.execute("id", {"code": code})
    assert reward == 0.0
    return response.text, metrics


def alive(marker):
    """Processes of this machine whose command line has `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker.encode() in command:
            found.append(entry.name)
    return found


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - of other processes: there is no event
            await asyncio.sleep(0.01)


def daemon(marker, then):
    """A program with a child in a session of its own that nobody waits for, and `then` to do."""
    return f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, ["{marker}", "-c", "import time; time.sleep(1000)"])
    os._exit(0)
os.wait()
{then}
"""


async def test_output_and_ending_in_plain_words(tool):
    code = "import sys\nprint('a', flush=True)\nprint('b', file=sys.stderr, flush=True)\nprint('c')"
    assert await run(tool, code) == ("a\nb\nc", {"failed": 0.0, "stopped": 0.0})
    assert (await run(tool, "x = 1"))[0] == "[no output]"
    assert await run(tool, "print(1)\nraise SystemExit(3)") == (
        "1\n[exit status 3]",
        {"failed": 1.0, "stopped": 0.0},
    )
    code = "import os\nos.kill(os.getpid(), 11)"
    assert (await run(tool, code))[0] == "[ended by signal SIGSEGV]"
    code = "import os; print(1, flush=True); os.kill(os.getpid(), 40)"
    assert (await run(tool, code))[0] == "1\n[ended by signal 40]"


async def test_errors_of_the_program_are_told_with_their_line(tool):
    text, _ = await run(tool, "x = (1,\n")
    assert "line 1" in text
    assert "SyntaxError: '(' was never closed\n[exit status 1]" in text
    text, _ = await run(tool, "x = 1\nprint(x / 0)")
    assert "line 2, in <module>\n    print(x / 0)" in text
    assert (await run(tool, "print(input())"))[0].endswith(
        "EOFError: EOF when reading a line\n[exit status 1]"
    )


async def test_binary_output_and_text_that_is_not_unicode(tool):
    code = "import sys\nsys.stdout.buffer.write(b'\\xff\\x00ok')"
    assert (await run(tool, code))[0] == "\ufffd\x00ok"
    assert "SyntaxError" in (await run(tool, "print('\ud800')"))[0]


async def test_every_call_is_a_fresh_process_in_an_empty_directory(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert (await run(tool, "open('a.txt', 'w').write('1')\nprint(open('a.txt').read())"))[0] == "1"
    deep = (
        "import os\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')\nos.chmod('.', 0)"
    )
    assert (await run(tool, deep))[0] == "[no output]"
    assert (await run(tool, "import os\nprint(os.listdir())"))[0] == "['main.py']"
    assert os.listdir(tmp_path) == []


async def test_infinite_loop(isolation):
    tool = make(isolation, timeout_s=1.5)
    text, metrics = await run(tool, "print('begin', flush=True)\nwhile True: pass")
    assert text.startswith("begin\n[stopped: it ")
    assert metrics["failed"] == 1.0


async def test_cpu_time_counts_on_its_own(isolation):
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))"
    assert (await run(make(isolation, timeout_s=1.5), code))[0] == "(2, 3)"


async def test_memory_hog(tool):
    text, _ = await run(tool, "x = bytearray(1 << 30)")
    assert "MemoryError\n[exit status 1]" in text


async def test_endless_output_is_cut_while_it_is_read(tool):
    text, metrics = await run(tool, "while True: print('x' * 1000)")
    output, _, ending = text.rpartition("\n")
    assert len(output.encode()) in (9_999, 10_000)
    assert ending == "[stopped: it printed more than 10000 bytes]"
    assert metrics["stopped"] == 1.0


async def test_files_have_a_limit(tool):
    text, _ = await run(tool, "open('a', 'wb').write(bytes(5 << 20))")
    assert "OSError" in text
    text, _ = await run(tool, "for n in range(300): globals()[f'f{n}'] = open('main.py')")
    assert "Too many open files" in text


async def test_processes_have_a_limit(tool):
    needs(tool, "processes")
    code = """
import os, signal
for number in range(1000):
    try:
        if os.fork() == 0:
            signal.pause()
    except OSError as error:
        print(number < 13, error)
        break
"""
    assert (await run(tool, code))[0] == "True [Errno 11] Resource temporarily unavailable"


async def test_fork_bomb(isolation):
    tool, marker = make(isolation, timeout_s=1), f"bomb-{uuid.uuid4().hex}"
    needs(tool, "processes")
    code = f"""
import os, sys, time
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, "main.py", "{marker}"])
while True:
    try:
        os.fork()
        os.setsid()
    except OSError:
        time.sleep(0.01)
"""
    running = asyncio.create_task(run(tool, code))
    await until(lambda: len(alive(marker)) > 5)
    assert "stopped: it did not end within 1 s" in (await running)[0]
    assert alive(marker) == []


async def test_a_daemon_ends_with_the_program_that_started_it(tool):
    marker = f"daemon-{uuid.uuid4().hex}"
    running = asyncio.create_task(run(tool, daemon(marker, "time.sleep(1)\nprint('done')")))
    await until(lambda: alive(marker))
    assert (await running)[0] == "done"
    assert alive(marker) == []


async def test_a_cancelled_call_leaves_no_process(tool):
    marker = f"cancelled-{uuid.uuid4().hex}"
    running = asyncio.create_task(run(tool, daemon(marker, "time.sleep(1000)")))
    await until(lambda: alive(marker))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert alive(marker) == []


async def test_processes_that_are_stopped_end_with_their_call(tool):
    marker = f"stopped-{uuid.uuid4().hex}"
    code = daemon(marker, "import signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    running = asyncio.create_task(run(tool, code))
    await until(lambda: alive(marker))
    children = psutil.Process().children()
    [supervisor] = [p for p in children if "sandbox_launcher" in " ".join(p.cmdline())]
    supervisor.suspend()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert alive(marker) == [] and not supervisor.is_running()


async def test_a_program_that_attacks_its_parent_takes_nothing_with_it(tool):
    marker = f"attack-{uuid.uuid4().hex}"
    code = daemon(marker, "os.kill(os.getppid(), 9)\ntime.sleep(0.5)\nprint('here')")
    try:
        assert (await run(tool, code))[0] == "here"  # process 1 of a namespace cannot be killed
    except SandboxError as error:
        assert str(error) == "the program ended the sandbox that it ran in"
    assert alive(marker) == []


async def test_the_environment_is_empty(tool, monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    code = "import os\nprint(sorted(os.environ))"
    assert "API_KEY" not in (await run(tool, code))[0]
    needs(tool, "files")
    code = "import glob\nfor n in glob.glob('/proc/*/environ'): print(open(n).read())"
    assert (await run(tool, code))[0] == "[no output]"


async def test_files_of_the_trainer_cannot_be_read_or_written(tool, tmp_path):
    needs(tool, "files")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    places = [str(secret), __file__, "/etc/passwd", "/proc/self/environ"]
    reads = f"""
for place in {places}:
    try:
        print(open(place).read())
    except FileNotFoundError:
        print("none")
"""
    assert (await run(tool, reads))[0] == "\n".join(["none"] * 4)
    places = [str(secret), "/x", "/usr/x", f"{sys.base_prefix}/x", "/dev/x"]
    writes = f"""
for place in {places}:
    try:
        open(place, "w")
        print("written")
    except OSError:
        print("no")
"""
    assert (await run(tool, writes))[0] == "\n".join(["no"] * 5)
    assert secret.read_text() == "hunter2"


async def test_no_way_to_more_rights(tool):
    needs(tool, "files")
    code = """
import ctypes, os
libc = ctypes.CDLL(None)
print(os.getuid(), libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, b""))
"""
    assert (await run(tool, code))[0] == "65534 -1 -1"


async def test_a_listener_on_this_machine_cannot_be_reached(tool):
    needs(tool, "network")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('in')"
        text, _ = await run(tool, code)
        assert "in" not in text.splitlines()
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_packages(isolation):
    code = "import numpy\nprint(numpy.arange(3).sum())"
    assert (await run(make(isolation, packages=True), code))[0] == "3"
    assert "No module named 'numpy'" in (await run(make(isolation), code))[0]


async def test_more_calls_than_may_run_at_once(isolation):
    tool = make(isolation, max_concurrent=2)
    texts = await asyncio.gather(*(run(tool, f"print({n})") for n in range(5)))
    assert [text for text, _ in texts] == ["0", "1", "2", "3", "4"]


async def test_programs_end_with_a_trainer_that_is_killed():
    marker = f"orphan-{uuid.uuid4().hex}"
    code = f"""
import asyncio, uvloop
from minirl.tools import PythonTool
async def main():
    tools = [PythonTool({{"isolation": name}}) for name in {[n for n in INSTALLED if works(n)]}]
    answers = await asyncio.gather(*(tool.execute("id", {{"code": "print(1)"}}) for tool in tools))
    print(*(response.text for response, _, _ in answers), flush=True)
    program = {daemon(marker, "time.sleep(1000)")!r}
    await asyncio.gather(*(tool.execute("id", {{"code": program}}) for tool in tools))
uvloop.run(main())
"""
    command = (sys.executable, "-")  # the marker must not be in the command line of the trainer
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    trainer = await asyncio.create_subprocess_exec(*command, **pipes)
    trainer.stdin.write(code.encode())
    trainer.stdin.close()
    answers = (await trainer.stdout.readline()).split()
    assert set(answers) == {b"1"}
    await until(lambda: len(alive(marker)) == len(answers))
    trainer.kill()
    await trainer.wait()
    await until(lambda: not alive(marker))


def test_the_isolation_with_most_protections_is_chosen(isolation):
    chosen = PythonTool(LIMITS).protection
    assert sum(chosen.values()) >= sum(make(isolation).protection.values())
    assert PythonTool({**LIMITS, "require": [n for n in chosen if chosen[n]]}).protection == chosen


def write_tools(tmp_path, **config):
    path = tmp_path / "tools.yaml"
    entry = {"class_name": "minirl.tools.python_tool:PythonTool", "config": config}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeout": 3}, "config.timeout: no such key; did you mean 'timeout_s'"),
        ({"timeout_s": 0}, "config.timeout_s: got 0; expected a positive number"),
        ({"memory_mb": 1.5}, "config.memory_mb: got 1.5; expected a positive whole number"),
        ({"max_concurrent": True}, "config.max_concurrent: got True; expected a positive whole"),
        ({"packages": "yes"}, "config.packages: got 'yes'; expected bool"),
        ({"require": ["net"]}, "config.require: got 'net'; did you mean 'network'"),
        ({"isolation": "docker"}, "config.isolation: got 'docker'.*known: auto, bwrap, "),
        ({"memory_mb": 1, "isolation": "none"}, "config.isolation: 'none' does not work here"),
        (
            {"isolation": "none", "require": ["memory", "network"]},
            "config.require: network: cannot be had here by isolation 'none'; install bubblewrap",
        ),
    ],
)
def test_config_errors_name_key_value_and_remedy(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        load_tools(write_tools(tmp_path, **config))


def test_what_is_not_protected_is_logged_as_a_warning(tmp_path, caplog):
    load_tools(write_tools(tmp_path, isolation="none"))
    assert "isolation 'none'; not protected: network, files" in caplog.text


async def test_packages_below_tmp(isolation, tmp_path, monkeypatch):
    """Where the program gets a /tmp of its own."""
    (tmp_path / "below_tmp.py").write_text("VALUE = 3")
    tmp_path.chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    code = "import below_tmp\nprint(below_tmp.VALUE)"
    assert (await run(make(isolation, packages=True), code))[0] == "3"
