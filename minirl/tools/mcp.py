"""Tools of MCP servers (Model Context Protocol), over stdio or streamable HTTP."""

import asyncio
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

try:
    from mcp_types import (
        AudioContent,
        BlobResourceContents,
        CallToolResult,
        ContentBlock,
        EmbeddedResource,
        ImageContent,
        ResourceLink,
        TextContent,
        TextResourceContents,
        Tool,
    )
except ImportError as error:
    raise ImportError(f"MCP tools need the official SDK: pip install 'mcp>=2' ({error})") from error

from minirl.registry import nearest
from minirl.tools.base import BaseTool, ToolError, ToolResponse
from minirl.tools.mcp_session import Links, Session
from minirl.tools.mcp_transport import MCPConfig


class MCPTool(BaseTool):
    """One tool of an MCP server. An entry of the tool config with this class stands for all.

    Its `config` is that of `MCPConfig`. The schemas come from the server, which is asked when the
    entry is loaded and has to be up by then.
    """

    def __init__(self, links: Links, tool: Tool, prefix: str = "") -> None:
        super().__init__({}, openai_schema(tool, prefix))
        self._links = links
        self._tool = tool

    @classmethod
    def load(
        cls, config: dict[str, Any], tool_schema: dict[str, Any] | None = None
    ) -> list[BaseTool]:
        """Ask the server for its tools; ValueError says why it cannot be used."""
        if tool_schema is not None:
            raise ValueError("tool_schema: leave it out; an MCP server describes its tools itself")
        parsed = parse_config(config)
        links = Links(parsed)
        tools = select(discover(parsed), parsed)
        return [cls(links, tool, parsed.prefix) for tool in tools]

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> str:
        """Take part in the trajectory's session, which is opened by its first call."""
        instance_id = instance_id or uuid.uuid4().hex
        self._links.join(instance_id)
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """Pass the call on; a result that the server marks as an error is told as one."""
        result = await self._links.call(instance_id, self._tool.name, parameters)
        text = as_text(result)
        if result.is_error:
            raise ToolError(text)
        return ToolResponse(text), 0.0, {}

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Leave the trajectory's session; the last tool closes it."""
        await self._links.leave(instance_id)

    async def aclose(self) -> None:
        """Close every session of the entry."""
        await self._links.close()


def parse_config(config: dict[str, Any]) -> MCPConfig:
    """Check the `config` of an entry; ValueError names the key and what is wrong with it."""
    known = MCPConfig.__struct_fields__
    for key in config.keys() - set(known):
        raise ValueError(f"config.{key}: no such key{nearest(str(key), known)}")
    try:
        parsed = msgspec.convert(config, MCPConfig)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        raise ValueError(f"config{place.rstrip('`')}: {problem}") from error
    if bool(parsed.command) == bool(parsed.url):
        raise ValueError("config: give either command: [program, argument, ...] or url: http://...")
    for key, other in (("env", "url"), ("headers", "command")):
        if getattr(parsed, key) and getattr(parsed, other):
            raise ValueError(f"config.{key}: has no meaning beside config.{other}")
    if not parsed.timeout_s > 0:
        raise ValueError(f"config.timeout_s: got {parsed.timeout_s}; expected more than 0")
    return parsed


def discover(config: MCPConfig) -> list[Tool]:
    """Start or connect to the server, list its tools, and leave it; ValueError when that fails."""

    async def list_tools() -> list[Tool]:
        session = Session(config, asyncio.Semaphore(1))
        try:
            return await session.list_tools()
        finally:
            await session.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may run in an event loop itself
            return thread.submit(asyncio.run, list_tools()).result()
    except ToolError as error:
        raise ValueError(f"config.{'command' if config.command else 'url'}: {error}") from error


def select(tools: list[Tool], config: MCPConfig) -> list[Tool]:
    """Those of the server's tools that `config.tools` names, in the server's order."""
    names = [tool.name for tool in tools]
    for name in config.tools or ():
        if name not in names:
            raise ValueError(f"config.tools: {config.server} has no {name!r}{nearest(name, names)}")
    taken = [tool for tool in tools if config.tools is None or tool.name in config.tools]
    if not taken:
        raise ValueError(f"config: {config.server} gives no tool")
    return taken


def openai_schema(tool: Tool, prefix: str = "") -> dict[str, Any]:
    """The OpenAI function schema of an MCP tool; `_` stands for what a name may not hold there."""
    return {
        "type": "function",
        "function": {
            "name": re.sub(r"[^\w.\-]", "_", prefix + tool.name),
            "description": tool.description or tool.title or "",
            "parameters": tool.input_schema,
        },
    }


def as_text(result: CallToolResult) -> str:
    """What the model reads: texts as they are, all else named; JSON where there is only that."""
    if not result.content and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: ContentBlock) -> str:
    match block:
        case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
            return text
        case ImageContent(data=data, mime_type=kind) | AudioContent(data=data, mime_type=kind):
            return _binary(kind, data)
        case EmbeddedResource(resource=BlobResourceContents(blob=data, mime_type=kind)):
            return _binary(kind or "binary", data)
        case ResourceLink(name=name, uri=uri):
            return f"[resource {name}: {uri}]"
    raise TypeError(f"unknown kind of content: {block!r}")


def _binary(kind: str, data: str) -> str:
    return f"[{kind}, {len(data.rstrip('=')) * 3 // 4} bytes]"  # base64: 4 characters for 3 bytes
