"""Sessions with MCP servers: opened, watched, opened again when lost, closed."""

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, CallToolResult, Tool

from minirl.tools.base import ToolError
from minirl.tools.mcp_transport import MCPConfig, StderrTail, explain, open_transport
from minirl.waits import WAITS

logger = logging.getLogger(__name__)

MAX_STARTS = 4
"""Sessions that one link may open within START_WINDOW_S; after that its server stays down."""
START_WINDOW_S = 60.0
PROBE_TIMEOUT_S = 10.0
"""Seconds that a server has to list its tools after it left a call unanswered; `timeout_s` where
that is less."""
MAX_CONNECTING = 100
"""Sessions of one entry that connect to a URL at once."""
CLOSE_TIMEOUT_S = 15.0
"""Seconds to close a session. The SDK itself gives a process 2 s each to read what was written to
it, to leave, to heed SIGTERM (one that is stopped does not) and to be gone after SIGKILL."""


class Session:
    """One session, held by a task of its own: the SDK must be left in the task that entered it.

    Calls run in the tasks of their callers, any number at once; a cancelled one cancels itself at
    the server and leaves the session as it is.
    """

    def __init__(
        self,
        config: MCPConfig,
        starting: asyncio.Semaphore,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`starting` limits how many open at once; `report` is told why it could not open or go on.

        Needs a running event loop. Returns at once; what comes next waits until it is open.
        """
        self.ended = False
        # May raise: before there is a task that others wait for.
        self._stderr = StderrTail() if config.command else None
        self.task = asyncio.create_task(self._hold(starting), name=config.server)
        self._config = config
        self._report = report
        self._client: Client | None = None
        self._problem = ""
        self._closing = False
        self._settled = asyncio.Event()
        """It is open, or it never will be."""
        self._wake = asyncio.Event()

    async def list_tools(self) -> list[Tool]:
        """All pages; ToolError when the server cannot be reached."""
        client = await self._opened()
        tools, cursor = [], None
        try:
            async with asyncio.timeout(self._config.timeout_s):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        return tools
        except (MCPError, TimeoutError) as error:
            problem = str(error) or f"no answer within {self._config.timeout_s:g} s"
            raise ToolError(f"{self._config.server} does not list its tools: {problem}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """ToolError when the server refuses the call, or is lost before it has answered."""
        client = await self._opened()
        try:
            return await client.call_tool(name, arguments)
        except asyncio.CancelledError:
            self._wake.set()  # it may be that the whole server hangs, not only this call
            raise
        except (MCPError, RuntimeError) as error:  # RuntimeError: the client is being left
            code = error.code if isinstance(error, MCPError) else CONNECTION_CLOSED
            if code in (CONNECTION_CLOSED, INVALID_REQUEST) and not self.ended:
                # Both codes come from servers that live on as well as from those that are gone.
                await self._probe(client)
            if self.ended:
                raise ToolError(self._lost()) from error
            raise ToolError(str(error)) from error

    async def close(self) -> None:
        """Returns when its server was told, its process is gone and its task has ended."""
        self._closing = True
        self._end("")
        if not self._settled.is_set():  # it starts still, or waits for its turn to
            self.task.cancel()
        if (await asyncio.wait([self.task], timeout=CLOSE_TIMEOUT_S))[1]:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _opened(self) -> Client:
        with WAITS.on(f"{self._config.server} to start"):
            await self._settled.wait()
        if self._client is None:
            raise ToolError(f"{self._config.server} cannot be reached: {self._problem}")
        if self.ended:
            raise ToolError(self._lost())
        return self._client

    def _lost(self) -> str:
        state = ", without its state" if self._config.session == "trajectory" else ""
        return (
            f"the server of this tool ended before it answered; "
            f"it is started again at the next call{state}"
        )

    async def _hold(self, starting: asyncio.Semaphore) -> None:
        try:
            async with AsyncExitStack() as stack:
                transport = open_transport(
                    self._config, self._stderr, lambda: self._end("it exited")
                )
                async with starting, asyncio.timeout(self._config.timeout_s):
                    client = await stack.enter_async_context(Client(transport, cache=None))
                self._client = client
                self._settled.set()
                await self._watch(client)
        except TimeoutError:
            self._problem = f"no answer within {self._config.timeout_s:g} s"
        except Exception as error:
            self._problem = explain(error)
        finally:
            self.ended = True
            self._problem += self._stderr.close() if self._stderr else ""
            self._settled.set()
            if self._report and not self._closing:
                self._report(f"{self._config.server} is lost: {self._problem}")

    async def _watch(self, client: Client) -> None:
        """Until the session ends: see to it that a server that hangs as a whole is given up."""
        while not self.ended:
            await self._wake.wait()
            self._wake.clear()
            if not self.ended:
                await self._probe(client)

    async def _probe(self, client: Client) -> None:
        try:
            async with asyncio.timeout(min(PROBE_TIMEOUT_S, self._config.timeout_s)):
                await client.list_tools()
        except (MCPError, TimeoutError, RuntimeError) as error:
            self._end(str(error) or "it answers no call any more")

    def _end(self, problem: str) -> None:
        if not self.ended:
            self.ended, self._problem = True, problem
            self._wake.set()


class Link:
    """At most one session at a time; another one is opened at the first call after it was lost."""

    def __init__(self, config: MCPConfig, starting: asyncio.Semaphore) -> None:
        self._config = config
        self._starting = starting
        self._sessions: list[Session] = []
        """The last one is in use; those before it are still being closed."""
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The server's answer; ToolError tells the model why there is none."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._session().call(name, arguments)
        except TimeoutError as error:
            limit = f"{self._config.timeout_s:g} s"
            raise ToolError(f"{name!r} did not answer within {limit}") from error

    async def close(self) -> None:
        """Close every session that is open or being opened."""
        await asyncio.gather(*(session.close() for session in self._sessions))

    def _session(self) -> Session:
        if not self._sessions or self._sessions[-1].ended:
            self._count_start()
            self._sessions = [s for s in self._sessions if not s.task.done()]
            self._sessions.append(Session(self._config, self._starting, logger.warning))
        return self._sessions[-1]

    def _count_start(self) -> None:
        now = time.monotonic()
        if len(self._starts) == MAX_STARTS and now - self._starts[0] < START_WINDOW_S:
            raise ToolError(
                f"{self._config.server} was lost {MAX_STARTS} times within {START_WINDOW_S:g} s "
                "and stays down for now; do without this tool"
            )
        self._starts.append(now)


class Links:
    """What the tools of one entry share: one link, or one for each trajectory."""

    def __init__(self, config: MCPConfig) -> None:
        self._config = config
        self._links: dict[str, Link] = {}
        self._users: Counter[str] = Counter()
        # Processes that all start at once would all be too slow to answer in time.
        at_once = (os.cpu_count() or 1) if config.command else MAX_CONNECTING
        self._starting = asyncio.Semaphore(at_once)

    def join(self, instance_id: str) -> None:
        """One more tool of this trajectory will make calls."""
        self._users[self._key(instance_id)] += 1

    async def call(self, instance_id: str, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call over the link of this trajectory."""
        key = self._key(instance_id)
        if key not in self._links:
            self._links[key] = Link(self._config, self._starting)
        return await self._links[key].call(name, arguments)

    async def leave(self, instance_id: str) -> None:
        """The last tool to leave a trajectory closes its link; a shared one stays."""
        key = self._key(instance_id)
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            if key in self._links and self._config.session == "trajectory":
                await self._links.pop(key).close()

    async def close(self) -> None:
        """Close all links."""
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()))

    def _key(self, instance_id: str) -> str:
        return instance_id if self._config.session == "trajectory" else ""
