"""Grade-school math: the answer is one number (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168)."""

import re
from fractions import Fraction
from typing import Any, Literal

MAX_CHARACTERS = 300
"""Only so much of the end of a solution is searched."""

_NUMBER = r"-?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_STRICT = re.compile(f"#### ({_NUMBER})", re.ASCII)
_FLEXIBLE = re.compile(_NUMBER, re.ASCII)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for a wrong one, 0 when there is none.

    Numbers are compared by value (`18.0` is `18`). ValueError when the ground truth is no number.
    """
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == parse_number(str(ground_truth)) else format_score


def score_and_answer(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`compute_score` as `score`, and the answer that it found as `pred`, for majority votes."""
    answer = extract_answer(solution_str, method)
    options: dict[str, Any] = {"method": method, "format_score": format_score, "score": score}
    return {
        "score": compute_score(data_source, solution_str, ground_truth, extra_info, **options),
        "pred": None if answer is None else str(answer),
    }


def extract_answer(
    solution: str, method: Literal["strict", "flexible"] = "strict"
) -> Fraction | None:
    """The answer in the last 300 characters, or None.

    strict: the number behind the last `#### ` that has one. flexible: the last number.
    """
    pattern = _STRICT if method == "strict" else _FLEXIBLE
    found = pattern.findall(solution[-MAX_CHARACTERS:])
    return parse_number(found[-1]) if found else None


def parse_number(text: str) -> Fraction:
    """The value of `1,234.50`, `$18` or `-3`; ValueError for anything else."""
    try:
        return Fraction(text.replace(",", "").replace("$", ""))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"reward_model.ground_truth: got {text!r}; expected a number") from error
