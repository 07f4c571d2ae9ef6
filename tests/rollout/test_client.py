import asyncio
from typing import Any

import pytest

from minirl.rollout.client import JOIN, AsyncLLMServerManager
from minirl.rollout.server import EngineLostError
from minirl.types import TokenOutput


class HeldServer:
    """Answers when it is told to; that is all a router needs to know of a server."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.held: dict[str, asyncio.Future[TokenOutput]] = {}

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        self.request_ids.append(request_id)
        self.held[request_id] = asyncio.get_running_loop().create_future()
        return await self.held[request_id]

    def answer(self, **fields: Any) -> None:
        """All that wait."""
        for future in self.held.values():
            if not future.done():
                future.set_result(
                    TokenOutput(token_ids=[1], logprobs=[-1.0], finish_reason="stop", **fields)
                )

    @property
    def conversations(self) -> list[str]:
        return [request_id.rpartition("#")[0] for request_id in self.request_ids]


class Setting:
    """A router over held servers, and the calls that are under way."""

    def __init__(self, num_servers: int, *, sessions: int = 100, imbalance: float = 4.0) -> None:
        self.servers = [HeldServer() for _ in range(num_servers)]
        self.router = AsyncLLMServerManager(
            self.servers, max_sticky_sessions=sessions, sticky_imbalance=imbalance
        )
        self.calls: list[asyncio.Task[TokenOutput]] = []

    async def ask(
        self, name: str, num_tokens: int = 10, max_tokens: int = 0, prompt: bytes = b""
    ) -> int:
        """Begin a turn, with a prompt of the conversation's own unless given; the server."""
        before = [len(server.request_ids) for server in self.servers]
        prompt_ids = (list(prompt or name.encode()) * num_tokens)[:num_tokens]
        work = self.router.generate(
            name, prompt_ids=prompt_ids, sampling_params={"max_tokens": max_tokens}
        )
        self.calls.append(asyncio.create_task(work))
        await asyncio.sleep(0)
        after = [len(server.request_ids) for server in self.servers]
        [index] = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return index

    async def answer_all(self, **fields: Any) -> None:
        for server in self.servers:
            server.answer(**fields)
        await asyncio.gather(*self.calls)
        self.calls.clear()

    async def turn(self, name: str, **kwargs: Any) -> int:
        """A whole turn."""
        index = await self.ask(name, **kwargs)
        await self.answer_all()
        return index


async def test_a_first_turn_goes_to_the_least_loaded_by_tokens_in_flight() -> None:
    s = Setting(3)
    assert await s.ask("a", 100) == 0
    assert await s.ask("b", 30) == 1
    assert await s.ask("c", 20, max_tokens=30) == 2
    assert await s.ask("d", 30) == 1  # loads 100, 30, 50: tokens count, not requests
    assert await s.ask("e", 50) == 2  # 100, 60, 50
    assert await s.ask("f", 1) == 1  # 100, 60, 100
    await s.answer_all()
    assert s.router.stats.requests_per_server == {0: 1, 1: 3, 2: 2}


async def test_an_answer_takes_its_load_away() -> None:
    s = Setting(2)
    assert await s.ask("a", 100) == 0
    s.servers[0].answer()
    await asyncio.gather(*s.calls)
    assert await s.ask("b", 10) == 1  # a tie: the next in the round
    assert await s.ask("c", 10) == 0
    await s.answer_all()


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_ties_go_round_robin(turns: int) -> None:
    """Also when conversations of several turns come one after another."""
    s = Setting(3)
    servers = []
    for conversation in range(7):
        servers.append(await s.turn(str(conversation)))
        for _ in range(turns - 1):
            assert await s.turn(str(conversation)) == servers[-1]
    assert servers == [0, 1, 2, 0, 1, 2, 0]


async def test_samples_of_a_prompt_begin_on_the_same_server() -> None:
    s = Setting(2)
    servers = [await s.ask(f"{i}/{k}", prompt=b"prompt %d" % i) for i in range(4) for k in range(8)]
    assert servers == [0] * 8 + [1] * 8 + [0] * 8 + [1] * 8
    await s.answer_all()


async def test_a_large_group_is_shared_out_over_the_servers() -> None:
    s = Setting(2)
    servers = [await s.ask(str(k), max_tokens=90, prompt=b"p") for k in range(4 * JOIN)]
    assert servers[: JOIN + 1] == [0] * JOIN + [1]
    assert abs(servers.count(0) - servers.count(1)) <= JOIN
    await s.answer_all()


async def test_a_prompt_whose_server_is_lost_begins_elsewhere() -> None:
    s = Setting(2)
    assert [await s.ask("a", prompt=b"p"), await s.ask("b", prompt=b"q")] == [0, 1]
    s.servers[0].held["a#0"].set_exception(EngineLostError("engine 0: it died"))
    with pytest.raises(EngineLostError):
        await s.calls.pop(0)
    assert await s.ask("c", prompt=b"p") == 1
    await s.answer_all()


