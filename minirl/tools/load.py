"""Tools from a YAML file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minirl.entries import load_entries, locate_class
from minirl.registry import require_methods
from minirl.tools.base import BaseTool
from minirl.tools.function import FunctionTool


def load_tools(path: str | Path) -> dict[str, BaseTool]:
    """Build the tools of a file `tools: [{class_name, config, tool_schema}]`, by name, in order.

    `class_name` is `package.module:Class` (or with a dot), or a function made by `@function_tool`;
    `tool_schema` may be left out where the class or function has one. An entry may stand for
    several tools (`BaseTool.load`), as one with `minirl.tools.mcp:MCPTool` does.
    ConfigError names the file, the entry, and what is wrong with it.
    """
    return load_entries(path, "tools", _build)


def _build(entry: dict[str, Any]) -> Iterator[tuple[str, BaseTool]]:
    found = locate_class(entry, "tool", ("class_name", "config", "tool_schema"))
    config, schema = entry.get("config") or {}, entry.get("tool_schema")
    if isinstance(found, FunctionTool):
        tools: list[BaseTool] = [FunctionTool(found.function, config, schema or found.tool_schema)]
    elif isinstance(found, type) and issubclass(found, BaseTool):
        require_methods(found)
        tools = found.load(config, schema)
    else:
        raise ValueError(
            f"class_name: {entry['class_name']!r} is neither a BaseTool class nor a @function_tool"
        )
    yield from ((tool.name, tool) for tool in tools)
