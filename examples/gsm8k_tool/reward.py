"""The usual shaping: something for the form, something for using the tool, less for many tokens."""

from collections.abc import Mapping
from typing import Any

from minirl.rewards.gsm8k import score_and_answer


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    format_score: float = 0.1,
    tool_bonus: float = 0.1,
    length_penalty: float = 0.05,
) -> dict[str, Any]:
    """1 for the right number behind `####`, `format_score` for a wrong one, 0 for none; and

    `tool_bonus` for a right answer that a tool was asked about (a wrong one earns nothing by a
    call), `-length_penalty` per thousand tokens of the response. The parts are logged.
    """
    plain = score_and_answer(data_source, solution_str, ground_truth)
    is_right = plain["score"] == 1.0
    parts = {
        "format": format_score if plain["pred"] is not None and not is_right else 0.0,
        "tool_bonus": tool_bonus if is_right and extra_info["num_tool_calls"] else 0.0,
        "length_penalty": -length_penalty * extra_info["response_length"] / 1000,
    }
    score = plain["score"] + sum(parts.values())
    return {"score": score, "acc": float(is_right), "pred": plain["pred"], **parts}
