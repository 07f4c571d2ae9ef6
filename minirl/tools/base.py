"""The contract of a tool."""

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match


class ToolError(Exception):
    """Raised by a tool to tell the model, in its own words, why a call cannot be answered."""


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """What the model is told."""

    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as a parser read it from a turn."""

    name: str = ""
    """Empty when it could not be read."""
    arguments: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    """The arguments as JSON; of a malformed call, the whole call as the model wrote it."""
    problem: str | None = None
    """Why the call is malformed, in words for the model; None = it is well-formed."""


class BaseTool(ABC):
    """A tool; one object serves all trajectories, which its methods tell apart by `instance_id`.

    Per trajectory: `create` at the first call, `execute` per call (calls of one turn run at once),
    `calc_reward` once at the end, `release` always. A `create` that raises or is cancelled cleans
    up after itself: it is not released. Blocking work belongs into a thread of its own:
    `await minirl.tools.threads.run_in_thread(function, ...)`.
    """

    schema: ClassVar[dict[str, Any] | None] = None
    """OpenAI function schema to use when the tool config gives none."""

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        """`tool_schema` is `{type: function, function: {name, description, parameters}}`.

        ValueError when there is none, or it is not of that form.
        """
        self.config = config
        self.tool_schema = check_tool_schema(tool_schema or self.schema)
        self.name: str = self.tool_schema["function"]["name"]
        self._validator = Draft202012Validator(self.parameters_schema)

    @classmethod
    def load(
        cls, config: dict[str, Any], tool_schema: dict[str, Any] | None = None
    ) -> "list[BaseTool]":
        """The tools that one entry of the tool config stands for: one, unless overridden."""
        return [cls(config, tool_schema)]

    @property
    def parameters_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.tool_schema["function"].get("parameters", {"type": "object"})

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> str:
        """Prepare the state of one trajectory and return the id that the other methods get."""
        return instance_id or uuid.uuid4().hex

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, float] | None]:
        """Answer one call: (what the model is told, reward of this call, metrics); None for none.

        `parameters` fit the schema. An exception becomes the answer; the conversation goes on.
        """

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Reward of the whole trajectory as this tool sees it."""
        return 0.0

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:  # noqa: B027
        """Drop the state of one trajectory."""

    async def aclose(self) -> None:  # noqa: B027
        """Drop what all trajectories share; called at the end of the run."""

    def find_problem(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments of a call, in words; None = they fit the schema."""
        error = best_match(self._validator.iter_errors(arguments))
        if error is None:
            return None
        place = error.json_path.removeprefix("$").removeprefix(".")
        return f"{place}: {error.message}" if place else error.message


def check_tool_schema(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return `schema` if it is an OpenAI function schema; ValueError says what is wrong with it."""
    if schema is None:
        raise ValueError("tool_schema: missing, and the class has no `schema` of its own")
    problem = best_match(_TOOL_SCHEMA.iter_errors(schema))
    if problem is not None:
        place = problem.json_path.removeprefix("$")
        raise ValueError(f"tool_schema{place}: {problem.message}")
    try:
        Draft202012Validator.check_schema(schema["function"].get("parameters", {}))
    except SchemaError as error:
        place = error.json_path.removeprefix("$")
        raise ValueError(
            f"tool_schema.function.parameters{place}: not a JSON schema: {error.message}"
        ) from error
    return schema


_TOOL_SCHEMA = Draft202012Validator(
    {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": r"^[\w.\-]+$"},
                    "description": {"type": "string"},
                    "parameters": {
                        "type": "object",
                        "required": ["type"],
                        "properties": {"type": {"const": "object"}},
                    },
                },
            },
        },
    }
)
