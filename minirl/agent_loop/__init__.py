"""How a model is used: one class with one method, `run`, that talks to an engine and to tools."""

from minirl.agent_loop.base import (
    AGENT_LOOPS,
    AgentLoopBase,
    AgentLoopContext,
    AgentLoopOutput,
    Server,
    ServerError,
    derive_seed,
    load_agent_loops,
    register,
)
from minirl.agent_loop.interaction import Interaction, load_interactions
from minirl.agent_loop.run import (
    failed_trajectories,
    make_agent_loop,
    record_failure,
    run_agent_loop,
)
from minirl.agent_loop.single_turn import SingleTurnAgentLoop
from minirl.agent_loop.tool_agent import ToolAgentLoop
from minirl.agent_loop.tool_parser import TOOL_PARSERS, ParsedTurn, ToolParser

__all__ = [
    "AGENT_LOOPS",
    "TOOL_PARSERS",
    "AgentLoopBase",
    "AgentLoopContext",
    "AgentLoopOutput",
    "Interaction",
    "ParsedTurn",
    "Server",
    "ServerError",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "ToolParser",
    "derive_seed",
    "failed_trajectories",
    "load_agent_loops",
    "load_interactions",
    "make_agent_loop",
    "record_failure",
    "register",
    "run_agent_loop",
]
