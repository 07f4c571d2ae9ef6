"""An OpenAI client that talks with the policy of an engine_pair.Pair over minirl's endpoint."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
from engine_pair import Pair
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from minirl.agent_loop import AgentLoopContext, SingleTurnAgentLoop
from minirl.agent_loop.tool_parser.base import NO_SCHEMAS, ParsedTurn, Schemas
from minirl.chat import ChatBuilder
from minirl.config import load_config
from minirl.openai.conversation import Conversation
from minirl.openai.endpoint import PolicyEndpoint
from minirl.rollout.client import AsyncLLMServerManager
from minirl.tools.base import ToolCall
from minirl.types import Trajectory

ECHO = {
    "type": "function",
    "function": {
        "name": "echo",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}

EMPTY = SimpleNamespace(content=[])


class EverythingIsACall:
    """Whatever a random policy says calls the tool."""

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """One call of `echo`."""
        arguments = {"text": text}
        call = ToolCall(name="echo", arguments=arguments, text=json.dumps(arguments))
        return ParsedTurn(content="", calls=[call])


@asynccontextmanager
async def endpoint(pair: Pair) -> AsyncIterator[AgentLoopContext]:
    """What agent loops have in a run, over the pair's engine."""
    config = load_config(
        [
            f"model.path={pair.config.model.path}",
            "rollout.multi_turn.format=engine_talk:EverythingIsACall",
            "data.max_prompt_length=256",
            "rollout.response_length=256",
        ]
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    router = AsyncLLMServerManager([pair.client], max_sticky_sessions=99, sticky_imbalance=4)
    context = AgentLoopContext(
        server=router, tokenizer=tokenizer, chat=ChatBuilder(tokenizer), tools={}, config=config
    )
    context.endpoint = PolicyEndpoint(context)
    try:
        yield context
    finally:
        await context.endpoint.aclose()


async def talk(
    context: AgentLoopContext, http: httpx.AsyncClient, number: int
) -> tuple[Trajectory, list[float]]:
    """A streamed turn that calls the tool, the tool's result, and a turn in one piece.

    The trajectory, and the log-probabilities that the client was given.
    """
    conversation = Conversation(SingleTurnAgentLoop(context), {"temperature": 1.0, "seed": number})
    messages: list[Any] = [{"role": "user", "content": f"Say {number}."}]
    given = {"messages": messages, "tools": [ECHO], "logprobs": True, "max_completion_tokens": 40}
    async with context.endpoint.serving(conversation) as access:
        client = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=http)
        ask = partial(client.chat.completions.create, model=access.model, **given)
        message, told = await read_stream(await ask(stream=True))
        text = json.loads(message["tool_calls"][0]["function"]["arguments"])["text"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
        messages += [message, {**result, "content": text[:4]}]
        second = (await ask()).choices[0]
    [trajectory] = conversation.finish()
    return trajectory, told + [token.logprob for token in second.logprobs.content]


async def read_stream(chunks: Any) -> tuple[dict[str, Any], list[float]]:
    """The message with its one call, and the log-probabilities."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    function, logprobs = {"name": "", "arguments": ""}, list[float]()
    async for chunk in chunks:
        [choice] = chunk.choices
        message["content"] += choice.delta.content or ""
        logprobs += [token.logprob for token in (choice.logprobs or EMPTY).content]
        for call in choice.delta.tool_calls or []:
            if call.id:
                message["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
            function["name"] += call.function.name or ""
            function["arguments"] += call.function.arguments or ""
    return message, logprobs
