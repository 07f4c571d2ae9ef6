import asyncio
import inspect
import os
import pickle
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from scripted_engine import ScriptedEngine, serving

from minirl.agent_loop import ServerError
from minirl.rollout import server as server_module
from minirl.rollout.server import (
    METHODS,
    AsyncServerBase,
    EngineLostError,
    RequestRefusedError,
    ServerClient,
    ServerService,
)
from minirl.testing import ScriptedServer, byte_tokenizer
from minirl.types import TokenOutput

TOKENIZER = byte_tokenizer()


def make_engine(replies=("ok",), **options) -> ScriptedEngine:
    return ScriptedEngine(ScriptedServer(TOKENIZER, replies, **options))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def generate(client: ServerClient, name: str, prompt=(1, 2), **params) -> TokenOutput:
    return await client.generate(list(prompt), params, f"{name}#0")


async def test_an_answer_is_what_the_server_gave(tmp_path: Path) -> None:
    engine = make_engine(["abc"], weight_version=5)
    async with serving(engine, tmp_path / "s") as client:
        output = await generate(client, "a", prompt=[7, 8, 9], temperature=0.5, seed=2**31)
        assert (await client.stats()).num_requests == 1
        assert await client.call("sleep", level=2) is None
        await client.call("wake_up", tags=["weights"])
        await client.call("update_weights", update_info={"names": ["w"], "shapes": [[2, 3]]})
    direct = await make_engine(["abc"], weight_version=5).generate([7], {}, "a#0")
    assert output == direct and isinstance(output, TokenOutput)
    [request] = engine.script.requests
    assert request.prompt_ids == [7, 8, 9]
    assert request.sampling_params == {"temperature": 0.5, "seed": 2**31}
    assert engine.calls[:2] == [("sleep", 2), ("wake_up", ["weights"])]
    assert engine.calls[2] == ("update_weights", {"names": ["w"], "shapes": [[2, 3]]})


def test_every_method_of_a_server_can_be_called() -> None:
    of_the_process = {"check_health"}  # asked by the process that holds the engine
    methods = {n for n, _ in inspect.getmembers(AsyncServerBase, inspect.iscoroutinefunction)}
    assert {n for n in methods if not n.startswith("_")} == set(METHODS) | of_the_process


async def test_concurrent_calls_interleave(tmp_path: Path) -> None:
    gates = {name: asyncio.Event() for name in "abc"}

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        await gates[request_id].wait()
        return request_id

    async with serving(make_engine(reply), tmp_path / "s") as client, asyncio.TaskGroup() as group:
        calls = {name: group.create_task(generate(client, name)) for name in "abc"}
        for name in "cab":  # not in the order of the calls
            gates[name].set()
            output = await calls[name]
            assert TOKENIZER.decode(output.token_ids[:-1]) == name
            pending = sum(not call.done() for call in calls.values())
            assert (await client.stats()).num_running == pending


async def test_thousands_of_calls_at_once(tmp_path: Path) -> None:
    number, gate = 3000, asyncio.Event()

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if len(engine.script.requests) == number:
            gate.set()
        await gate.wait()  # until all are under way
        return request_id

    engine = make_engine(reply)
    async with serving(engine, tmp_path / "s") as client:
        outputs = await asyncio.gather(*(generate(client, str(i)) for i in range(number)))
    assert engine.most_running == number
    assert [TOKENIZER.decode(o.token_ids[:-1]) for o in outputs] == [*map(str, range(number))]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (EngineLostError("out of memory"), EngineLostError, "engine 0: out of memory"),
        (RequestRefusedError("too long"), RequestRefusedError, "engine 0: too long"),
        (KeyError("weights"), ServerError, "engine 0: KeyError: 'weights'"),
    ],
)
async def test_errors_keep_their_kind(
    tmp_path: Path, error: Exception, kind: type[Exception], message: str
) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if request_id == "bad":
            raise error
        return "fine"

    async with serving(make_engine(reply), tmp_path / "s") as client:
        with pytest.raises(kind) as caught:
            await generate(client, "bad")
        assert type(caught.value) is kind and str(caught.value) == message
        assert (await generate(client, "good")).finish_reason == "stop"  # it goes on


@pytest.mark.parametrize("method", ["no_such_method", "__init__", "check_health"])
async def test_an_unknown_method_is_refused(tmp_path: Path, method: str) -> None:
    async with serving(make_engine(), tmp_path / "s") as client:
        with pytest.raises(ServerError, match=f"engine 0: .*{method}"):
            await client.call(method)
        assert (await client.stats()).num_requests == 0


