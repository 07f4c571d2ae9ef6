"""ZeroMQ sockets on the event loop.

zmq.asyncio makes a future and several system calls for each message, which is as much work as all
else that a message costs; here all that have come are taken at once.
"""

import asyncio
import contextlib

import zmq


class MessageSocket:
    """A ZeroMQ socket that sends at once and whose messages are awaited; for one event loop."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.zmq = socket
        # No high-water mark: a ROUTER silently drops what does not fit under it.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._news.set)

    @classmethod
    def make(cls, kind: int) -> "MessageSocket":
        """A new socket: zmq.ROUTER, zmq.DEALER."""
        return cls(zmq.Context.instance().socket(kind))

    def send(self, *frames: bytes) -> None:
        """Send a message. What has not left yet is kept, without limit."""
        self.zmq.send_multipart(frames, zmq.NOBLOCK)
        self._news.set()  # to send takes note of what has come, and FD does not tell it any more

    async def receive(self) -> list[list[bytes]]:
        """The frames of all messages that have come, of at least one."""
        await asyncio.sleep(0)  # so that messages without end do not keep others from running
        while not (messages := self._take_all()):
            self._news.clear()
            await self._news.wait()
        return messages

    def _take_all(self) -> list[list[bytes]]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self.zmq.recv_multipart(zmq.NOBLOCK))
        return messages

    def close(self, linger_ms: int = 0) -> None:
        """Close it when what was sent has left, or after `linger_ms`."""
        self._loop.remove_reader(self.zmq.FD)
        self.zmq.close(linger_ms)
