"""Blocking functions off the event loop: those of users, and the tokenizer on long texts."""

import asyncio
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

LONG_TEXT = 16_384
"""Characters (tokens, to decode) from which on a thread does it: it takes some milliseconds."""

T = TypeVar("T")
Calls = SimpleQueue["Callable[[Calls], None]"]
_idle: deque[Calls] = deque()
"""Of the threads that wait for a call; the last one that was busy is used first."""
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


async def off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Tokenize short texts here, where a thread would cost more, and long ones in a thread."""
    if size < LONG_TEXT:
        return function(*args)
    return await asyncio.to_thread(function, *args)


async def run_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await what a function of the user's returns; a plain one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await run_in_thread(function, *args, **kwargs)
    # An async function in a plain decorator, or an object's async __call__, has only begun.
    return await result if inspect.isawaitable(result) else result


async def run_in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Await a blocking function in a daemon thread that does nothing else meanwhile.

    Not `asyncio.to_thread`: functions that hang would fill its few threads, which all of asyncio
    shares, and keep the process from ending. Cancelling stops the wait, not the function.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if not done.done():  # it is when the waiting task was cancelled
            done.set_result((result, error))

    def work(mine: Calls) -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as raised:
            error = raised
        _idle.append(mine)
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    _idle_thread().put(work)
    result, error = await done
    if isinstance(error, Exception):
        raise error
    if error is not None:  # SystemExit ends the call, never the program
        name = getattr(function, "__name__", type(function).__name__)
        raise RuntimeError(f"{name} raised {error!r}") from error
    return result  # type: ignore[return-value]


class DaemonThreads(ThreadPoolExecutor):
    """For `asyncio.to_thread`, as many threads as its own executor has: neither the end of the
    event loop nor that of Python waits for what hangs in one."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Calls = SimpleQueue()
        for _ in range(self._max_workers):
            threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As its base class."""
        future: Future[T] = Future()

        def work(mine: Calls) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(work)
        return future


def _idle_thread() -> Calls:
    """One that waits, or a new one: to start it takes longer than to hand it a call."""
    with suppress(IndexError):
        return _idle.pop()
    calls: Calls = SimpleQueue()
    threading.Thread(target=_serve, args=(calls,), daemon=True, name="minirl-call").start()
    return calls


def _serve(calls: Calls) -> None:
    while True:
        calls.get()(calls)
