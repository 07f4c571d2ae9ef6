"""A fresh process for one program that nobody has read, with limits and as little reach as can be.

A program may get around what is not in `Sandbox.protection`. With `files` and `network` in force,
what stands between it and the machine is the kernel: as in any container, no defence against a
program that exploits the kernel itself.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

Isolation = Literal["bwrap", "namespaces", "none"]
Ending = Literal["exit", "timeout", "output"]
Protection = Literal["network", "files", "memory", "processes"]

logger = logging.getLogger(__name__)

ISOLATIONS: tuple[Isolation, ...] = ("bwrap", "namespaces", "none")
PROTECTIONS: tuple[Protection, ...] = ("network", "files", "memory", "processes")
LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
MEGABYTE = 1 << 20
OPEN_FILES = 256
PYTHON = os.path.realpath(sys.executable)
"""The interpreter itself: a virtual environment's is a link to it, and is not in view."""
LAUNCH = (PYTHON, "-I", "-S", str(LAUNCHER))
NOBODY = 65534
GRACE_S = 5.0
"""Seconds for the supervisor to end what it supervises, before it is killed itself."""
POLL_S = 0.002
PROBE_TIMEOUT_S = 30.0
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # numpy would start a thread per core, and each of them takes address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may use."""

    timeout_s: float = 10.0
    """Wall-clock seconds, and CPU seconds of each of its processes."""
    memory_mb: int = 1024
    """Address space of each of its processes."""
    processes: int = 32
    """Processes and threads at a time."""
    disk_mb: int = 64
    """Files in its working directory together; without namespaces, each of them."""
    output_bytes: int = 64_000
    """Written to standard output and error together; one byte more ends the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    output: bytes
    """Standard output and error as they were written, at most `output_bytes`."""
    ending: Ending
    """By itself, or stopped for one of two limits."""
    returncode: int | None = None
    """Exit status, or minus the signal that ended it; None when it was stopped."""


class SandboxError(RuntimeError):
    """The sandbox itself failed; the message is the launcher's."""


