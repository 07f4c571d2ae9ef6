"""One request's choices, sampled: what requests inside and outside of a trajectory share."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minirl.agent_loop.base import AgentLoopContext, derive_seed
from minirl.chat import ChatTemplateError
from minirl.openai.answers import (
    Choice,
    Completion,
    FinishReason,
    cut_at,
    make_calls,
    read_turn,
    token_logprobs,
)
from minirl.openai.protocol import ApiError, Call, CalledFunction, ChatRequest, Message
from minirl.tools.threads import off_loop
from minirl.types import TokenOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn as tokens, and as the client reads it."""

    output: TokenOutput
    choice: Choice
    seconds: float


async def sample_choices(
    context: AgentLoopContext,
    request: ChatRequest,
    request_id: str,
    prompt_ids: list[int],
    params: dict[str, Any],
) -> list[Sample]:
    """`request.num_choices` continuations of `prompt_ids`, sampled at once.

    ApiError when the engine refuses the request or has aborted it; the first that goes wrong ends
    all of them.
    """
    params = {**params, "stop_token_ids": list(context.chat.stop_token_ids)}

    async def sample(index: int) -> Sample:
        own, started = dict(params), time.perf_counter()
        if params.get("seed") is not None:
            own["seed"] = derive_seed(params["seed"], index)
        output = await _generate(context, request_id, prompt_ids, own)
        seconds = time.perf_counter() - started
        size = len(output.token_ids)
        return await off_loop(size, _read, context, request, output, own.get("seed"), seconds)

    tasks = [asyncio.ensure_future(sample(index)) for index in range(request.num_choices)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def complete(samples: list[Sample], num_prompt_tokens: int) -> Completion:
    """The answer that holds all of them."""
    return Completion(
        choices=[sample.choice for sample in samples],
        prompt_tokens=num_prompt_tokens,
        cached_tokens=max(sample.output.num_cached_tokens for sample in samples),
        completion_tokens=sum(len(sample.output.token_ids) for sample in samples),
    )


async def render_prompt(context: AgentLoopContext, request: ChatRequest) -> list[int]:
    """Tokens of all messages, ready for an answer; ApiError where the template cannot."""
    return await _render(request, context.chat.prompt, for_template(request.messages))


async def render_observation(
    context: AgentLoopContext, request: ChatRequest, first: int, is_closed: bool
) -> list[int]:
    """Tokens of the messages from `first` on, behind the answer before them.

    They begin with the end of that turn if its last token is not one (`is_closed`): the client's
    limit or a stop string has cut it, and the policy did not sample it.
    """
    tools = request.tools or None
    end = "" if is_closed else context.chat.turn_end(False, tools).inner
    messages = for_template(request.messages)[first:]
    return context.chat.encode(end) + await _render(request, context.chat.observation, messages)


def answer_message(choice: Choice) -> Message:
    """The message that the client is given."""
    calls = [
        Call(id=call["id"], function=CalledFunction(**call["function"])) for call in choice.calls
    ]
    return Message(role="assistant", content=choice.content, tool_calls=calls or None)


async def _render(
    request: ChatRequest, render: Callable[..., list[int]], messages: list[dict[str, Any]]
) -> list[int]:
    size = sum(len(message["content"]) for message in messages)
    try:
        return await off_loop(size, render, messages, request.tools or None)
    except ChatTemplateError as error:
        raise ApiError(f"messages: {error}", param="messages") from error


def for_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Results of tools get the names of the calls that they answer: some templates show them."""
    names = {call.id: call.function.name for m in messages for call in m.tool_calls or []}
    rendered = []
    for message in messages:
        name = names.get(message.tool_call_id or "") if message.role == "tool" else None
        rendered.append({**({"name": name} if name else {}), **message.for_template()})
    return rendered


async def _generate(
    context: AgentLoopContext, request_id: str, prompt_ids: list[int], params: dict[str, Any]
) -> TokenOutput:
    try:
        output = await context.server.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=params
        )
    except ValueError as error:  # the engine's word for a request that is at fault
        raise ApiError(str(error)) from error
    if output.finish_reason == "abort":
        raise ApiError("the engine aborted the request", status=500, code="aborted")
    return output


def _read(
    context: AgentLoopContext, request: ChatRequest, output: TokenOutput, seed: Any, seconds: float
) -> Sample:
    output, text = cut_at(request.stop_strings, output, context.chat)
    content, calls = text, list[tuple[str, str]]()
    if request.reads_calls:
        content, calls = read_turn(text, context.parser, request.schemas)
    if request.parallel_tool_calls is False:
        del calls[1:]
    reason: FinishReason = "tool_calls" if calls else "stop"
    if output.finish_reason == "length":
        reason = "length"
    choice = Choice(
        content=content,
        calls=make_calls(calls, output, seed, len(request.messages)),
        finish_reason=reason,
        logprobs=token_logprobs(output, context.chat) if request.logprobs else None,
    )
    return Sample(output=output, choice=choice, seconds=seconds)
