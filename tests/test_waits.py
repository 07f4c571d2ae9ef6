import asyncio
import logging
import re
import time
from collections.abc import Callable

import pytest

from minirl.launch import TrainerThread
from minirl.waits import CONVERSATION, Waits, within


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def told(waits: Waits) -> str:
    """A report without its seconds."""
    return re.sub(r" \(\d+ s\)", "", waits.report(0))


async def test_a_report_names_what_is_waited_for_and_by_whom() -> None:
    waits, end = Waits(), asyncio.Event()

    async def conversation(name: str, what: str) -> None:
        CONVERSATION.set(name)
        with waits.on(what):
            await end.wait()

    async with asyncio.TaskGroup() as group:
        for i in range(5):
            group.create_task(conversation(f"0-{i}/0", "generation on engine 1"))
        group.create_task(conversation("0-9/2", "tool 'search'"))
        await asyncio.sleep(0.01)
        assert waits.report(3600) == ""
        assert told(waits).split("\n  ") == [
            "5 for generation on engine 1: 0-0/0, 0-1/0, 0-2/0, ...",
            "1 for tool 'search': 0-9/2",
        ]
        end.set()
    assert told(waits) == ""


async def test_of_waits_within_waits_the_innermost_is_told() -> None:
    waits = Waits()
    with waits.on("reward"):
        with waits.on("a free process"):
            assert told(waits) == "1 for a free process: the run"
            with waits.blocked_by("tool 'slow'"):
                lines = told(waits).split("\n  ")
                assert lines[1] == "1 for the event loop, which tool 'slow' blocks: the run"
        assert told(waits) == "1 for reward: the run"
        inner = asyncio.create_task(_wait(waits, "another task of it"))
        await asyncio.sleep(0)
        assert told(waits) == "1 for another task of it: the run"
        await inner
    assert told(waits) == ""


async def _wait(waits: Waits, what: str) -> None:
    with waits.on(what):
        await asyncio.sleep(0.01)


async def test_a_wait_that_fails_has_ended() -> None:
    waits = Waits()
    try:
        with waits.on("reward"):
            raise LookupError
    except LookupError:
        assert told(waits) == ""


async def test_within_a_time() -> None:
    async def answer() -> int:
        return 3

    assert await within(100, answer()) == 3
    never = asyncio.Event()
    with pytest.raises(TimeoutError):
        await within(0.01, never.wait())
    with pytest.raises(LookupError):
        await within(100, _fail())
    assert len(asyncio.all_tasks()) == 1


async def _fail() -> None:
    raise LookupError


async def test_long_waits_are_logged_while_they_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waits = Waits()
    with waits.explained(0.02):
        with waits.on("tool 'slow'"), waits.on("a model to load", logging.INFO):
            await eventually(lambda: "a model" in caplog.text)
        with waits.on("tool 'slow'"):
            await eventually(lambda: "tool 'slow'" in caplog.text)
    levels = {
        r.getMessage().partition("1 for ")[2].partition(":")[0]: r.levelname for r in caplog.records
    }
    assert levels["a model to load"] == "INFO" and levels["tool 'slow'"] == "WARNING"
    assert "waits of more than 0.02 s (rollout.stall_warning_s):\n  1 for" in caplog.text
    count = len(caplog.records)
    with waits.on("tool 'slow'"):
        await asyncio.sleep(0.06)
    assert len(caplog.records) == count


async def test_a_blocked_event_loop_is_told_with_what_blocks_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def careless_agent() -> None:
        deadline = time.monotonic() + 60
        while "careless_agent" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)

    with Waits().explained(0.05):
        careless_agent()
    message = caplog.records[0].getMessage()
    assert message.startswith("the event loop has been blocked for more than 0.05 s, by\n")
    assert "in careless_agent" in message


async def test_what_the_trainer_does_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from minirl.waits import WAITS

    caplog.set_level(logging.INFO)

    def update_the_policy() -> None:
        deadline = time.monotonic() + 60
        while "update_the_policy" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)

    with WAITS.explained(0.05):
        await TrainerThread()(update_the_policy)
    [record] = [r for r in caplog.records if "update_the_policy" in r.getMessage()][:1]
    assert record.levelname == "INFO" and "1 for the trainer's test_what" in record.getMessage()
