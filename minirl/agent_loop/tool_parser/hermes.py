"""`hermes`: Qwen 2.5, Qwen 3, Nous Hermes and many others."""

import re

from minirl.agent_loop.tool_parser.base import (
    NO_SCHEMAS,
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

_CLOSE = "</tool_call>"
_OPENING = re.compile("<tool_call>")
_UNTIL = re.compile("</tool_call>|(?=<tool_call>)")


@TOOL_PARSERS.register("hermes")
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Content and calls of `text`."""
        return scan(text, _OPENING, _read, until=_UNTIL)


def _read(text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
    value, end = read_json(text, opening.end())
    close = skip_blank(text, end)
    if not text.startswith(_CLOSE, close):
        raise Malformed(f"{_CLOSE} must follow its JSON object", end)
    written = text[opening.end() : close].strip()
    return [as_call(value, written, "arguments")], close + len(_CLOSE)
