"""Blocking functions of users, off the event loop."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Await a blocking function in a daemon thread of its own.

    Not `asyncio.to_thread`: functions that hang would fill its few threads, which all of asyncio
    shares, and keep the process from ending. Cancelling stops the wait, not the function.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if not done.done():  # it is when the waiting task was cancelled
            done.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, daemon=True, name=f"minirl-{_name(function)}").start()
    result, error = await done
    if isinstance(error, Exception):
        raise error
    if error is not None:  # SystemExit ends its own thread, never the program
        raise RuntimeError(f"{_name(function)} raised {error!r}") from error
    return result  # type: ignore[return-value]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
