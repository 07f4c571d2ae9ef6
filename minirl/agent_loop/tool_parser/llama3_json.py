"""`llama3_json`: Llama 3.1, 3.2 and 3.3."""

import re

from minirl.agent_loop.tool_parser.base import (
    NO_SCHEMAS,
    TOOL_PARSERS,
    ParsedTurn,
    Schemas,
    as_call,
    read_json,
    scan,
)
from minirl.tools.base import ToolCall

_TAG = r"<\|python_tag\|>"
_OBJECT = r"""\{\s*["']?(?:type|name|parameters|arguments)\b"""
"""An object of another kind is an answer in JSON, not a call."""
_OPENING = re.compile(rf"{_TAG}|\A\s*(?={_OBJECT})")
_FOLLOWING = re.compile(rf"\s*(?:;\s*)?(?:{_TAG}|(?={_OBJECT}))")
_UNTIL = re.compile(rf"(?={_TAG}|;\s*{_OBJECT})")


@TOOL_PARSERS.register("llama3_json")
class Llama3JsonParser:
    """`{"name": ..., "parameters": {...}}`, where a turn begins or behind `<|python_tag|>`.

    Several calls are separated by `;`. An object in the midst of prose is prose.
    """

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Content and calls of `text`."""
        turn = text.rstrip().removesuffix("<|eom_id|>")  # ends a turn that calls
        return scan(turn, _OPENING, _read, until=_UNTIL, following=_FOLLOWING)


def _read(text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
    value, end = read_json(text, opening.end())
    return [as_call(value, text[opening.end() : end].strip(), "parameters", "arguments")], end
