"""Shared by the tests of the OpenAI endpoint: a trajectory that OpenAI's own client talks to."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from minirl.agent_loop import AgentLoopContext, SingleTurnAgentLoop
from minirl.chat import ChatBuilder
from minirl.config import Config, load_config
from minirl.openai.conversation import Conversation
from minirl.openai.endpoint import Access, PolicyEndpoint
from minirl.testing import ScriptedServer, byte_tokenizer
from minirl.types import Trajectory

TOKENIZER = byte_tokenizer()
CHAT = ChatBuilder(TOKENIZER)
ROOMY = ["data.max_prompt_length=8192", "rollout.response_length=4096"]  # a token is a byte here
ASK = {"role": "user", "content": "What is 6 * 7?"}
HTTP = httpx.AsyncClient(verify=False)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def call(tool: str, /, **arguments: Any) -> str:
    text = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


@cache
def load(*overrides: str) -> Config:
    return load_config(["model.path=scripted", *ROOMY, *overrides])


@dataclass
class Talk:
    """One trajectory."""

    script: ScriptedServer
    context: AgentLoopContext
    conversation: Conversation
    access: Access
    client: AsyncOpenAI

    async def ask(self, messages: list[Any], **params: Any) -> Any:
        """The completion."""
        return await self.client.chat.completions.create(
            model=self.access.model, messages=messages, **params
        )

    async def say(self, messages: list[Any], **params: Any) -> Any:
        """The message, which `messages` gets as well, as users of the client do it."""
        completion = await self.ask(messages, **params)
        messages.append(completion.choices[0].message)
        return completion.choices[0].message

    def finish(self) -> list[Trajectory]:
        trajectories = self.conversation.finish()
        check_tokens(trajectories, self.script)
        return trajectories


@asynccontextmanager
async def talking(
    replies: Any, *overrides: str, params: Any = None, **options: Any
) -> AsyncIterator[Talk]:
    script = ScriptedServer(TOKENIZER, replies, **options)
    config = load(*overrides)
    context = AgentLoopContext(
        server=script, tokenizer=TOKENIZER, chat=CHAT, tools={}, config=config
    )
    context.endpoint = PolicyEndpoint(context)
    agent_loop = SingleTurnAgentLoop(context)
    conversation = Conversation(agent_loop, params or {"temperature": 1.0, "seed": 5})
    try:
        async with context.endpoint.serving(conversation) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key="any", http_client=HTTP)
            yield Talk(script, context, conversation, access, client)
    finally:
        await context.endpoint.aclose()


def check_tokens(trajectories: list[Trajectory], script: ScriptedServer) -> None:
    """Streams hold exactly what was sampled and observed, and only the former trains, once."""
    prompts = [request.prompt_ids for request in script.requests]
    for t in trajectories:
        assert len(t.response_ids) == len(t.response_mask) == len(t.response_logprobs)
        starts = [0, *t.turn_ends]
        for token, mask, logprob in zip(
            t.response_ids, t.response_mask, t.response_logprobs, strict=True
        ):
            assert logprob == (script.logprob(token) if mask else 0.0)
        for start, end in zip(starts, t.turn_ends, strict=False):
            first = start + t.response_mask[start:end].index(1)
            assert set(t.response_mask[first:end]) == {1}
            asked = t.prompt_ids + t.response_ids[:first]
            assert asked in prompts  # what the engine was given is what the trajectory says
        assert (t.turn_ends[-1] if t.turn_ends else 0) == len(t.response_ids)


def text(trajectory: Trajectory) -> str:
    return TOKENIZER.decode(trajectory.response_ids)


def sampled(trajectory: Trajectory) -> str:
    pairs = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
    return TOKENIZER.decode([token for token, mask in pairs if mask])


@contextmanager
def refused(status: int, code: str | None = None, match: str | None = None) -> Iterator[None]:
    with pytest.raises(APIStatusError, match=match) as caught:
        yield
    assert (caught.value.status_code, caught.value.code) == (status, code)