class Sandbox:
    """Runs Python programs, each in a new process, directory and, where the kernel lets us, world.

    `isolation` is bubblewrap (`bwrap`), the launcher's own namespaces, or `none`: limits only.
    `packages` shows the program this environment's site-packages.
    """

    def __init__(
        self, isolation: Isolation, limits: SandboxLimits, *, packages: bool = False
    ) -> None:
        self.isolation = isolation
        self.limits = limits
        self.packages = packages

    async def run(self, code: str) -> Outcome:
        """Run a program to its end; when this returns or is cancelled, all its processes are dead.

        SandboxError when it could not be started, or took its own sandbox down.
        """
        output = bytearray()
        ending: Ending | None = None
        with _memory_file(code) as program, _memory_file() as report:
            process = self._start(program, report)
            try:
                async with asyncio.timeout(self.limits.timeout_s), _reader(process) as stream:
                    ending = await _read(stream, output, self.limits.output_bytes)
            except TimeoutError:
                ending = "timeout"
            finally:
                await _end(process, wait=ending == "exit")
            if ending == "exit" or process.returncode == 1:  # 1: the supervisor failed and says why
                return Outcome(output=bytes(output), ending=ending, returncode=_returncode(report))
        return Outcome(output=bytes(output), ending=ending)

    @cached_property
    def protection(self) -> dict[Protection, bool]:
        """What a program cannot get around, found out by programs that try it.

        Blocks for some tenths of a second, once. SandboxError when this isolation does not work.
        """
        if self.isolation == "bwrap" and shutil.which("bwrap") is None:
            raise SandboxError("bwrap is not installed")
        with (
            tempfile.TemporaryDirectory() as directory,
            socket.create_server(("127.0.0.1", 0)) as s,
        ):
            secret = Path(directory, "secret")
            secret.write_text("secret")
            values = {
                "secret": str(secret),
                "outside": str(Path(directory, "outside")),
                "port": s.getsockname()[1],
                "memory": self.limits.memory_mb * MEGABYTE,
                "processes": self.limits.processes,
            }
            return json.loads(self._run_blocking(f"values = {values!r}\n{_PROBE}"))

    def _run_blocking(self, code: str) -> str:
        with _memory_file(code) as program, _memory_file() as report:
            process = self._start(program, report)
            try:
                output = process.communicate(timeout=PROBE_TIMEOUT_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise SandboxError(f"a program did not end in {PROBE_TIMEOUT_S:g} s") from error
            if (returncode := _returncode(report)) != 0:
                raise SandboxError(f"a program ended with {returncode}: {output.strip()[-300:]}")
        return output

    def _start(self, program: IO[bytes], report: IO[bytes]) -> subprocess.Popen[bytes]:
        # Not asyncio's: uvloop would fork this process, with all its memory and threads, while
        # Python only borrows its memory (vfork): a fraction of a millisecond.
        return subprocess.Popen(
            [*LAUNCH, json.dumps(self._spec())],
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=report,
            env={},
            start_new_session=True,
        )

    def _spec(self) -> dict[str, Any]:
        """What the launcher is told."""
        limits = self.limits
        cpu_s = math.ceil(limits.timeout_s)
        packages = [sysconfig.get_path("purelib")] if self.packages else []
        view = _view([*SYSTEM, sys.base_prefix, *packages])
        directory = os.path.join(tempfile.gettempdir(), f"minirl-python-{os.urandom(8).hex()}")
        return {
            "isolation": self.isolation,
            "parent": os.getpid(),
            "directory": directory,
            "view": [*view, *DEVICES],
            "disk": limits.disk_mb * MEGABYTE,
            "bwrap": _bwrap(view, limits) if self.isolation == "bwrap" else None,
            # not -I, which would ignore PYTHONPATH: the environment is ours
            "command": [PYTHON, "-s", "-S", "-X", "utf8", "main.py"],
            "environment": ENVIRONMENT | {"PYTHONPATH": ":".join(packages)},
            "limits": {
                "RLIMIT_CPU": (cpu_s, cpu_s + 1),  # a signal that names the limit, then the end
                "RLIMIT_AS": (limits.memory_mb * MEGABYTE,) * 2,
                "RLIMIT_FSIZE": (limits.disk_mb * MEGABYTE,) * 2,
                "RLIMIT_NOFILE": (OPEN_FILES,) * 2,
                "RLIMIT_CORE": (0, 0),
                "RLIMIT_NPROC": (limits.processes,) * 2,
            },
        }


def find_sandbox(limits: SandboxLimits, *, packages: bool = False) -> Sandbox:
    """The isolation with most protections in force on this machine; bubblewrap wins a tie."""
    best: Sandbox | None = None
    for isolation in ISOLATIONS:
        sandbox = Sandbox(isolation, limits, packages=packages)
        try:
            in_force = sum(sandbox.protection.values())
        except SandboxError as error:
            logger.info("isolation %r does not work here: %s", isolation, error)
            continue
        if best is None or in_force > sum(best.protection.values()):
            best = sandbox
        if in_force == len(PROTECTIONS):
            break
    if best is None:
        raise SandboxError("no program can be started, not even without isolation")
    return best


def _view(paths: list[str]) -> list[str]:
    """Those that exist and are not inside another one."""
    found: list[str] = []
    for path in sorted(path for path in set(paths) if os.path.exists(path)):
        if not any(path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


def _bwrap(view: list[str], limits: SandboxLimits) -> list[str]:
    """The command line of bubblewrap up to what the launcher inside it is told."""
    binds = [word for path in view for word in ("--ro-bind", path, path)]
    devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--die-with-parent"),
        *("--size", str(limits.disk_mb * MEGABYTE), "--tmpfs", "/tmp", *binds, *devices),
        *("--symlink", "/tmp", "/dev/shm", "--ro-bind", str(LAUNCHER), "/launcher.py"),
        *("--remount-ro", "/", "--", PYTHON, "-I", "-S", "/launcher.py"),
    ]


@contextmanager
def _memory_file(text: str = "") -> Iterator[IO[bytes]]:
    with os.fdopen(os.memfd_create("minirl"), "w+b") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        yield file


@asynccontextmanager
async def _reader(process: subprocess.Popen[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """The output of a process; it waits, and so does the process, while nobody reads."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: protocol, process.stdout
    )
    with closing(transport):
        yield reader


async def _read(stream: asyncio.StreamReader, into: bytearray, limit: int) -> Ending:
    """Read to the end, which comes when nobody is left who could write, or to `limit` bytes."""
    while chunk := await stream.read(1 << 16):
        into += chunk
        if len(into) > limit:
            del into[limit:]
            return "output"
    return "exit"


async def _end(process: subprocess.Popen[bytes], *, wait: bool) -> None:
    """Return when the supervisor has ended all it supervises, and itself; it is asked to unless
    `wait` says that it does so anyway, and in the end made to."""
    if wait and await _ended(process):
        return
    process.terminate()
    process.send_signal(signal.SIGCONT)  # one that is stopped would not heed it
    if await _ended(process):
        return
    logger.warning("the supervisor %d of a program did not end; killed", process.pid)
    process.kill()
    await _ended(process)


async def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ends within GRACE_S."""
    try:
        async with asyncio.timeout(GRACE_S):
            while process.poll() is None:  # noqa: ASYNC110 - an event would need a thread
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    return True


def _returncode(report: IO[bytes]) -> int:
    """What the launcher's report says; SandboxError when it is no report."""
    text = os.pread(report.fileno(), 10_000, 0).decode(errors="replace").strip()
    try:
        return json.loads(text)["returncode"]
    except ValueError:
        raise SandboxError(text[-300:] or "the program ended the sandbox that it ran in") from None


_PROBE = """
import json, os, signal, socket

def connect():
    socket.create_connection(("127.0.0.1", values["port"]), timeout=2)

def read():
    open(values["secret"]).read()

def write():
    open(values["outside"], "w").write("")

def allocate():
    bytearray(values["memory"])

def fork():
    for _ in range(values["processes"] + 1):
        if os.fork() == 0:
            signal.pause()

def fails(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False

print(json.dumps({
    "network": fails(connect),
    "files": fails(read) and fails(write),
    "memory": fails(allocate),
    "processes": fails(fork),
}), flush=True)
"""
