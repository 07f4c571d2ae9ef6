"""`@function_tool`: a tool made of a typed function."""

import functools
import inspect
import json
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator

from minirl.registry import nearest
from minirl.tools.base import BaseTool, ToolResponse
from minirl.tools.threads import run_function


class FunctionTool(BaseTool):
    """A function as a tool; still callable as the function that it wraps.

    The model sees the positional parameters. Keyword-only ones are hidden from it: their values
    come from the tool's `config` or from the row's `execute_kwargs`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        tool_schema: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(config or {}, tool_schema or function_schema(function))
        functools.update_wrapper(self, function)
        self.function = function
        hidden = {p.name for p in _parameters(function) if p.kind is p.KEYWORD_ONLY}
        for key in self.config.keys() - hidden:
            raise ValueError(
                f"config.{key}: {self.name} has no keyword-only parameter of this name"
                f"{nearest(key, hidden)}"
            )
        self._validator = Draft202012Validator(
            {**self.parameters_schema, "additionalProperties": False}
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """Call the function, in a thread unless it is async; show its result as text or JSON."""
        arguments = {**self.config, **execute_kwargs, **parameters}
        for name, value in parameters.items():
            if isinstance(value, float) and value.is_integer() and self._takes_int(name):
                arguments[name] = int(value)
        return _as_response(await run_function(self.function, **arguments)), 0.0, {}

    def _takes_int(self, name: str) -> bool:
        """JSON's 3.0 is an integer, Python's is not."""
        schema = self.parameters_schema["properties"][name]
        return any(kind.get("type") == "integer" for kind in schema.get("anyOf", [schema]))


def function_tool(function: Callable[..., Any]) -> FunctionTool:
    """Make a tool of a function: schema from its annotations and its Google-style docstring.

    >>> @function_tool
    ... def add(a: int, b: int = 0) -> int:
    ...     '''Add two integers.
    ...
    ...     Args:
    ...         a: The first.
    ...         b: The second.
    ...     '''
    ...     return a + b

    A plain function runs in a thread and cannot stop the event loop. TypeError when a parameter has
    no annotation or one that JSON cannot express, or the function has no docstring.
    """
    return FunctionTool(function)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI function schema of a typed, documented function."""
    name = function.__name__
    summary, described = parse_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise TypeError(
            f"function tool {name!r}: needs a docstring that tells the model what it does"
        )
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for p in _parameters(function):
        if p.kind is p.KEYWORD_ONLY:
            continue
        if p.kind is not p.POSITIONAL_OR_KEYWORD or p.name not in hints:
            raise TypeError(
                f"function tool {name!r}: write parameter {p.name!r} as `{p.name}: type`"
            )
        properties[p.name] = json_type(hints[p.name], f"function tool {name!r}: {p.name}")
        if p.name in described:
            properties[p.name]["description"] = described[p.name]
        if p.default is p.empty:
            required.append(p.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into what stands before its sections, and its `Args:`."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, argument, indent = "", "", 0
    for line in doc.splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if depth == 0 and text in _SECTIONS:
            section, argument = text, ""
        elif not section:
            summary.append(text)
        elif section in ("Args:", "Arguments:") and text:
            head, colon, tail = text.partition(":")
            if colon and (not argument or depth <= indent):
                argument, indent = head.split("(")[0].strip(), depth
                described[argument] = tail.strip()
            elif argument:
                described[argument] += f" {text}"
    return "\n".join(summary).strip(), described


_SECTIONS = (
    "Args:",
    "Arguments:",
    "Returns:",
    "Raises:",
    "Yields:",
    "Example:",
    "Examples:",
    "Note:",
    "Notes:",
)


def json_type(hint: Any, place: str) -> dict[str, Any]:
    """The JSON schema of an annotation; TypeError when JSON has no such thing."""
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [json_type(a, place) for a in args]}
    if origin is list:
        return {"type": "array", **({"items": json_type(args[0], place)} if args else {})}
    if origin is dict and (not args or args[0] is str):
        values = {"additionalProperties": json_type(args[1], place)} if args else {}
        return {"type": "object", **values}
    raise TypeError(
        f"{place}: no JSON schema for {hint!r}; use str, int, float, bool, None, list, "
        "dict[str, ...], Literal or a union of these"
    )


_SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _as_response(result: Any) -> ToolResponse:
    if isinstance(result, ToolResponse):
        return result
    if isinstance(result, str):
        return ToolResponse(result)
    return ToolResponse(json.dumps(result, ensure_ascii=False, default=str))
