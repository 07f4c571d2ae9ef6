"""One inference server, and the ZeroMQ service through which everybody reaches it.

    leader process                                    any process
    AsyncServerBase ── ServerService (ROUTER) ═══ipc═══ ServerClient (DEALER)

Messages are msgpack; nothing is unpickled from a socket. Agent-loop workers are served in the same
way (worker_process.py, worker_pool.py).
"""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import zmq

from minirl.agent_loop import ServerError
from minirl.config import Config
from minirl.ranks import first_cause
from minirl.registry import Registry
from minirl.rollout.sockets import MessageSocket
from minirl.rollout.wire import decode_extension, encode_number
from minirl.types import TokenOutput
from minirl.waits import WAITS

logger = logging.getLogger(__name__)


class EngineLostError(ServerError):
    """An engine died; the run cannot go on without it."""


class RequestRefusedError(ValueError):
    """The engine refused one request: its prompt or its sampling parameters are at fault."""


@asynccontextmanager
async def engine_answers(what: str, timeout_s: float) -> AsyncIterator[None]:
    """Wait inside for what an engine does between rollouts: EngineLostError when it takes longer.

    No request runs meanwhile, so that nothing shows the progress by which else it is watched.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            with WAITS.on(what):
                yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EngineLostError(
            f"waited for {what} for more than {timeout_s:g} s (rollout.engine_timeout_s)"
        ) from error


class ServerStats(msgspec.Struct, kw_only=True):
    """What a server has done since it started."""

    weight_version: int = 0
    num_requests: int = 0
    """That have ended."""
    num_steps: int = 0
    """Of the engine, each of which gives running requests a token: what shows that it goes on."""
    num_running: int = 0
    """Requests that the server has, also those that wait for room in the engine."""
    num_waiting: int = 0
    """Of them, as the engine's scheduler had it at its last step."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Seconds in which at least one request was in the engine, up to `counted_at`."""
    counted_at: float = 0.0
    """By `time.perf_counter()`."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """One more request is in the engine inside."""
        self.count_time()
        self.num_running += 1
        try:
            yield
        finally:
            self.count_time()
            self.num_running -= 1

    def count_time(self) -> None:
        """Bring `busy_s` up to now: requests may be running still."""
        now = time.perf_counter()
        if self.num_running:
            self.busy_s += now - self.counted_at
        self.counted_at = now

    def count(self, output: TokenOutput) -> None:
        """Add a request that has ended."""
        self.num_requests += 1
        self.generated_tokens += len(output.token_ids)


class AsyncServerBase(ABC):
    """One inference server. `async with` starts and ends it.

    `device_ids` are the CUDA devices of its workers, as many as `rollout.tensor_parallel_size`;
    None on a CPU, where each worker computes with `num_threads`. `executor` is the trainer's one
    thread, where an engine in this process computes; None where that thread waits for other ranks,
    and on a GPU.

    An implementation raises EngineLostError when its engine is dead and RequestRefusedError when a
    request cannot be served as it is.
    """

    in_process: ClassVar[bool] = False
    """Whether it loads its model in this process. Then it starts after the trainer has loaded its
    own: transformers cannot load two models at once."""

    def __init__(
        self,
        config: Config,
        *,
        log_file: Path,
        device_ids: list[int] | None = None,
        num_threads: int = 1,
        executor: Executor | None = None,
    ) -> None:
        self.config = config
        self.log_file = log_file
        self.device_ids = device_ids
        self.num_threads = num_threads
        self.executor = executor

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None: ...

    @abstractmethod
    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """Sample one continuation; `request_id` is unique among the requests in flight."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request early; its `generate` returns what it has with finish_reason `abort`."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free device memory: 1 keeps the weights in host memory, 2 throws them away.

        A request that still runs, as of a task that an agent loop left behind, is aborted; one that
        comes waits until the engine is awake. An engine that frees nothing may go on with them.
        """

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back: `weights`, `kv_cache`, or both (None)."""

    @abstractmethod
    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Hand the workers what they need to reach the trainer's buffers; once."""

    @abstractmethod
    async def start_weight_update(self) -> None:
        """Open a weight update: a request that still runs is aborted, one that comes waits until it
        is finished."""

    @abstractmethod
    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> None:
        """Close the update: the weights count as `version`, cached keys and values are dropped."""

    @abstractmethod
    async def stats(self) -> ServerStats: ...

    @abstractmethod
    async def check_health(self) -> None:
        """Raise EngineLostError when the engine is dead."""


SERVERS: Registry[type[AsyncServerBase]] = Registry("inference engine")


class Call(msgspec.Struct, array_like=True):
    """A request on the wire."""

    id: int
    method: str
    arguments: dict[str, Any]


class Reply(msgspec.Struct, array_like=True):
    """Its answer: a result, or the kind and the words of an error."""

    id: int
    result: msgspec.Raw
    error_kind: str = ""
    error: str = ""


METHODS = (
    "generate",
    "abort",
    "sleep",
    "wake_up",
    "init_weight_transfer",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "stats",
)
ERRORS: dict[str, type[Exception]] = {"lost": EngineLostError, "refused": RequestRefusedError}
NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


CANCEL = "cancel"
"""Ends a call that the same caller made before: `number`."""
FORGET = "forget"
"""Ends all calls of a caller that is gone: `caller`."""


