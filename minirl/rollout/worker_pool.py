"""The processes of rollout.agent.num_workers, as rank 0 sees them: start, share out, start again.

rank 0                                     worker process
WorkerPool ── WorkerClient (DEALER) ═ipc═ ServerService ── AgentLoopWorker ══ engines
"""

import asyncio
import itertools
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from minirl.agent_loop import ServerError
from minirl.config import Config
from minirl.rollout.client import JOIN
from minirl.rollout.processes import main_module_stays_here
from minirl.rollout.server import CANCEL, FORGET, Call, ServerClient
from minirl.rollout.wire import to_wire
from minirl.rollout.worker import SampleRequest, WorkerStats
from minirl.rollout.worker_process import CLOSE_S, WorkerSpec, serve_worker
from minirl.types import Trajectory
from minirl.waits import CONVERSATION, WAITS, within

MAX_DEATHS = 3
"""Of all workers within DEATHS_WINDOW_S; one more ends the run. Also the number of times that a
request is begun again."""
DEATHS_WINDOW_S = 60.0
NEWS_INTERVAL_S = 1.0
START_TIMEOUT_S = 600.0
"""For a worker to import and load what it needs, tools included."""

FORKSERVER = multiprocessing.get_context("forkserver")
"""Imports what a worker needs once: seconds and hundreds of MB less per worker than `spawn`. It
ends with rank 0, and has nothing of it: no thread, socket or device is forked."""

logger = logging.getLogger(__name__)


def begin_imports() -> None:
    """Start to import what workers need in a process of its own, to have it when they start."""
    FORKSERVER.set_forkserver_preload([serve_worker.__module__])
    ensure_running()


async def _imports_done() -> None:
    """From now on a process starts in milliseconds, for which the event loop can wait."""
    probe = FORKSERVER.Process(target=os.getpid)
    with main_module_stays_here():
        await asyncio.to_thread(probe.start)
    await asyncio.to_thread(probe.join)


class WorkerLostError(ServerError):
    """A worker process is gone."""


class WorkerClient(ServerClient):
    """Calls one worker process."""

    lost_error = WorkerLostError

    async def run(self, request: SampleRequest) -> list[Trajectory]:
        """See AgentLoopWorker.run; cancelling it cancels it there, too."""
        place = f"prompt {request.row['uid']}, column"
        arguments = {
            "row": {key: to_wire(value, f"{place} {key}") for key, value in request.row.items()},
            "sample_index": request.sample_index,
            "seed": request.seed,
            "sampling_params": dict(request.sampling_params),
        }
        call = Call(next(self._ids), "run", arguments)
        try:
            return await self._result(call, list[Trajectory])
        except asyncio.CancelledError:
            await self.tell(CANCEL, number=call.id)
            raise


@dataclass(eq=False)
class Slot:
    """A place for a worker process."""

    index: int
    log_file: Path
    num_running: int = 0
    client: WorkerClient | None = None
    """None while no process is ready there."""
    was_ready: bool = False
    """Whether the latest process has ever been."""


