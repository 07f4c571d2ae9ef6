"""OpenAI's chat-completions protocol: what a client may send, and what it is told when it may not.

Reference: https://platform.openai.com/docs/api-reference/chat
"""

import json
import re
from typing import Any, Literal

import msgspec

from minirl.tools.base import check_tool_schema

THOUGHT = re.compile(r"\A.*?</think>", re.DOTALL)


class ApiError(Exception):
    """What the client is told: OpenAI's error object and an HTTP status."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Part(msgspec.Struct):
    """A piece of a message's content."""

    type: str
    text: str = ""


class CalledFunction(msgspec.Struct):
    """What an assistant message calls."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class Call(msgspec.Struct):
    """One tool call of an assistant message."""

    function: CalledFunction
    id: str = ""


class Message(msgspec.Struct):
    """One message of a conversation; what else a client sends with it is not looked at."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content in one piece; "" where it is null."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates know messages."""
        # of all templates, only harmony's has a developer
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
                for call in self.tool_calls
            ]
        return message

    def is_same(self, sent: "Message") -> bool:
        """Whether `sent` is this message as a client gives it back.

        Clients write null for "" and text for a list of parts, strip white space, leave thoughts
        out, write arguments anew and give calls other ids; some drop the text beside calls.
        """
        if self.role != "assistant" or sent.role != "assistant":
            return self.role == sent.role and self.text == sent.text
        ours, theirs = _canonical_calls(self), _canonical_calls(sent)
        said = _said(sent)
        return ours == theirs and (said == _said(self) or (bool(ours) and not said))

    def is_identical(self, sent: "Message") -> bool:
        """Whether `sent` has its very text and calls, with their ids."""
        ids, sent_ids = ([call.id for call in m.tool_calls or []] for m in (self, sent))
        return ids == sent_ids and self.text == sent.text


def _said(message: Message) -> str:
    return THOUGHT.sub("", message.text).strip()


def _canonical_calls(message: Message) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    return [(call.function.name, _canonical(call.function.arguments)) for call in calls]


def _canonical(arguments: str | dict[str, Any]) -> str:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # what a client made of it is its own
        return str(arguments)
    return json.dumps(value, sort_keys=True)


class StreamOptions(msgspec.Struct):
    """How to stream."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions`.

    What the engine cannot do, or what would have it sample from another distribution than the
    policy's, is an error and not ignored. `model` may be anything: there is one policy.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """false: of several calls in one turn the client is given the first."""
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Accepted, and without effect here:
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def num_choices(self) -> int:
        """n."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> list[str]:
        """Where to cut the text; those that are empty cut nothing."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]

    @property
    def limit(self) -> int | None:
        """Tokens that the client wants at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reads_calls(self) -> bool:
        """Whether calls in the text are tool calls for the client."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the arguments, by the name of the tool."""
        functions = [tool["function"] for tool in self.tools or []]
        return {f["name"]: f.get("parameters") or {"type": "object"} for f in functions}


def read_request(body: bytes) -> ChatRequest:
    """The request in a body; ApiError says what of it cannot be served."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except msgspec.ValidationError as error:
        raise ApiError(str(error), param=_place(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    for param, is_fine, remedy in _checks(request):
        if not is_fine:
            value = getattr(request, param)
            raise ApiError(f"{param}: got {value!r}; {remedy}", param=param)
    for number, tool in enumerate(request.tools or []):
        try:
            check_tool_schema(tool)
        except ValueError as error:
            raise ApiError(f"tools[{number}]: {error}", param="tools") from error
        tool["function"].pop("strict", None)  # for the API, not for the model to read
    request.tools = request.tools or None
    _check_parts(request.messages)
    return request


def _checks(r: ChatRequest) -> list[tuple[str, bool, str]]:
    """(parameter, whether it can be served, what to write)."""
    free = "the engine samples freely, as it is trained"
    format_type = (r.response_format or {}).get("type", "text")
    return [
        ("messages", bool(r.messages), "at least one message"),
        ("n", 1 <= r.num_choices <= 128, "a number from 1 to 128"),
        ("temperature", r.temperature is None or 0 <= r.temperature <= 2, "from 0 to 2"),
        ("top_p", r.top_p is None or 0 < r.top_p <= 1, "above 0, up to 1"),
        ("min_p", r.min_p is None or 0 <= r.min_p < 1, "from 0, below 1"),
        ("top_k", r.top_k is None or r.top_k == -1 or r.top_k > 0, "above 0, or -1 for all"),
        ("max_tokens", r.max_tokens is None or r.max_tokens > 0, "above 0"),
        ("max_completion_tokens", r.limit is None or r.limit > 0, "above 0"),
        ("top_logprobs", not r.top_logprobs, "the engine gives the sampled token's only; 0"),
        ("stream_options", r.stream_options is None or bool(r.stream), "only with stream"),
        ("tool_choice", r.tool_choice in (None, "auto", "none"), f"{free}: auto or none"),
        ("response_format", format_type == "text", f"{free}: text"),
        ("frequency_penalty", not r.frequency_penalty, f"{free}: 0"),
        ("presence_penalty", not r.presence_penalty, f"{free}: 0"),
        ("logit_bias", not r.logit_bias, f"{free}: null"),
    ]


def _check_parts(messages: list[Message]) -> None:
    for number, message in enumerate(messages):
        for part in message.content if isinstance(message.content, list) else []:
            if part.type != "text":
                place = f"messages[{number}].content"
                raise ApiError(f"{place}: got a part of type {part.type!r}; only text", param=place)


def _place(error: str) -> str | None:
    """The parameter that a message of msgspec's speaks of."""
    found = re.search(r"`\$\.([^`]+)`|field `([^`]+)`", error)
    return (found[1] or found[2]) if found else None
