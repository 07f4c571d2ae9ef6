"""The conversations of a workload: an agent loop that follows a plan, a tool that waits."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from minirl.agent_loop import AgentLoopBase, AgentLoopOutput, derive_seed
from minirl.agent_loop.base import count_output
from minirl.tools.base import BaseTool, ToolCall, ToolError, ToolResponse
from minirl.types import Trajectory


class WaitTool(BaseTool):
    """A service elsewhere: it takes its time and costs nothing here."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "wait",
            "description": "Answer after some time.",
            "parameters": {
                "type": "object",
                "properties": {
                    "seconds": {"type": "number", "minimum": 0},
                    "length": {"type": "integer", "minimum": 0},
                    "fails": {"type": "boolean"},
                },
                "required": ["seconds", "length", "fails"],
            },
        },
    }

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """`length` characters after `seconds`, or an error then."""
        await asyncio.sleep(parameters["seconds"])
        if parameters["fails"]:
            raise ToolError("the service is not available")
        return ToolResponse("." * parameters["length"]), 0.0, {}


class PlannedLoop(AgentLoopBase):
    """Holds the conversation that a row's `extra_info.plans` has for the sample (workload.Plan).

    Turns have exactly the planned number of tokens, whatever the policy samples, and call the tool
    without writing so; all else is as in any agent loop.
    """

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """See AgentLoopBase."""
        async with self.tool_session(row) as tools:
            trajectory = await self.start(list(row["raw_prompt"]))
            for turn in row["extra_info"]["plans"][row["sample_index"]]["turns"]:
                await self._sample(trajectory, sampling_params, turn["response_tokens"])
                if turn.get("tool_s") is not None:  # null is dropped from rows
                    answers = await tools.call(trajectory, [_call(turn)])
                    await self.append_observation(trajectory, answers)
            await tools.calc_rewards(trajectory)
        if trajectory.termination is not None:
            raise ValueError(
                f"the conversation ended early ({trajectory.termination}): its plan is longer than "
                "data.max_prompt_length or rollout.response_length allows"
            )
        return self.finish(trajectory, "stop")

    async def _sample(
        self, trajectory: Trajectory, given: Mapping[str, Any], num_tokens: int
    ) -> None:
        if num_tokens > self.room(trajectory):
            self.finish(trajectory, "response_length")
        if trajectory.termination is not None:
            return
        exact = {"max_tokens": num_tokens, "ignore_eos": True}
        if "seed" in given:
            exact["seed"] = derive_seed(given["seed"], trajectory.num_turns)
        began = time.perf_counter()
        output = await self.server.generate(
            self.request_id, prompt_ids=trajectory.token_ids, sampling_params={**given, **exact}
        )
        count_output(trajectory, output, time.perf_counter() - began)
        trajectory.append_sampled(output)


def _call(turn: Mapping[str, Any]) -> ToolCall:
    arguments = {
        "seconds": turn["tool_s"],
        "length": turn["observation_tokens"],
        "fails": turn["fails"],
    }
    return ToolCall(name="wait", arguments=arguments, text=json.dumps(arguments))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """0 or 1 as chance has it: for a step it only matters that the rewards of a group differ."""
    return float(sum(solution_str.encode()) % 2)