class WorkerPool:
    """Gives each request to the worker with the fewest running ones; implements Workers.

    A worker that died is started again, and its requests begin again, with the same seeds, on
    whichever is free.
    """

    def __init__(
        self,
        config: Config,
        engines: Sequence[ServerClient],
        folder: Path,
        modules: Sequence[str],
    ) -> None:
        self._config = config
        self._modules = list(modules)
        self._engines = engines
        self._folder = folder
        logs = config.trainer.run_dir / "logs"
        self.slots = [
            Slot(index, logs / f"worker_{index}.log")
            for index in range(config.rollout.agent.num_workers)
        ]
        self._change = asyncio.Event()  # set when a slot has got its worker
        self._deaths: deque[float] = deque()
        self._num_restarts = 0  # since the last rollout ended
        self._homes: dict[str, Slot] = {}
        """By uid of a prompt, where its last sample was begun."""

    async def begin(self, num_requests: int) -> None:
        """See Workers."""
        await self._ask_all("begin")

    async def run(self, request: SampleRequest) -> list[Trajectory]:
        """See Workers."""
        for _ in range(1 + MAX_DEATHS):
            slot, client = await self._least_busy(request.row["uid"])
            self._homes[request.row["uid"]] = slot
            slot.num_running += 1
            try:
                return await client.run(request)
            except WorkerLostError:
                if slot.client is client:
                    slot.client = None
            finally:
                slot.num_running -= 1
        raise WorkerLostError(
            f"prompt {request.row['uid']}, sample {request.sample_index}: each of the "
            f"{1 + MAX_DEATHS} agent-loop workers that ran it died; see {slot.log_file}"
        )

    async def end(self) -> WorkerStats:
        """See Workers. What a worker had counted is lost when it dies."""
        self._homes.clear()
        total, self._num_restarts = WorkerStats(num_restarts=self._num_restarts), 0
        for stats in await self._ask_all("end", WorkerStats):
            total.routing.add(stats.routing)
            total.loop_lag_max_s = max(total.loop_lag_max_s, stats.loop_lag_max_s)
        return total

    async def ready(self) -> None:
        """Wait until every worker is ready."""
        while not_ready := [str(slot.index) for slot in self.slots if not slot.client]:
            with WAITS.on(f"agent-loop worker {', '.join(not_ready)} to start"):
                await self._wait_for_change()

    async def keep(self, slot: Slot) -> None:
        """Have a worker process in `slot`, again and again, until cancelled.

        WorkerLostError when one does not come up, or too many have died.
        """
        for number in itertools.count():
            self._num_restarts += number > 0
            slot.was_ready = False
            spec = self._spec(slot, f"worker_{slot.index}_{number}")
            async with (
                running_process(serve_worker, spec) as (process, ended),
                WorkerClient(spec.address, f"agent-loop worker {slot.index}") as client,
                asyncio.TaskGroup() as tasks,
            ):
                talking = tasks.create_task(self._talk(slot, client, process))
                await ended.wait()
                talking.cancel()
            for engine in self._engines:
                await engine.tell(FORGET, caller=spec.name.encode())
            self._note_death(slot, process.exitcode or 0)

    def _spec(self, slot: Slot, name: str) -> WorkerSpec:
        return WorkerSpec(
            config=self._config,
            index=slot.index,
            name=name,
            address=f"ipc://{self._folder / name}",
            engine_addresses=[engine.address for engine in self._engines],
            modules=self._modules,
            log_file=slot.log_file,
            rank_0_pid=os.getpid(),
        )

    async def _talk(self, slot: Slot, client: WorkerClient, process: Any) -> None:
        """Open the slot when the worker is ready, then hand on what it has to say; kill it when it
        does not answer."""
        CONVERSATION.set("all of its conversations")
        timeout_s = self._config.rollout.agent.worker_timeout_s
        try:
            await within(START_TIMEOUT_S, client.call("begin"))
            slot.client, slot.was_ready = client, True
            self._change.set()
            while True:
                await asyncio.sleep(NEWS_INTERVAL_S)
                with WAITS.on(f"{client.name}, whose event loop is blocked"):
                    news = await within(timeout_s, client.call("news", list[tuple[int, str]]))
                for level, words in news:
                    logger.log(level, "%s: %s", client.name, words)
        except WorkerLostError:
            pass  # `keep` sees that the process has ended
        except TimeoutError:
            words = "%s has not answered for %g s (rollout.agent.worker_timeout_s) and is killed"
            logger.warning(words, client.name, timeout_s if slot.was_ready else START_TIMEOUT_S)
            process.kill()
        finally:
            slot.client = None

    def _note_death(self, slot: Slot, exit_code: int) -> None:
        reason = f"agent-loop worker {slot.index} {_ended(exit_code)}"
        if not slot.was_ready:
            last_line = slot.log_file.read_text(errors="replace").rstrip().rpartition("\n")[2]
            raise WorkerLostError(f"{reason} before it was ready: {last_line}; see {slot.log_file}")
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_DEATHS:
            raise WorkerLostError(
                f"{reason}, and {len(self._deaths)} deaths of workers within {DEATHS_WINDOW_S:g} s "
                f"are too many; see {slot.log_file}"
            )
        logger.warning("%s; it is started again, and so are its requests", reason)

    async def _least_busy(self, uid: str) -> tuple[Slot, WorkerClient]:
        """The one that runs the fewest, or has the other samples of the prompt: a router joins them
        only where it knows of them."""
        while True:
            ready = [(slot, slot.client) for slot in self.slots if slot.client]
            if ready:
                home = self._homes.get(uid)
                return min(ready, key=lambda pair: pair[0].num_running - JOIN * (pair[0] is home))
            with WAITS.on("any agent-loop worker to start again"):
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._change.clear()
        await self._change.wait()

    async def _ask_all(self, method: str, returns: Any = None) -> list[Any]:
        """The answers of all workers that live to give one."""
        clients = [slot.client for slot in self.slots if slot.client]
        calls = (client.call(method, returns) for client in clients)
        with WAITS.on(f"the agent-loop workers to answer {method!r}"):
            answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLostError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, WorkerLostError)]


@asynccontextmanager
async def open_pool(
    config: Config, engines: Sequence[ServerClient], folder: Path, modules: Sequence[str] = ()
) -> AsyncIterator[WorkerPool]:
    """rollout.agent.num_workers processes, ready; their sockets are made in `folder`.

    They import `modules` first, in which components are registered that config and rows name.
    WorkerLostError, in the end or at once, when they cannot be kept alive.
    """
    begin_imports()
    await _imports_done()
    pool = WorkerPool(config, engines, folder, modules)
    async with asyncio.TaskGroup() as tasks:
        keepers = [tasks.create_task(pool.keep(slot)) for slot in pool.slots]
        try:
            await pool.ready()
            yield pool
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)


@asynccontextmanager
async def running_process(
    serve: Callable[[Any], None], spec: Any
) -> AsyncIterator[tuple[Any, asyncio.Event]]:
    """A process that runs `serve(spec)`, and the event of its end; it is asked to end, and then
    made to. `spec` has the `name` of the process and the `address` of its socket."""
    process = FORKSERVER.Process(target=serve, args=(spec,), name=spec.name)
    with main_module_stays_here():
        process.start()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        yield process, ended
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(CLOSE_S):
                await ended.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s and is killed", spec.name, CLOSE_S)
        finally:
            loop.remove_reader(process.sentinel)
            _end_now(process, spec)


def _end_now(process: Any, spec: Any) -> None:
    process.kill()
    process.join()
    Path(spec.address.removeprefix("ipc://")).unlink(missing_ok=True)


def _ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with status {exit_code}"
