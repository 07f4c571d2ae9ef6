"""Threads for blocking functions: used again, never shared."""

import asyncio
import multiprocessing
import threading
from contextvars import ContextVar

import pytest

from minirl.tools.threads import run_in_thread

NAME: ContextVar[str] = ContextVar("NAME", default="none")


async def test_a_thread_is_used_again_and_by_one_call_at_a_time():
    meeting = threading.Barrier(3)

    def meet() -> int:
        meeting.wait(120)  # passes only where three of them run at once
        return threading.get_ident()

    first = await asyncio.gather(*(run_in_thread(meet) for _ in range(3)))
    again = await asyncio.gather(*(run_in_thread(meet) for _ in range(3)))
    assert len(set(first)) == len(set(again)) == 3
    assert set(first) & set(again)


async def test_a_call_that_hangs_keeps_its_thread_and_no_other():
    release, threads = threading.Event(), list[int]()

    def hang() -> None:
        threads.append(threading.get_ident())
        release.wait(120)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run_in_thread(hang), 0.05)
    assert await run_in_thread(threading.get_ident) not in threads
    release.set()


async def test_a_call_sees_the_variables_of_its_caller_and_leaves_none_behind():
    def set_and_get() -> str:
        before = NAME.get()
        NAME.set("left behind")
        return before

    assert await run_in_thread(set_and_get) == "none"
    NAME.set("caller")
    assert await run_in_thread(set_and_get) == "caller"


def _in_child() -> None:
    assert asyncio.run(asyncio.wait_for(run_in_thread(str, 1), 60)) == "1"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
async def test_a_forked_child_has_threads_of_its_own():
    await run_in_thread(str, 1)
    child = multiprocessing.get_context("fork").Process(target=_in_child)
    child.start()
    await asyncio.to_thread(child.join, 120)
    assert child.exitcode == 0