async def test_conversations_are_forgotten() -> None:
    s = Setting(2)
    assert [await s.turn("a", prompt=b"p"), await s.turn("b", prompt=b"q")] == [0, 1]
    s.router.forget_conversations()
    assert [await s.turn("b", prompt=b"q"), await s.turn("a", prompt=b"p")] == [0, 1]
    assert s.router.stats.num_moves == 0


async def test_later_turns_stay_where_the_prefix_cache_is() -> None:
    s = Setting(2)
    assert [await s.ask("a"), await s.ask("b")] == [0, 1]
    await s.answer_all()
    await s.ask("other", 15)  # on server 0, which is no overload
    for _ in range(3):
        assert await s.ask("a") == 0
        assert await s.ask("b") == 1
    await s.answer_all()
    assert s.router.stats.num_moves == 0
    assert s.servers[0].conversations == ["a", "other", "a", "a", "a"]


async def test_an_overloaded_server_is_left_and_the_move_counted() -> None:
    s = Setting(2, imbalance=3.0)
    assert await s.turn("a", num_tokens=10) == 0
    assert await s.ask("big", 30) == 1
    assert await s.ask("small", 10) == 0
    assert await s.ask("huge", 85) == 0  # now 95 to 30
    assert await s.ask("a", 10) == 1  # 95 > 3 * 30
    assert s.router.stats.num_moves == 1
    await s.answer_all()
    assert await s.turn("a") == 1  # it has moved
    assert s.router.stats.num_moves == 1


async def test_up_to_the_imbalance_a_conversation_stays() -> None:
    s = Setting(2, imbalance=3.0)
    assert await s.turn("a", num_tokens=10) == 0
    assert await s.ask("big", 30) == 1
    assert await s.ask("huge", 90) == 0
    assert await s.ask("a", 10) == 0  # 90 is not more than 3 * 30
    await s.answer_all()
    # a tail: beside an idle server, one's own size is what counts
    assert await s.ask("b", 35) == 1
    assert await s.ask("c", 60) == 0
    s.servers[1].answer()
    await asyncio.gather(s.calls[0])
    assert await s.ask("a", 20) == 0
    await s.answer_all()
    assert s.router.stats.num_moves == 0


async def test_only_so_many_conversations_are_remembered() -> None:
    s = Setting(2, sessions=2)
    await s.turn("a")
    await s.turn("b")
    await s.turn("a")  # b is now the least recently used one
    await s.turn("c")
    assert list(s.router._sessions) == ["a", "c"]
    await s.ask("load", 5)  # on server 1; a has been dropped in turn
    assert list(s.router._sessions) == ["c", "load"]
    await s.answer_all()


async def test_request_ids_of_a_conversation_differ() -> None:
    s = Setting(1)
    for _ in range(3):
        await s.turn("a")
    assert len(set(s.servers[0].request_ids)) == 3
    assert s.servers[0].conversations == ["a"] * 3


async def test_what_is_counted() -> None:
    s = Setting(1)
    await s.ask("a", 30)
    await s.ask("b", 10)
    await s.answer_all(num_cached_tokens=8, num_preempted=2)
    stats = s.router.stats
    assert stats.requests_per_server == {0: 2}
    assert (stats.prompt_tokens, stats.generated_tokens) == (40, 2)
    assert (stats.cached_tokens, stats.num_preempted) == (16, 4)
    assert stats.cache_hit_rate == 0.4


async def test_a_lost_server_is_taken_out_and_its_loss_raised() -> None:
    s = Setting(2)
    assert [await s.ask("a", 50), await s.ask("b", 10)] == [0, 1]
    [future] = s.servers[1].held.values()
    future.set_exception(EngineLostError("engine 1: it died"))
    with pytest.raises(EngineLostError, match="engine 1: it died"):
        await s.calls.pop()
    assert await s.ask("b", 10) == 0  # although the other would have less to do
    await s.answer_all()
    await s.ask("c")
    s.servers[0].held[s.servers[0].request_ids[-1]].set_exception(EngineLostError("engine 0: too"))
    with pytest.raises(EngineLostError, match="engine 0: too"):
        await s.calls[0]
    with pytest.raises(EngineLostError, match="no inference server is left"):
        await s.router.generate("d", prompt_ids=[1], sampling_params={})


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
async def test_a_failed_or_cancelled_turn_leaves_no_load(error: BaseException) -> None:
    s = Setting(2)
    assert await s.ask("a", 1000) == 0
    if isinstance(error, asyncio.CancelledError):
        s.calls[0].cancel()
    else:
        s.servers[0].held["a#0"].set_exception(error)
    with pytest.raises(type(error)):
        await s.calls.pop()
    assert await s.ask("b", 10) == 1
    assert await s.ask("c", 10) == 0
    assert s.router.stats.requests_per_server == {}  # answers count
    await s.answer_all()
