"""The tool loop."""

from typing import Any

from minirl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Let the model call tools until it answers without one, or a limit is reached."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Answer `raw_prompt` with the tools of the row."""
        async with self.tool_session(row) as tools:
            trajectory = await self.start(row["raw_prompt"], tools.schemas)
            while trajectory.termination is None:
                text = await self.generate(trajectory, sampling_params)
                calls = self.parse_tool_calls(text)
                if reason := self.reason_to_stop(trajectory, text, calls):
                    self.finish(trajectory, reason)
                else:
                    results = await tools.call(trajectory, calls)
                    await self.append_observation(trajectory, results, tools.schemas)
            await tools.calc_rewards(trajectory)
        return trajectory
