import asyncio
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


async def test_none_is_overlooked_while_sending(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    """To send takes note of what has come: the file descriptor does not tell it any more."""
    here, there = pair

    async def echo() -> None:
        while True:
            for frames in await there.receive():
                there.send(*frames)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        echoing = tasks.create_task(echo())
        for i in range(300):  # in lockstep: one that is overlooked is waited for in vain
            here.send(b"a%d" % i)
            here.send(b"b%d" % i)
            assert await take(here, 2) == [[b"a%d" % i], [b"b%d" % i]]
        echoing.cancel()


async def test_others_run_while_messages_never_end(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    here, there = pair
    done = asyncio.Event()

    async def receive_for_ever() -> None:
        while not done.is_set():
            here.send(b"next")
            await there.receive()

    here.send(b"first")
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(receive_for_ever())
        for _ in range(100):
            await asyncio.sleep(0)
        done.set()