async def test_wrong_arguments_are_the_callers_error(tmp_path: Path) -> None:
    async with serving(make_engine(), tmp_path / "s") as client:
        with pytest.raises(ServerError, match="unexpected keyword argument 'depth'"):
            await client.call("sleep", depth=2)


async def test_a_cancelled_call_aborts_its_request(tmp_path: Path) -> None:
    started, never = asyncio.Event(), asyncio.Event()

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        started.set()
        await never.wait()
        return ""

    engine = make_engine(reply)
    async with serving(engine, tmp_path / "s") as client:
        call = asyncio.create_task(generate(client, "long"))
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.stats()  # behind the abort on the same socket
        assert engine.aborted == ["long#0"]
        never.set()  # its answer is of no interest any more
        async with asyncio.timeout(120):
            while (await client.stats()).num_running:
                pass


async def test_two_clients_of_one_server(tmp_path: Path, stack: AsyncExitStack) -> None:
    """Both number their calls from 0, and each gets its own answers."""
    engine = make_engine(lambda request_id, turn, prompt_ids: request_id)
    first = await stack.enter_async_context(serving(engine, tmp_path / "s"))
    second = await stack.enter_async_context(ServerClient(first.address))
    calls = [
        generate(client, name) for name, client in zip("abab", [first, second] * 2, strict=True)
    ]
    outputs = await asyncio.gather(*calls)
    assert [TOKENIZER.decode(o.token_ids[:-1]) for o in outputs] == list("abab")


async def test_a_client_may_come_before_its_server(tmp_path: Path, stack: AsyncExitStack) -> None:
    client = await stack.enter_async_context(ServerClient(f"ipc://{tmp_path}/s"))
    call = asyncio.create_task(generate(client, "a"))
    await asyncio.sleep(0.05)
    assert not call.done()
    await stack.enter_async_context(serving(make_engine(), tmp_path / "s"))
    async with asyncio.timeout(120):
        assert (await call).finish_reason == "stop"


def serve_for_ever(socket: Path) -> None:
    engine = make_engine(["never"], delay_s=3600)
    asyncio.run(ServerService(engine, f"ipc://{socket}").serve())


@asynccontextmanager
async def another_process(
    forkserver: ForkServerContext, socket: Path
) -> AsyncIterator[ForkServerProcess]:
    process = forkserver.Process(target=serve_for_ever, args=(socket,))
    await asyncio.to_thread(process.start)
    try:
        yield process
    finally:
        process.kill()
        process.join()


async def test_a_server_that_dies_fails_its_pending_calls(
    tmp_path: Path, forkserver: ForkServerContext
) -> None:
    async with (
        another_process(forkserver, tmp_path / "s") as process,
        ServerClient(f"ipc://{tmp_path}/s", "engine 3") as client,
    ):
        calls = [asyncio.create_task(generate(client, str(i))) for i in range(3)]
        async with asyncio.timeout(120):
            while (await client.stats()).num_requests < 3:
                pass
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            for call in calls:
                with pytest.raises(EngineLostError, match="engine 3: the process that serves it i"):
                    await call
            with pytest.raises(EngineLostError, match="engine 3: the process"):
                await generate(client, "later")


async def test_a_dead_engine_is_named(tmp_path: Path) -> None:
    engine = make_engine()
    engine.is_dead = True
    async with serving(engine, tmp_path / "s") as client:
        with pytest.raises(EngineLostError, match="engine 0: the engine died"):
            await generate(client, "a")


async def test_closing_a_client_fails_what_waits(tmp_path: Path) -> None:
    async with serving(make_engine(delay_s=3600), tmp_path / "s") as client:
        call = asyncio.create_task(generate(client, "a"))
        while not (await client.stats()).num_running:
            pass
    with pytest.raises(EngineLostError, match="engine 0: closed"):
        await call


class Exploit:
    """What unpickling would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


async def test_nothing_is_unpickled(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    payload = pickle.dumps(Exploit(touched))
    service = asyncio.create_task(ServerService(make_engine(), f"ipc://{tmp_path}/s").serve())
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as attacker:
        attacker.connect(f"ipc://{tmp_path}/s")
        await attacker.send(payload)
        with pytest.raises(ExceptionGroup) as caught:
            await service
    assert caught.group_contains(msgspec.DecodeError)
    assert not touched.exists()
    pickle.loads(payload)
    assert touched.exists()  # the payload is a live one


def test_no_pickling_call_stands_in_the_service() -> None:
    source = inspect.getsource(server_module)
    assert not {word for word in ("pyobj", "import pickle", "loads(") if word in source}
