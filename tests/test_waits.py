import asyncio
from typing import Any

from minirl.waits import CONVERSATION, Waits


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
        assert waits.report(0).split("\n  ") == [
            "5 for generation on engine 1: 0-0/0 (0 s), 0-1/0 (0 s), 0-2/0 (0 s), ...",
            "1 for tool 'search': 0-9/2 (0 s)",
        ]
        end.set()
    assert waits.report(0) == ""


async def test_a_wait_that_fails_has_ended() -> None:
    waits = Waits()
    try:
        with waits.on("reward"):
            raise LookupError
    except LookupError:
        assert waits.report(0) == ""


async def test_long_waits_are_logged_while_they_last(caplog: Any) -> None:
    waits = Waits()
    async with waits.explained(0.02):
        with waits.on("tool 'slow'"):
            for _ in range(500):
                await asyncio.sleep(0.01)
                if caplog.records:
                    break
        assert "1 for tool 'slow'" in caplog.records[0].getMessage()
        count = len(caplog.records)
        await asyncio.sleep(0.06)
        assert len(caplog.records) == count
