"""`mistral`: Mistral, Mixtral, Ministral, Magistral, Devstral with any version of the tokenizer."""

import re

from minirl.agent_loop.tool_parser.base import (
    NO_SCHEMAS,
    THINK,
    TOOL_PARSERS,
    Malformed,
    ParsedTurn,
    Schemas,
    as_call,
    read_json,
    scan,
    skip_blank,
)
from minirl.tools.base import ToolCall

_THOUGHTS = (("[THINK]", "[/THINK]"), *THINK)
_MARK = r"\[TOOL_CALLS\]"
# The bound keeps the search linear in a text of one long word.
_NAMED = r"(?<![\w.\-])(?=[\w.\-]{1,64}(?:\[CALL_ID\]\w*)?\[ARGS\])"
_OPENING = re.compile(rf"(?:{_MARK}\s*)+|{_NAMED}")
_UNTIL = re.compile(rf"(?={_MARK}|{_NAMED})")
_HEAD = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?")


@TOOL_PARSERS.register("mistral")
class MistralParser:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`.

    The first is written up to version 7 of the tokenizer, the second from version 11 on, which may
    have `[CALL_ID]...` before `[ARGS]`, or neither of them.
    """

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Content and calls of `text`."""
        return scan(text, _OPENING, _read, until=_UNTIL, thoughts=_THOUGHTS)


def _read(text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
    start = skip_blank(text, opening.end())
    if text.startswith(("[", "{"), start):
        return _read_objects(text, start)
    head = _HEAD.match(text, start)
    if head is None:
        raise Malformed("[TOOL_CALLS] must be followed by the name of a tool and its arguments")
    arguments, end = read_json(text, head.end())
    value = {"name": head[1], "arguments": arguments}
    return [as_call(value, text[start:end], "arguments")], end


def _read_objects(text: str, start: int) -> tuple[list[ToolCall], int]:
    value, end = read_json(text, start)
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise Malformed("the list of calls is empty", end)
    written = text[start:end]
    return [as_call(call, written, "arguments") for call in objects], end
