"""From what the engine sampled to what a client is answered."""

import bisect
import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from minirl.agent_loop.tool_parser import Schemas, ToolParser
from minirl.chat import ChatBuilder
from minirl.types import TokenOutput

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer."""

    content: str
    calls: list[dict[str, Any]]
    """OpenAI's objects: `{id, type, function: {name, arguments}}`."""
    finish_reason: FinishReason
    logprobs: list[dict[str, Any]] | None
    """Per sampled token of the text, where the client asked for them."""

    def message(self) -> dict[str, Any]:
        """OpenAI's message object."""
        content = self.content if self.content or not self.calls else None
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": self.calls} if self.calls else message


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request."""

    choices: list[Choice]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def cut_at(stops: Sequence[str], output: TokenOutput, chat: ChatBuilder) -> tuple[TokenOutput, str]:
    """The output up to the token that completes the first of `stops`, and the text before it.

    The engine samples without knowing text. What it sampled behind the stop is dropped here, so the
    tokens that stay are those that it would have sampled had it stopped there.
    """
    text = chat.decode(output.token_ids)
    if not any(stop in text for stop in stops):
        return output, text

    def is_complete(length: int) -> bool:
        part = chat.decode(output.token_ids[:length])
        return any(stop in part for stop in stops)

    length = bisect.bisect_left(range(len(output.token_ids)), True, key=is_complete)
    token_ids, logprobs = output.token_ids[:length], output.logprobs[:length]
    cut = msgspec.structs.replace(
        output, token_ids=token_ids, logprobs=logprobs, finish_reason="stop"
    )
    text = chat.decode(token_ids)
    return cut, text[: min(place for stop in stops if (place := text.find(stop)) >= 0)]


def read_turn(text: str, parser: ToolParser, schemas: Schemas) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls as name and arguments): what is malformed stays in the content."""
    turn = parser.parse(text, schemas)
    calls = [(call.name, call.text) for call in turn.calls if call.problem is None]
    malformed = [call.text for call in turn.calls if call.problem is not None]
    if not calls:
        return text, []
    return "\n".join([turn.content, *malformed]).strip(), calls


def make_calls(calls: list[tuple[str, str]], output: TokenOutput, *place: Any) -> list[dict]:
    """OpenAI's call objects. The ids are the same for the same `place`, the seed and the number of
    messages before, since some templates render them; nine letters and digits, which is what
    Mistral's want."""
    made = []
    for number, (name, arguments) in enumerate(calls):
        digest = hashlib.blake2b(json.dumps([*place, number, output.token_ids]).encode())
        function = {"name": name, "arguments": arguments}
        made.append({"id": digest.hexdigest()[:9], "type": "function", "function": function})
    return made


def token_logprobs(output: TokenOutput, chat: ChatBuilder) -> list[dict[str, Any]]:
    """OpenAI's log-probability objects, without the end of the turn."""
    return [
        {"token": (text := chat.decode([i])), "logprob": lp, "bytes": _bytes(text)}
        | {"top_logprobs": list[Mapping[str, Any]]()}
        for i, lp in zip(output.token_ids, output.logprobs, strict=True)
        if i not in chat.stop_token_ids
    ]


def _bytes(text: str) -> list[int] | None:
    """None for a token that is only a part of a character."""
    return None if "\ufffd" in text else list(text.encode())


def completion_body(completion: Completion, model: str) -> dict[str, Any]:
    """The answer in one piece."""
    return {
        **_header(completion, model, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None}
                if choice.logprobs is not None
                else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(completion.choices)
        ],
        "usage": completion.usage(),
    }


def chunk_bodies(completion: Completion, model: str, include_usage: bool) -> Iterator[Any]:
    """The answer in chunks, as server-sent events carry it."""
    header = _header(completion, model, "chat.completion.chunk")
    if include_usage:
        header["usage"] = None
    for index, choice in enumerate(completion.choices):
        deltas = list(_deltas(choice.message()))
        for number, delta in enumerate(deltas):
            body: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
            body["logprobs"] = None
            if number == 0 and choice.logprobs is not None:
                body["logprobs"] = {"content": choice.logprobs, "refusal": None}
            yield {**header, "choices": [body]}
        end = {"index": index, "delta": {}, "finish_reason": choice.finish_reason}
        yield {**header, "choices": [{**end, "logprobs": None}]}
    if include_usage:
        yield {**header, "choices": [], "usage": completion.usage()}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": message["content"] or ""}
    for number, call in enumerate(message.get("tool_calls") or []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        opened = {"id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        yield {"tool_calls": [{"index": number, **opened}]}
        yield {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]}


def _header(completion: Completion, model: str, kind: str) -> dict[str, Any]:
    return {"id": completion.id, "object": kind, "created": completion.created, "model": model}
