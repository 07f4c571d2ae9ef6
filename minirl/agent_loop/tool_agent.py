"""The tool loop."""

from typing import Any

from minirl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register
from minirl.agent_loop.interaction import simulated_user


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Let the model call tools, and answer its simulated user, until it is done or at a limit."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Answer `raw_prompt` with the tools and the user of the row."""
        async with (
            simulated_user(self.context.interactions, row) as user,
            self.tool_session(row) as tools,
        ):
            trajectory = await self.start(row["raw_prompt"], tools.schemas)
            while trajectory.termination is None:
                text = await self.generate(trajectory, sampling_params)
                calls = self.parse_tool_calls(text) if trajectory.termination is None else []
                reason = self.reason_to_stop(trajectory, text, calls)
                answers = []
                if reason is None:
                    answers = await tools.call(trajectory, calls)
                elif user and reason == "stop" and not self._is_final(text):
                    answers = await user.answer(trajectory)
                    reason = self.limit_reached(trajectory) if answers else reason
                if reason is not None:
                    self.finish(trajectory, reason)
                else:
                    await self.append_observation(trajectory, answers, tools.schemas)
            await tools.calc_rewards(trajectory)
        return trajectory
