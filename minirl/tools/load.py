"""Tools from a YAML file."""

from pathlib import Path
from typing import Any

import yaml

from minirl.config import ConfigError
from minirl.registry import locate, nearest
from minirl.tools.base import BaseTool
from minirl.tools.function import FunctionTool

_KEYS = ("class_name", "config", "tool_schema")


def load_tools(path: str | Path) -> dict[str, BaseTool]:
    """Build the tools of a file `tools: [{class_name, config, tool_schema}]`, by name, in order.

    `class_name` is `package.module:Class` (or with a dot), or a function made by `@function_tool`;
    `tool_schema` may be left out where the class or function has one. An entry may stand for
    several tools (`BaseTool.load`), as one with `minirl.tools.mcp:MCPTool` does.
    ConfigError names the file, the entry, and what is wrong with it.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("tools"), list):
        raise ConfigError(f"{path}: expected `tools:` and a list of entries with `class_name`")
    tools: dict[str, BaseTool] = {}
    for number, entry in enumerate(content["tools"], start=1):
        try:
            for tool in _build(entry):
                if tool.name in tools:
                    raise ValueError(f"there is already a tool named {tool.name!r}")
                tools[tool.name] = tool
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"{path}: tools, entry {number}: {error}") from error
    return tools


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file; ConfigError when it is not there or not YAML."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _build(entry: Any) -> list[BaseTool]:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError("class_name: missing; write package.module:Class")
    for key in entry.keys() - set(_KEYS):
        raise ValueError(f"{key}: no such key{nearest(str(key), _KEYS)}")
    config, schema = entry.get("config") or {}, entry.get("tool_schema")
    if not isinstance(config, dict):
        raise ValueError(f"config: got {config!r}; expected a mapping")
    found = locate(entry["class_name"], "tool")
    if isinstance(found, FunctionTool):
        return [FunctionTool(found.function, config, schema or found.tool_schema)]
    if not (isinstance(found, type) and issubclass(found, BaseTool)):
        raise ValueError(
            f"class_name: {entry['class_name']!r} is neither a BaseTool class nor a @function_tool"
        )
    return found.load(config, schema)
