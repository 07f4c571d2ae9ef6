"""The contract of a tool parser, and what the parsers share."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from minirl.registry import Registry
from minirl.tools.base import ToolCall

MAX_DEPTH = 32
"""Lists and objects within one another, in the arguments of a call."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments, by the name of the tool."""
NO_SCHEMAS: Schemas = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A turn of the policy, read."""

    content: str
    """What stands outside the calls."""
    calls: list[ToolCall]
    """In the order of the text; a malformed one is in its place, with its problem in words."""


class ToolParser(Protocol):
    """Reads calls; without state, so one serves every conversation."""

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Never raises, whatever the text.

        `schemas` give types to arguments that a format writes as bare text; where it writes JSON
        or Python, they are not looked at. Whether arguments fit is asked later, by the tool.
        """
        ...


TOOL_PARSERS: Registry[Callable[[], ToolParser]] = Registry("tool parser")


class Malformed(Exception):
    """Why a call cannot be read, in words for the model.

    Up to `end` the text was read, and belongs to the call whatever it looks like.
    """

    def __init__(self, problem: str, end: int = 0) -> None:
        super().__init__(problem)
        self.end = end


Read = Callable[[str, re.Match[str]], tuple[list[ToolCall], int]]
"""(text, match of the opening) to calls and where the text goes on behind them, or Malformed."""

NEVER = re.compile(r"(?!)")
BLANK = re.compile(r"\s*")
THINK = (("<think>", "</think>"),)


def scan(
    text: str,
    opening: re.Pattern[str],
    read: Read,
    *,
    until: re.Pattern[str],
    following: re.Pattern[str] = NEVER,
    thoughts: tuple[tuple[str, str], ...] = THINK,
) -> ParsedTurn:
    """Read a call at every `opening`, and at every `following` directly behind a call.

    A malformed call reaches to the first `until` (swallowed) or to the end of the text. What stands
    before the first `</think>`, or in a `<think>` that is never closed, is thought, not called; an
    `opening` with `\\A` matches behind that.
    """
    start = _end_of_thought(text, thoughts)
    content, calls, turn = [text[:start]], [], text[start:]
    position = 0
    while match := opening.search(turn, position):
        content.append(turn[position : match.start()])
        while match:
            found, position = _read_or_report(turn, match, read, until)
            calls += found
            match = following.match(turn, position)
    content.append(turn[position:])
    return ParsedTurn(content="".join(content).strip(), calls=calls)


def _read_or_report(
    text: str, opening: re.Match[str], read: Read, until: re.Pattern[str]
) -> tuple[list[ToolCall], int]:
    try:
        return read(text, opening)
    except Malformed as error:
        # An empty opening must not be found again as the end of its own call.
        stop = until.search(text, max(opening.end(), opening.start() + 1, error.end))
        end, after = stop.span() if stop else (len(text), len(text))
        return [ToolCall(text=text[opening.end() : end].strip(), problem=str(error))], after


def _end_of_thought(text: str, thoughts: tuple[tuple[str, str], ...]) -> int:
    for opening, closing in thoughts:
        end = text.find(closing)
        if end >= 0:
            return end + len(closing)
        if text.lstrip().startswith(opening):
            return len(text)
    return 0


def skip_blank(text: str, position: int) -> int:
    """The next index that is no white space."""
    return BLANK.match(text, position).end()  # type: ignore[union-attr]


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at `position`, and the index behind it; Malformed when there is none.

    Its end is where the value ends, so its strings may hold the format's own tags.
    """
    try:
        return _DECODER.raw_decode(text, skip_blank(text, position))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not valid JSON ({_reason(error)})", position) from error


def as_call(value: Any, text: str, *keys: str) -> ToolCall:
    """A call as an object `{name, arguments}`, or what is wrong with it.

    `keys` are the names that the arguments may have, the format's own first; `text` is the call as
    the model wrote it.
    """
    key = next((k for k in keys if isinstance(value, dict) and k in value), keys[0])
    if not isinstance(value, dict):
        return ToolCall(text=text, problem=f'it must be a JSON object with "name" and "{key}"')
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        return ToolCall(text=text, problem='it needs "name", the name of a tool')
    if not isinstance(arguments, dict):
        name = name.encode("utf-8", "replace").decode()  # a lone surrogate could not be written
        return ToolCall(name=name, text=text, problem=f'it needs "{key}", a JSON object')
    return make_call(name, arguments, text)


def make_call(name: str, arguments: dict[str, Any], text: str) -> ToolCall:
    """A call, unless its arguments are no JSON after all; `text` is as the model wrote it."""
    if depth_exceeds(arguments, MAX_DEPTH):
        return ToolCall(text=text, problem=f"it is nested deeper than {MAX_DEPTH} levels")
    try:  # lone surrogates and overflowing numbers pass Python's decoder, but are no JSON
        written = _ENCODER.encode(arguments)
        (name + written).encode()
    except ValueError:
        return ToolCall(text=text, problem="it holds a character or a number that JSON has not")
    return ToolCall(name=name, arguments=arguments, text=written)


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested within one another more than `limit` times."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return limit < 0 or any(depth_exceeds(v, limit - 1) for v in inner)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0]


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
