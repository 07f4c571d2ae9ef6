"""What both arms of benchmarks.vs_trl are given."""

import asyncio
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from minirl.data import load_rows
from minirl.tools import ToolResponse
from minirl.tools.calculator import CalculatorTool

MEAN_S, SIGMA = 0.3, 1.0
"""Of a call's latency, log-normal: its mean, and the deviation of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training run."""

    with_tool: bool
    num_steps: int
    """That are measured, after one that warms up."""
    seed: int = 0
    model: str = "build/calculator/model"
    questions: str = "build/calculator/train.parquet"
    num_prompts: int = 16
    n: int = 8
    response_length: int = 160
    max_turns: int = 4
    lr: float = 1e-6
    """So small that the policy stays what it is, and with it the length of what it says."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an arm says of one step."""

    seconds: float
    tokens: float
    """Of a response, those of tools too; mean over trajectories."""
    tool_calls: float
    """Mean over trajectories."""


def read_questions(task: Task) -> list[dict[str, Any]]:
    """`prompt` and `ground_truth`, as many as the steps need."""
    rows = load_rows([task.questions])[: task.num_prompts * (task.num_steps + 1)]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return [{"prompt": r["prompt"], "ground_truth": t} for r, t in zip(rows, truths, strict=True)]


async def wait(expression: str) -> None:
    """A tool's latency, the same for the same expression."""
    random = Random(hashlib.blake2b(expression.encode()).digest())
    await asyncio.sleep(random.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA))


class WaitingCalculator(CalculatorTool):
    """The demo's tool with a latency."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """As BaseTool says."""
        await wait(parameters["expression"])
        return await super().execute(instance_id, parameters, **execute_kwargs)


def write_tools(folder: Path) -> Path:
    """The demo's tools.yaml with that tool."""
    text = Path("examples/calculator/tools.yaml").read_text()
    path = folder / "tools.yaml"
    path.write_text(
        text.replace("minirl.tools.calculator:CalculatorTool", f"{__name__}:WaitingCalculator")
    )
    return path
