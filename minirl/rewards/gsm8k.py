"""Grade-school math: the answer is one number (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168)."""

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import wraps
from typing import Any, Literal

MAX_CHARACTERS = 300
"""Only so much of the end of a solution is searched."""

_NUMBER = r"(?:-?\$?|\$-)(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_STRICT = re.compile(f"#### ({_NUMBER})", re.ASCII)
_FLEXIBLE = re.compile(_NUMBER, re.ASCII)


def score_and_answer(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` for the right number, `format_score` for a wrong one, 0 when there is none.

    Beside that, as `pred`, the number that was found, for majority votes. Numbers are compared by
    value (`18.0` is `18`). ValueError when the ground truth is no number.
    """
    answer = extract_answer(solution_str, method)
    if answer is None:
        return {"score": 0.0, "pred": None}
    is_right = answer == parse_number(str(ground_truth))
    return {"score": score if is_right else format_score, "pred": str(answer)}


@wraps(score_and_answer, assigned=())  # its signature: options are checked by it
def compute_score(*arguments: Any, **options: Any) -> float:
    """The score of `score_and_answer` alone, of the same arguments."""
    return score_and_answer(*arguments, **options)["score"]


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
