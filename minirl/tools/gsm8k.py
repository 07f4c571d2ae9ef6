"""Grade-school math: the model submits an answer and is told whether it is right."""

from dataclasses import dataclass
from typing import Any, ClassVar

from minirl.rewards.gsm8k import compute_score, parse_number
from minirl.tools.base import BaseTool, ToolResponse

NO_PROGRESS = -0.05
"""Reward of a call that does not improve on the best answer so far."""


@dataclass(slots=True)
class _Submissions:
    ground_truth: str
    best: float = 0.0


class Gsm8kTool(BaseTool):
    """Scores `answer` against the `ground_truth` of the row's create_kwargs.

    The columns are those of verl: extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs. A call
    is worth 0 when its answer is better than all before it, else -0.05, so that asking again costs;
    the trajectory's reward of this tool is that of its best answer, 1 or 0.
    """

    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "Check the answer to a grade-school math problem: 1.0 is right.",
            "parameters": {
                "type": "object",
                "properties": {
                    "answer": {"type": "string", "description": "The final number, e.g. 42"}
                },
                "required": ["answer"],
            },
        },
    }

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self._submissions: dict[str, _Submissions] = {}

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> str:
        """Begin with no answer; ValueError when `ground_truth` is missing or no number."""
        if "ground_truth" not in create_kwargs:
            raise ValueError(
                f"the row has no extra_info.tools_kwargs.{self.name}.create_kwargs.ground_truth"
            )
        ground_truth = str(create_kwargs["ground_truth"])
        parse_number(ground_truth)
        instance_id = await super().create(instance_id)
        self._submissions[instance_id] = _Submissions(ground_truth)
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """The reward of the last number in `parameters["answer"]`, with or without `####`."""
        submissions, answer = self._submissions[instance_id], str(parameters["answer"])
        reward = compute_score("", answer, submissions.ground_truth, method="flexible")
        is_better = reward > submissions.best
        submissions.best = max(reward, submissions.best)
        text = f"Current parsed {answer=} {reward=}"
        return ToolResponse(text), 0.0 if is_better else NO_PROGRESS, {}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Of the best answer."""
        return self._submissions[instance_id].best

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forget the answers."""
        del self._submissions[instance_id]
