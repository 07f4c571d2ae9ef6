"""Agents that speak OpenAI's protocol as agent loops, and the policy as an OpenAI endpoint."""

from minirl.openai.agent import OpenAIAgentLoop
from minirl.openai.endpoint import PolicyEndpoint

__all__ = ["OpenAIAgentLoop", "PolicyEndpoint"]
