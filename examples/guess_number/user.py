"""A simulated user who thinks of a number, and the reward for finding it quickly."""

import re
from collections.abc import Mapping
from typing import Any

from minirl.agent_loop import Interaction

LARGEST = 20
_NUMBER = re.compile(r"\d+")


class NumberUser(Interaction):
    """Says whether the number that it thinks of is larger or smaller than the policy's guess."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **interaction_kwargs: Any
    ) -> tuple[str, bool, float]:
        """Over when the last number of the last turn is the right one."""
        guess, number = last_number(messages[-1]["content"]), interaction_kwargs["number"]
        if guess is None:
            return "Say a number.", False, 0.0  # which one is for the policy: the reward reads all
        if guess == number:
            return "", True, 0.0
        return "Larger." if guess < number else "Smaller.", False, 0.0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """1 for finding the number at once, a tenth less for every answer that was needed; else 0."""
    guess = last_number(solution_str)
    found = guess is not None and guess == int(ground_truth)
    answers = len(re.findall(r"Larger\.|Smaller\.|Say a number", solution_str))
    score = max(1.0 - 0.1 * answers, 0.1) if found else 0.0
    return {"score": score, "acc": float(found), "pred": str(guess)}


def last_number(text: str) -> int | None:
    """The last one that `text` says; None if there is none."""
    found = _NUMBER.findall(text)
    return int(found[-1][:9]) if found else None
