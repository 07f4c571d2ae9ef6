"""The agent, as its framework (Pydantic AI) wants it, and the function that minirl calls."""

from contextlib import suppress
from typing import Any

import httpx
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry, Tool, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.calculator.prepare import read_tool_schemas
from minirl.tools import ToolError
from minirl.tools.calculator import evaluate, format_number


def calculate(expression: str) -> str:
    """The tool; the framework tells the model of a ModelRetry."""
    try:
        return format_number(evaluate(expression))
    except ToolError as error:
        raise ModelRetry(str(error)) from error


# The demo's policy was warmed up on this very schema. Of a function with annotations the framework
# would make one, and that is what you want with a model that can read.
[FUNCTION] = [schema["function"] for schema in read_tool_schemas()]
CALCULATOR = Tool.from_schema(
    calculate, FUNCTION["name"], FUNCTION["description"], FUNCTION["parameters"]
)
CALCULATOR.strict = False  # else the framework adds to the schema
ASSISTANT: Agent[None, str] = Agent(tools=[CALCULATOR])

HTTP = httpx.AsyncClient(verify=False, trust_env=False, limits=httpx.Limits(max_connections=None))
"""Of all conversations. A client of its own for each would load the TLS certificates again, which
takes tenths of a second in which the event loop stands still."""


async def answer(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """Have the agent answer the row's question; the run's reward function scores the trajectory."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    policy = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
    # What the framework makes of wrong calls in a row: no failure of the program, but a trajectory
    # to learn from.
    with suppress(UnexpectedModelBehavior):
        await ASSISTANT.run(row["prompt"][-1]["content"], model=policy)
