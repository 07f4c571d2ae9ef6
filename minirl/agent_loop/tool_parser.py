"""From the text of a turn to content and tool calls, by `rollout.multi_turn.format`."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from minirl.registry import Registry
from minirl.tools.base import ToolCall

MAX_DEPTH = 32
"""Lists and objects within one another, in the arguments of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A turn of the policy, read."""

    content: str
    """What stands outside the calls."""
    calls: list[ToolCall]
    """In the order of the text; a malformed one is in its place, with its problem in words."""


class ToolParser(Protocol):
    """Reads calls; without state, so one serves every conversation."""

    def parse(self, text: str) -> ParsedTurn:
        """Never raises, whatever the text."""
        ...


TOOL_PARSERS: Registry[Callable[[], ToolParser]] = Registry("tool parser")


@TOOL_PARSERS.register("hermes")
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5/3 and others write.

    What stands before `</think>`, or in a `<think>` that is never closed, is thought, not called.
    """

    def parse(self, text: str) -> ParsedTurn:
        """Content and calls of `text`."""
        position = _end_of_thought(text)
        content, calls = [text[:position]], []
        while (start := text.find(_OPEN, position)) >= 0:
            content.append(text[position:start])
            call, position = _read_call(text, start + len(_OPEN))
            calls.append(call)
        content.append(text[position:])
        return ParsedTurn(content="".join(content).strip(), calls=calls)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLANK = re.compile(r"\s*")


def _end_of_thought(text: str) -> int:
    end = text.find("</think>")
    if end >= 0:
        return end
    return len(text) if text.lstrip().startswith("<think>") else 0


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call whose body begins at `start`, and where the text goes on behind it."""
    body = _BLANK.match(text, start).end()  # type: ignore[union-attr]
    try:
        value, end = _DECODER.raw_decode(text, body)  # its strings may hold tags
    except (ValueError, RecursionError) as error:
        return _malformed(text, start, f"it is not valid JSON ({_reason(error)})")
    close = _BLANK.match(text, end).end()  # type: ignore[union-attr]
    if not text.startswith(_CLOSE, close):
        return _malformed(text, start, f"{_CLOSE} must follow its JSON object")
    return _as_call(value, text[start:close].strip()), close + len(_CLOSE)


def _malformed(text: str, start: int, problem: str) -> tuple[ToolCall, int]:
    """A call up to the next closing tag, or to the next opening one, or to the end of the text."""
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close < 0 and following < 0:
        end = after = len(text)
    elif close < 0 or 0 <= following < close:
        end = after = following
    else:
        end, after = close, close + len(_CLOSE)
    return ToolCall(text=text[start:end].strip(), problem=problem), after


def _as_call(value: Any, text: str) -> ToolCall:
    """A call as an object `{name, arguments}`, or what is wrong with it."""
    if not isinstance(value, dict):
        return ToolCall(text=text, problem='it must be a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall(text=text, problem='it needs "name", the name of a tool')
    if not isinstance(arguments, dict):
        return ToolCall(name=name, text=text, problem='it needs "arguments", a JSON object')
    if _depth_exceeds(arguments, MAX_DEPTH):
        return ToolCall(text=text, problem=f"it is nested deeper than {MAX_DEPTH} levels")
    try:  # lone surrogates and overflowing numbers pass Python's decoder, but are no JSON
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return ToolCall(text=text, problem="it holds a character or a number that JSON has not")
    return ToolCall(name=name, arguments=arguments, text=json.dumps(arguments, ensure_ascii=False))


def _depth_exceeds(value: Any, limit: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return limit < 0 or any(_depth_exceeds(v, limit - 1) for v in inner)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0]


_DECODER = json.JSONDecoder(parse_constant=_refuse)
