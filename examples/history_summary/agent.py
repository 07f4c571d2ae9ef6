"""An agent that replaces its history by a summary: one trajectory per stretch."""

from typing import Any

from minirl.agent_loop import AgentLoopBase, AgentLoopContext, AgentLoopOutput
from minirl.tools import ToolSession

REQUEST = (
    "Your history is about to be deleted. Write down, briefly, all that you need of it to go on."
)


class HistorySummaryAgent(AgentLoopBase):
    """Calls tools; when a stretch has `stretch_tokens` tokens, sums it up and starts anew.

    The summary is the last turn of its stretch, so it trains like any other turn: good is what the
    stretches behind it can go on from. The prompt of the next one is the question and the summary.
    The last of `max_stretches` goes on to rollout.response_length.
    """

    def __init__(
        self, context: AgentLoopContext, *, stretch_tokens: int = 1024, max_stretches: int = 4
    ) -> None:
        super().__init__(context)
        self.stretch_tokens = stretch_tokens
        self.max_stretches = max_stretches

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Answer `raw_prompt`; limits of turns and calls hold for each stretch."""
        question = list(row["raw_prompt"])
        messages = question
        async with self.tool_session(row) as tools:
            for number in range(1, self.max_stretches + 1):
                limit = self.stretch_tokens if number < self.max_stretches else None
                summary = await self._stretch(messages, tools, sampling_params, limit)
                if summary is None:
                    break
                notes = {"role": "user", "content": f"What you have noted so far:\n{summary}"}
                messages = [*question, {"role": "assistant", "content": "..."}, notes]
            await tools.calc_rewards(self.trajectories[-1])
        return self.trajectories

    async def _stretch(
        self,
        messages: list[dict[str, Any]],
        tools: ToolSession,
        sampling_params: dict[str, Any],
        limit: int | None,
    ) -> str | None:
        """One trajectory; its summary, or None when the conversation has ended with it."""
        trajectory = await self.start(messages, tools.schemas)
        while trajectory.termination is None:
            text = await self.generate(trajectory, sampling_params)
            calls = self.parse_tool_calls(text)
            reason = self.reason_to_stop(trajectory, text, calls)
            if reason is not None:
                self.finish(trajectory, reason)
                break
            answers = await tools.call(trajectory, calls)
            if limit is not None and len(trajectory.response_ids) >= limit:
                answers.append({"role": "user", "content": REQUEST})
                await self.append_observation(trajectory, answers, tools.schemas)
                summary = await self.generate(trajectory, sampling_params)
                if trajectory.termination is None:
                    self.finish(trajectory, "stop")
                    return summary
            else:
                await self.append_observation(trajectory, answers, tools.schemas)
        return None
