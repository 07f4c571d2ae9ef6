import asyncio
import select
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from minirl.rollout.sockets import MessageSocket

DEADLINE_S = 60


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[MessageSocket, MessageSocket]]:
    """Two ends that know each other."""
    ends = MessageSocket.make(zmq.DEALER), MessageSocket.make(zmq.DEALER)
    ends[0].zmq.bind(f"ipc://{tmp_path}/s")
    ends[1].zmq.connect(f"ipc://{tmp_path}/s")
    ends[1].send(b"here I am")
    async with asyncio.timeout(DEADLINE_S):
        await ends[0].receive()
    yield ends
    for end in ends:
        end.close()


async def take(socket: MessageSocket, number: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while len(messages) < number:
        messages += await socket.receive()
    return messages


async def test_messages_keep_order_and_frames(pair: tuple[MessageSocket, MessageSocket]) -> None:
    here, there = pair
    sent = [[b"%d" % i, b"x" * (i % 7) * 1000] for i in range(5000)]  # beyond any water mark
    for frames in sent:
        here.send(*frames)
    async with asyncio.timeout(DEADLINE_S):
        assert await take(there, len(sent)) == sent


async def test_what_has_come_is_not_overlooked_for_having_sent(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    """To send takes note of what has come: the file descriptor does not tell it any more."""
    here, there = pair
    receiving = asyncio.create_task(here.receive())
    for _ in range(3):
        await asyncio.sleep(0)  # until it waits
    there.send(b"question")
    await_readable(here)
    while is_readable(here):
        here.send(b"another")
    async with asyncio.timeout(DEADLINE_S):
        assert await receiving == [[b"question"]]


async def test_others_run_while_messages_never_end(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    here, there = pair
    there.send(b"is there already")
    await_readable(here)
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    assert await here.receive() == [[b"is there already"]]
    assert ran == [True]


def is_readable(socket: MessageSocket, timeout_s: float = 0.0) -> bool:
    return bool(select.select([socket.zmq.FD], [], [], timeout_s)[0])


def await_readable(socket: MessageSocket) -> None:
    """Without giving the event loop the time to see it."""
    assert is_readable(socket, DEADLINE_S)
