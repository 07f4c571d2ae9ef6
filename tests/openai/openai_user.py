"""Agents as users write them, for tests to name; worker processes import them too."""

import asyncio
import os
import sys
import threading
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

HTTP = httpx.AsyncClient(verify=False)


def ask(base_url: str, api_key: str, model: str, messages: list[Any], **params: Any) -> Any:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    return client.chat.completions.create(model=model, messages=messages, **params)


async def one_question(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> str:
    """What it returns is no reward."""
    completion = await ask(base_url, api_key, model, row["prompt"])
    return completion.choices[0].message.content


async def rewards_itself(**given: Any) -> Any:
    """The row says what the reward is."""
    await one_question(**given)
    return given["row"]["returns"]


def blocking(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, float]:
    """A plain function, with the blocking client."""
    assert threading.current_thread() is not threading.main_thread()
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(row["prompt"])
        for _ in range(2):
            answer = client.chat.completions.create(model=model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    return {"score": 0.75, "turns": 2, "process": os.getpid()}


class Assistant:
    """An object that is called."""

    async def __call__(self, **given: Any) -> None:
        await one_question(**given)


class Heir(Assistant):
    """Has inherited what is called."""


assistant, heir = Assistant(), Heir()


def traced(agent: Any) -> Any:
    """A plain decorator."""
    return lambda **given: agent(**given)


decorated = traced(one_question)


async def fails(**given: Any) -> None:
    await one_question(**given)
    raise ZeroDivisionError("planted")


async def exits(**given: Any) -> None:
    await one_question(**given)
    sys.exit("planted")


async def endless(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """Asks until it is refused, and does not mind that."""
    messages: list[Any] = list(row["prompt"])
    while True:
        answer = await ask(base_url, api_key, model, messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]


async def silent(**given: Any) -> None:
    """Asks somebody else."""


async def hangs(**given: Any) -> None:
    await one_question(**given)
    await asyncio.sleep(3600)


def takes_nothing() -> None: ...


not_a_function = 3
