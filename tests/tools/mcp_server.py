"""An MCP server for the tests: `stdio`, or `http PORT`, which serves on when it dies."""

import os
import socket
import sys
import time

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests", log_level="ERROR")
words: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool(structured_output=False)
async def echo(text: str, delay_s: float = 0.0) -> str:
    """Say it again, later."""
    await anyio.sleep(delay_s)
    return text


@server.tool(structured_output=False)
def remember(word: str) -> str:
    """Remember a word; the answer is all of them."""
    words.append(word)
    return " ".join(words)


@server.tool(structured_output=False)
def recall() -> str:
    """All words."""
    return " ".join(words)


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("no such page")


@server.tool()
async def hang() -> str:
    """Never answer this call."""
    await anyio.sleep_forever()
    return ""


@server.tool()
async def stall() -> str:
    """Never answer any call again."""
    time.sleep(1_000_000)  # noqa: ASYNC251
    return ""


@server.tool()
def die() -> str:
    """End the process."""
    os.write(2, b"out of memory\n")
    os._exit(1)


@server.tool(structured_output=False)
def pages(megabytes: int) -> str:
    """A long text."""
    return "x" * (megabytes << 20)


@server.tool(structured_output=False)
def picture() -> list:
    """A caption and a picture."""
    return ["a cat", Image(data=b"\x89PNG" + bytes(119), format="png")]


@server.tool(structured_output=False)
def pid() -> str:
    """The number of this process."""
    return str(os.getpid())


def serve_http(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    while os.fork():  # the child serves; when it dies, so does the next one
        os.wait()
    app = server.streamable_http_app()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        serve_http(int(sys.argv[2]))
