"""The life of an agent-loop worker process; worker_pool.py, in rank 0, starts it and talks to it.

It makes its own tokenizer, tools and rewards by the functions that rank 0 uses, has its own event
loop and its own connections to the engines, and runs AgentLoopWorker unchanged.
"""

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from minirl.config import Config
from minirl.rollout.modes import Pace
from minirl.rollout.parts import load_parts, make_router
from minirl.rollout.processes import end_with
from minirl.rollout.server import ServerClient, ServerService
from minirl.rollout.wire import to_wire
from minirl.rollout.worker import (
    LocalWorker,
    SampleRequest,
    WorkerStats,
    loop_lag,
    rare_collections,
)
from minirl.types import Trajectory
from minirl.waits import WAITS

METHODS = ("begin", "run", "end", "news")
CLOSE_S = 5.0
"""For tools to be closed in order; then the process is killed."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker process is told, by the pipe through which multiprocessing starts it."""

    config: Config
    index: int
    name: str
    """Unique among all that ever call an engine: a worker that is started again has a new one."""
    address: str
    """Where it is to be reached."""
    engine_addresses: list[str]
    modules: list[str]
    """To import, for what they register."""
    log_file: Path
    rank_0_pid: int


def serve_worker(spec: WorkerSpec) -> None:
    """Serve until SIGTERM, or until rank 0 is gone."""
    print_to(spec.log_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; rank 0 says when to end
    end_with(spec.rank_0_pid, CLOSE_S)
    uvloop.run(_serve(spec, _collect_logs()))


class News(logging.Handler):
    """Keeps the warnings and errors of this process until rank 0 asks for them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: deque[tuple[int, str]] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it; any thread."""
        words = record.getMessage().encode("utf-8", "backslashreplace").decode()
        self._records.append((record.levelno, words))

    def take(self) -> list[tuple[int, str]]:
        """What has come since the last call: level and words."""
        return [self._records.popleft() for _ in range(len(self._records))]


class ServedWorker:
    """What rank 0 can call."""

    def __init__(self, worker: LocalWorker, lag: list[float], news: News) -> None:
        self._worker = worker
        self._lag = lag
        self._news = news

    async def begin(self) -> None:
        """Count from zero. The first answer says that the process is ready."""
        await self._worker.begin(0)
        self._lag[:] = [0.0]

    async def run(self, **request: Any) -> list[Trajectory]:
        """See AgentLoopWorker.run; the arguments are the fields of a SampleRequest."""
        trajectories = await self._worker.run(SampleRequest(**request))
        return [
            replace(t, ground_truth=to_wire(t.ground_truth, f"ground truth of {t.uid}"))
            for t in trajectories
        ]

    async def end(self) -> WorkerStats:
        """See Workers."""
        return replace(await self._worker.end(), loop_lag_max_s=max(self._lag))

    async def news(self) -> list[tuple[int, str]]:
        """Warnings and errors; that it answers at all says that its event loop is free."""
        return self._news.take()


async def _serve(spec: WorkerSpec, news: News) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = spec.config
    for module in spec.modules:
        importlib.import_module(module)
    async with AsyncExitStack() as stack:
        parts = load_parts(config)
        for tool in parts.tools.values():
            stack.push_async_callback(tool.aclose)
        clients = [
            await stack.enter_async_context(
                ServerClient(address, f"engine {index}", caller=spec.name.encode())
            )
            for index, address in enumerate(spec.engine_addresses)
        ]
        router = make_router(config.rollout.agent, clients, first_server=spec.index)
        pace = Pace(router)
        loops = parts.make_worker(config, pace)
        stack.push_async_callback(loops.aclose)
        worker = LocalWorker(loops, router, pace)
        stack.enter_context(WAITS.explained(config.rollout.stall_warning_s))
        lag = await stack.enter_async_context(loop_lag())
        stack.enter_context(rare_collections())
        service = ServerService(ServedWorker(worker, lag, news), spec.address, METHODS)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(service.serve())
            await stop.wait()
            serving.cancel()


def print_to(path: Path) -> None:
    """stdout and stderr of this process become `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())
    os.close(target)


def _collect_logs() -> News:
    """minirl's log records go to stderr, which is the log file; warnings are news, too."""
    handler, news = logging.StreamHandler(), News()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("minirl")
    log.addHandler(handler)
    log.addHandler(news)
    log.setLevel(logging.INFO)
    return news
