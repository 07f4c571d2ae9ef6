"""What a user writes, for worker processes to import: a loop, a tool, a reward."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from minirl.agent_loop import ToolAgentLoop
from minirl.tools import BaseTool, ToolResponse
from minirl.types import Trajectory


class EchoTool(BaseTool):
    """Says what it was told, and notes its life in a file per process."""

    schema: ClassVar = {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "Say it again.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }

    def note(self, word: str) -> None:
        with (Path(self.config["notes"]) / str(os.getpid())).open("a") as file:
            file.write(f"{word}\n")

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> str:
        self.note("create")
        return await super().create(instance_id, **create_kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        await asyncio.sleep(0)
        return ToolResponse(parameters["text"]), 0.25, {}

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        self.note("release")

    async def aclose(self) -> None:
        self.note("vllm" if "vllm" in sys.modules else "no vllm")
        self.note("aclose")


class UserLoop(ToolAgentLoop):
    """The tool agent; a row may plant an error, a warning, or a wait that blocks all."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        if row.get("warns"):
            logging.getLogger("minirl.user").warning("look at %s", row["uid"])
        if row.get("blocks"):
            time.sleep(1)  # noqa: ASYNC251
        if row.get("fails"):
            raise ZeroDivisionError(f"planted in {row['uid']}")
        result = await super().run(sampling_params, **row)
        assert isinstance(result, Trajectory)
        return result


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Whether the row came with its types."""
    return len(repr(ground_truth)) if "####" in solution_str else 0.0
