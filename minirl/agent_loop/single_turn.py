"""One answer to one prompt."""

from typing import Any

from minirl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Sample one turn."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Answer `raw_prompt`."""
        trajectory = await self.start(row["raw_prompt"])
        await self.generate(trajectory, sampling_params)
        return self.finish(trajectory, "stop")