class ServerService:
    """Serves the `methods` of one object on a ROUTER socket; calls run concurrently."""

    def __init__(self, server: Any, address: str, methods: Sequence[str] = METHODS) -> None:
        self.address = address
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            name: getattr(server, name) for name in methods
        }
        self._running: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        """By caller and number of the call."""

    async def serve(self) -> None:
        """Answer until cancelled."""
        socket = MessageSocket.make(zmq.ROUTER)
        socket.zmq.bind(self.address)
        decoder = msgspec.msgpack.Decoder(Call, ext_hook=decode_extension)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for caller, body in await socket.receive():
                        self._begin(tasks, socket, caller, decoder.decode(body))
        finally:
            socket.close()

    def _begin(
        self, tasks: asyncio.TaskGroup, socket: MessageSocket, caller: bytes, call: Call
    ) -> None:
        if call.method in (CANCEL, FORGET):
            self._cancel(caller, call)
            return
        task = tasks.create_task(self._answer(socket, caller, call))
        self._running[caller, call.id] = task
        task.add_done_callback(lambda _: self._running.pop((caller, call.id)))

    def _cancel(self, caller: bytes, call: Call) -> None:
        if call.method == FORGET:
            ended = [key for key in self._running if key[0] == call.arguments["caller"]]
        else:
            ended = [(caller, call.arguments["number"])]
        for key in ended:
            if task := self._running.get(key):  # else it has answered
                task.cancel()

    async def _answer(self, socket: MessageSocket, caller: bytes, call: Call) -> None:
        reply = await self._run(call)
        socket.send(caller, msgspec.msgpack.encode(reply))

    async def _run(self, call: Call) -> Reply:
        """The boundary where a failure becomes a message to whoever asked."""
        try:
            result = await self._methods[call.method](**call.arguments)
            encoded = msgspec.msgpack.encode(result, enc_hook=encode_number)
            return Reply(call.id, msgspec.Raw(encoded))
        except Exception as failure:
            error = first_cause(failure)
            kinds = [kind for kind, cls in ERRORS.items() if isinstance(error, cls)]
            words = str(error) if kinds else f"{type(error).__name__}: {error}"
            if not kinds:
                logger.error("%s failed", call.method, exc_info=failure)
            return Reply(call.id, NOTHING, kinds[0] if kinds else "error", words)


class ServerClient:
    """Calls one server from any process: `async with ServerClient(address) as client`.

    When the process that serves goes away, what is under way fails with `lost_error`, as does
    every later call. `caller`, unique among the clients of the server, is the name by which its
    calls can be ended when it is gone itself (FORGET).
    """

    lost_error: ClassVar[type[ServerError]] = EngineLostError

    def __init__(self, address: str, name: str = "engine", *, caller: bytes = b"") -> None:
        self.address = address
        self.name = name
        self._caller = caller
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._lost = ""
        """Why the connection ended."""

    async def __aenter__(self) -> Self:
        self._socket = MessageSocket.make(zmq.DEALER)
        if self._caller:
            self._socket.zmq.setsockopt(zmq.IDENTITY, self._caller)
        events = self._socket.zmq.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._events = MessageSocket(events)
        self._socket.zmq.connect(self.address)
        self._connection = asyncio.create_task(self._receive())
        self._connection.add_done_callback(self._fail_pending)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._connection.cancel()
        await asyncio.wait([self._connection])
        self._socket.zmq.disable_monitor()
        self._events.close()
        self._socket.close(linger_ms=100)  # for an abort that is still on its way

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """As AsyncServerBase.generate; a cancelled call aborts its request in the engine."""
        try:
            return await self.call(
                "generate",
                TokenOutput,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                request_id=request_id,
            )
        except asyncio.CancelledError:
            await self.tell("abort", request_id=request_id)
            raise

    async def stats(self) -> ServerStats:
        """As AsyncServerBase.stats."""
        return await self.call("stats", ServerStats)

    async def call(self, method: str, returns: Any = None, **arguments: Any) -> Any:
        """Call any method that is served; its errors are raised here with the server's name."""
        return await self._result(Call(next(self._ids), method, arguments), returns)

    async def tell(self, method: str, **arguments: Any) -> None:
        """Call a method, CANCEL or FORGET, and do not wait for what comes of it."""
        self._send(Call(next(self._ids), method, arguments))

    async def _result(self, call: Call, returns: Any) -> Any:
        if self._lost:
            raise self.lost_error(self._lost)
        answer = self._pending[call.id] = asyncio.get_running_loop().create_future()
        try:
            self._send(call)
            reply = await answer
        finally:
            self._pending.pop(call.id, None)
        if reply.error_kind:
            raise ERRORS.get(reply.error_kind, ServerError)(f"{self.name}: {reply.error}")
        return msgspec.msgpack.decode(reply.result, type=returns, ext_hook=decode_extension)

    def _send(self, call: Call) -> None:
        self._socket.send(msgspec.msgpack.encode(call))

    async def _receive(self) -> None:
        """Hand out replies until the other side is gone."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hand_out())
            await self._events.receive()
            raise self.lost_error("the process that serves it is gone")

    async def _hand_out(self) -> None:
        decoder = msgspec.msgpack.Decoder(Reply)
        while True:
            for (body,) in await self._socket.receive():
                reply = decoder.decode(body)
                answer = self._pending.get(reply.id)
                if answer is not None and not answer.done():  # else its caller was cancelled
                    answer.set_result(reply)

    def _fail_pending(self, connection: "asyncio.Task[None]") -> None:
        group = None if connection.cancelled() else connection.exception()
        reason = group.exceptions[0] if isinstance(group, BaseExceptionGroup) else "closed"
        self._lost = f"{self.name}: {reason}"
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self.lost_error(self._lost))
