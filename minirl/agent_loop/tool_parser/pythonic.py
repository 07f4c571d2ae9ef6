"""`pythonic`: Llama 3.2 and 4, ToolACE, and others that write calls as Python."""

import ast
import itertools
import re
import warnings
from typing import Any

from minirl.agent_loop.tool_parser.base import (
    NO_SCHEMAS,
    TOOL_PARSERS,
    Malformed,
    ParsedTurn,
    Schemas,
    make_call,
    scan,
)
from minirl.tools.base import ToolCall

_START = r"<\|python_(?:start|tag)\|>"
_LIST = r"\[\s*[^\W\d][\w.\-]*\("
_OPENING = re.compile(rf"{_START}\s*|\A\s*(?={_LIST})")
_FOLLOWING = re.compile(rf"[\s,;]*(?={_LIST})")
_UNTIL = re.compile(rf"<\|python_end\|>|(?={_START})")
_END = re.compile(r"\s*<\|python_end\|>")
# A string, whose brackets count for nothing, or a bracket, or where calls end or others begin.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|'
    r"'''(?:\\.|[^\\])*?'''|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'|[\[({]|[\])}]|<\|python_end\|>|" + _START,
    re.DOTALL,
)
_JSON_NAMES = {"true": True, "false": False, "null": None}


@TOOL_PARSERS.register("pythonic")
class PythonicParser:
    """`[name(key=value, ...), ...]`, where a turn begins or behind `<|python_start|>`.

    Values are literals of Python or JSON; the text is parsed and nothing of it is evaluated.
    """

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """Content and calls of `text`."""
        return scan(text, _OPENING, _read, until=_UNTIL, following=_FOLLOWING)


def _read(text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
    start = opening.end()
    end = _end_of_list(text, start)
    closed = _END.match(text, end)
    calls = _calls(text[start:end])
    return calls, closed.end() if closed else end


def _end_of_list(text: str, start: int) -> int:
    """The index behind the bracket that closes the one at `start`."""
    if not text.startswith("[", start):
        raise Malformed("calls must be a list: [name(key=value)]")
    depth = 0
    for token in _TOKEN.finditer(text, start):
        if token[0].startswith("<"):
            break
        depth += 1 if token[0] in "[({" else -1 if token[0] in "])}" else 0
        if depth == 0:
            return token.end()
    raise Malformed("a bracket or a string is not closed")


def _calls(text: str) -> list[ToolCall]:
    try:
        source = _Source(text)
        with warnings.catch_warnings():  # about escapes like "\d", which keep their backslash
            warnings.simplefilter("ignore")
            tree = ast.parse(source.text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "it is too deep"
        return [ToolCall(text=text, problem=f"it is not valid Python ({reason})")]
    if not isinstance(tree, ast.List) or not tree.elts:
        return [ToolCall(text=text, problem="calls must be a list: [name(key=value)]")]
    return [_call(source, element) for element in tree.elts]


def _call(source: "_Source", node: ast.expr) -> ToolCall:
    text = source.of(node)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return ToolCall(text=text, problem="it must be a call: name(key=value)")
    name = source.of(node.func)
    try:
        return make_call(name, _arguments(source, node), text)
    except ValueError as error:
        return ToolCall(name=name, text=text, problem=str(error))


def _arguments(source: "_Source", node: ast.Call) -> dict[str, Any]:
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("every argument must be written with its name: key=value")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        key = source.of(keyword).partition("=")[0].strip()
        if key in arguments:
            raise ValueError(f"the argument {key!r} is given twice")
        arguments[key] = _literal(keyword.value)
    return arguments


def _literal(node: ast.expr) -> Any:
    """The JSON value that a literal stands for; ValueError for anything that is not one."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(k): _literal(v) for k, v in zip(keys, values, strict=True)}
    raise ValueError("an argument must be a number, a string, True, False, None, a list or a dict")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of a dict must be strings")


class _Source:
    """Names as they were written: Python's parser replaces some letters by similar ones (NFKC).

    `ast.get_source_segment` would split the text into lines anew for every name.
    """

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads it
        self._bytes = self.text.encode()
        lines = self._bytes.split(b"\n")
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]

    def of(self, node: ast.expr | ast.keyword) -> str:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return self._bytes[start:end].decode()
