"""From the text of a turn to content and tool calls, by `rollout.multi_turn.format`.

vLLM's own parsers are not used: they want a tokenizer and a server's request, cannot be imported
without vLLM, and return a turn with a malformed call as plain text, where here the model is told.
"""

from minirl.agent_loop.tool_parser.base import (
    NO_SCHEMAS,
    TOOL_PARSERS,
    ParsedTurn,
    Schemas,
    ToolParser,
)
from minirl.agent_loop.tool_parser.gpt_oss import GptOssParser
from minirl.agent_loop.tool_parser.hermes import HermesParser
from minirl.agent_loop.tool_parser.llama3_json import Llama3JsonParser
from minirl.agent_loop.tool_parser.mistral import MistralParser
from minirl.agent_loop.tool_parser.pythonic import PythonicParser
from minirl.agent_loop.tool_parser.qwen3_coder import Qwen3CoderParser

__all__ = [
    "NO_SCHEMAS",
    "TOOL_PARSERS",
    "GptOssParser",
    "HermesParser",
    "Llama3JsonParser",
    "MistralParser",
    "ParsedTurn",
    "PythonicParser",
    "Qwen3CoderParser",
    "Schemas",
    "ToolParser",
]
