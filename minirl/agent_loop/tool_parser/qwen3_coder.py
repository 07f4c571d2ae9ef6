"""`qwen3_coder`: Qwen3-Coder, and Qwen 3.5 and later."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from minirl.agent_loop.tool_parser.base import (
    MAX_DEPTH,
    NO_SCHEMAS,
    TOOL_PARSERS,
    Malformed,
    ParsedTurn,
    Schemas,
    depth_exceeds,
    make_call,
    read_json,
    scan,
    skip_blank,
)
from minirl.tools.base import ToolCall

_CLOSE = "</tool_call>"
# The model now and then forgets <tool_call>.
_OPENING = re.compile(r"<tool_call>|(?=<function=)")
_UNTIL = re.compile(r"</tool_call>|(?=<tool_call>|<function=)")
_FUNCTION = re.compile(r"\s*<function=(?:([^<>\n]*)>)?")
_FUNCTION_END = re.compile(r"\s*</function>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
# What a value holds is not escaped: it may hold the closing tag, but not as it stands at the end.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_AS_PYTHON = {"True": True, "False": False, "None": None}
"""Some versions of the template write these so."""


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

    A value is bare text, less one newline at either end. It is read as JSON where the tool's schema
    asks for something else than a string, or where the schema says nothing.
    """

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Content and calls of `text`."""
        return scan(text, _OPENING, partial(_read, schemas), until=_UNTIL)


def _read(schemas: Schemas, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
    head = _FUNCTION.match(text, opening.end())
    name = (head[1] or "").strip() if head else ""
    if head is None or not name:
        raise Malformed("it must begin with <function=NAME>", head.end() if head else 0)
    written, end = _read_parameters(text, head.end())
    schema = schemas.get(name, {})
    arguments = {key: _typed(value, key, schema) for key, value in written.items()}
    call = make_call(name, arguments, text[opening.end() : end].strip())
    close = skip_blank(text, end)
    if text.startswith(_CLOSE, close):
        return [call], close + len(_CLOSE)
    if opening[0]:
        raise Malformed(f"{_CLOSE} must follow </function>", end)
    return [call], end


def _read_parameters(text: str, position: int) -> tuple[dict[str, str], int]:
    """Values by key, and the index behind `</function>`."""
    written: dict[str, str] = {}
    while match := _PARAMETER.match(text, position):
        key = match[1].strip()
        following = text.find("<parameter=", match.end())
        limit = len(text) if following < 0 else following + len("<parameter=")
        close = _VALUE_END.search(text, match.end(), limit)
        if not key or close is None:
            raise Malformed("every parameter must be <parameter=KEY>VALUE</parameter>", position)
        if key in written:
            raise Malformed(f"the parameter {key!r} is given twice", position)
        written[key] = text[match.end() : close.start()]
        position = close.end()
    end = _FUNCTION_END.match(text, position)
    if end is None:
        raise Malformed(
            "</function>, or a parameter as <parameter=KEY>VALUE</parameter>, must follow "
            + ("the last parameter" if written else "<function=NAME>"),
            position,
        )
    return written, end.end()


def _typed(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """The reading of `text` that fits the schema, or else one of a type that the schema allows.

    Where none is, the text stays as it is, and the tool says what it wants.
    """
    readings = _readings(text)
    if len(readings) == 1:
        return readings[0]
    validator = Draft202012Validator(schema)
    problems = [_problems(validator, key, value) for value in readings]
    for value, errors in zip(readings, problems, strict=True):
        if not errors:
            return value
    for value, errors in zip(readings, problems, strict=True):
        if not any(e.validator == "type" and len(e.path) == 1 for e in errors):
            return value
    return text


def _problems(validator: Draft202012Validator, key: str, value: Any) -> list[ValidationError]:
    try:
        errors = list(validator.iter_errors({key: value}))
    except Exception:  # of a reference to nowhere, or a pattern that is none: it says nothing
        return []
    return [e for e in errors if list(e.path)[:1] == [key]]


def _readings(text: str) -> list[Any]:
    """`text` as JSON, if it is, and as itself; a string is not written in quotes."""
    bare = text.strip()
    if bare in _AS_PYTHON:
        return [_AS_PYTHON[bare], text]
    try:
        value, end = read_json(bare, 0)
        json.dumps(value, allow_nan=False)
    except (Malformed, ValueError, RecursionError):
        return [text]
    if depth_exceeds(value, MAX_DEPTH):
        return [value]  # which is malformed, whatever the schema
    return [text] if end < len(bare) or isinstance(value, str) else [value, text]
