"""`gpt-oss`: the harmony format."""

import re

from minirl.agent_loop.tool_parser.base import (
    NO_SCHEMAS,
    TOOL_PARSERS,
    Malformed,
    ParsedTurn,
    Schemas,
    as_call,
    read_json,
    skip_blank,
)
from minirl.tools.base import ToolCall

_MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_HEADER = re.compile(r"<\|(?:start|channel)\|>|\bto=")
# A message that is not closed ends where the next one begins.
_CLOSE = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)|\Z")


@TOOL_PARSERS.register("gpt-oss")
class GptOssParser:
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.

    The recipient may stand before the channel. Only the commentary channel calls. The analysis
    channel is thought, and left out of the content too, which is the final channel and commentary
    to nobody. `<|call|>` ends the turn, so the text of a turn usually lacks it.
    """

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Content and calls of `text`."""
        parts: list[str | ToolCall] = []
        position = 0
        while (mark := text.find(_MESSAGE, position)) >= 0:
            start = _start_of_header(text, position, mark)
            parts.append(_read_loose(text[position:start]))
            part, position = _read_message(text, start, mark)
            parts.append(part)
        parts.append(_read_loose(text[position:]))
        return ParsedTurn(
            content="\n".join(part for part in parts if isinstance(part, str) and part),
            calls=[part for part in parts if isinstance(part, ToolCall)],
        )


def _start_of_header(text: str, position: int, mark: int) -> int:
    last = text.rfind("<|start|>", position, mark)
    if last >= 0:
        return last
    header = _HEADER.search(text, position, mark)
    return header.start() if header else mark


def _read_loose(text: str) -> str | ToolCall:
    """What belongs to no message: prose, or a header that lacks its `<|message|>`."""
    if _CHANNEL.search(text) and _RECIPIENT.search(text):
        problem = f"{_MESSAGE} and a JSON object must follow its recipient and channel"
        return ToolCall(text=text.strip(), problem=problem)
    return text.strip()


def _read_message(text: str, start: int, mark: int) -> tuple[str | ToolCall, int]:
    """Content or call of the message, and where the text goes on behind it."""
    channel = _CHANNEL.search(text, start, mark)
    recipient = _RECIPIENT.search(text, start, mark)
    body = mark + len(_MESSAGE)
    if recipient is None:
        close = _next_close(text, body)
        thought = channel is not None and channel[1] == "analysis"
        return "" if thought else text[body : close.start()].strip(), close.end()
    try:
        if channel is None or channel[1] != "commentary":
            raise Malformed("a call must be on the commentary channel")
        return _read_call(text, body, recipient[1].removeprefix("functions."))
    except Malformed as error:
        close = _next_close(text, max(body, error.end))
        return ToolCall(text=text[start : close.start()].strip(), problem=str(error)), close.end()


def _read_call(text: str, body: int, name: str) -> tuple[ToolCall, int]:
    arguments, end = read_json(text, body)
    close = _CLOSE.match(text, skip_blank(text, end))
    if close is None:
        raise Malformed("nothing may follow its JSON object", end)
    call = {"name": name, "arguments": arguments}
    return as_call(call, text[body:end].strip(), "arguments"), close.end()


def _next_close(text: str, position: int) -> re.Match[str]:
    return _CLOSE.search(text, position)  # type: ignore[return-value]  # the end is one
