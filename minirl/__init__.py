"""Reinforcement learning for language models that call tools: one machine, asyncio, no Ray."""

__version__ = "0.1.0"
