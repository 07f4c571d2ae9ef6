"""Which MCP server, and the streams to it: what stands between a session and its server."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import anyio
import httpx2
import msgspec
from anyio.abc import ObjectReceiveStream
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client


class MCPConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `config` of an entry: either `command` (stdio) or `url` (streamable HTTP)."""

    command: list[str] | None = None
    env: dict[str, str] = {}
    """Added to HOME, LOGNAME, PATH, SHELL, TERM and USER; a server inherits nothing else."""
    url: str | None = None
    headers: dict[str, str] = {}
    session: Literal["server", "trajectory"] = "server"
    """One session for all trajectories, or one for each (a server that keeps state)."""
    timeout_s: float = 30.0
    """Seconds to start or connect, and again for a call."""
    tools: list[str] | None = None
    """Names of the tools to take; null = all."""
    prefix: str = ""
    """Put before every name that the model sees."""

    @property
    def server(self) -> str:
        """Which server it is, in messages."""
        return f"MCP server {self.url or ' '.join(self.command or [])!r}"


ENDS_WITH_US = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{error.strerror}: {sys.argv[1]!r}")
"""
"""Becomes a server. One that hangs would not see the end of its stdin when we are killed."""


class StderrTail:
    """A pipe for what a server writes to stderr; its end explains why a server was lost."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self.file = os.fdopen(write, "w")
        self._text = b""
        asyncio.get_running_loop().add_reader(self._read, self._take)

    def _take(self) -> None:
        with suppress(BlockingIOError):
            self._text = (self._text + os.read(self._read, 65536))[-65536:]

    def close(self) -> str:
        """The last line, to append to a message."""
        asyncio.get_running_loop().remove_reader(self._read)
        self._take()
        self.file.close()
        os.close(self._read)
        lines = self._text.decode(errors="replace").strip().splitlines()
        return f"; its last line on stderr: {lines[-1].strip()}" if lines else ""


class _Watched(ObjectReceiveStream[Any]):
    """A transport's stream of messages that tells when it ends; the SDK tells only callers."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            self._on_end()
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def open_transport(
    config: MCPConfig, stderr: StderrTail | None, on_end: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """The SDK's pair of streams (from the server, to it); `stderr` for one with a command."""
    if config.command and stderr:
        parameters = StdioServerParameters(
            command=sys.executable, args=["-ISc", ENDS_WITH_US, *config.command], env=config.env
        )
        async with stdio_client(parameters, errlog=stderr.file) as (read, write):
            yield _Watched(read, on_end), write
        return
    assert config.url
    # Not the SDK's client: its pool has 100 connections, and a call that waits for one for 30 s
    # fails, and the session with it.
    http = httpx2.AsyncClient(
        headers=config.headers,
        timeout=httpx2.Timeout(30.0, read=max(300.0, 2 * config.timeout_s), pool=None),
        limits=httpx2.Limits(max_connections=None),
    )
    async with (
        http,
        streamable_http_client(config.url, http_client=http, max_sse_event_size=None) as streams,
    ):
        yield streams


def explain(error: BaseException) -> str:
    """The first error of a group, which is how anyio hands them on."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
