"""What a model can call: tools, their schemas, and their life within one trajectory."""

from minirl.tools.base import BaseTool, ToolCall, ToolError, ToolResponse
from minirl.tools.function import FunctionTool, function_tool
from minirl.tools.load import load_tools
from minirl.tools.python_tool import PythonTool
from minirl.tools.search import SearchTool
from minirl.tools.session import ToolSession

__all__ = [
    "BaseTool",
    "FunctionTool",
    "PythonTool",
    "SearchTool",
    "ToolCall",
    "ToolError",
    "ToolResponse",
    "ToolSession",
    "function_tool",
    "load_tools",
]
