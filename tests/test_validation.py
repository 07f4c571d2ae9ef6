from fractions import Fraction
from itertools import combinations
from statistics import fmean

import pytest

from minirl.validation import ValResult, best_at_k, majority, pass_at_k, validation_metrics


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n) -> None:
    for c in range(n + 1):
        scores = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(scores, k))
            share = Fraction(sum(map(max, subsets)), len(subsets))
            assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-12)
            assert best_at_k(scores, k) == pytest.approx(float(share), abs=1e-12)


def test_best_at_k_is_the_mean_of_the_maxima_of_all_subsets() -> None:
    scores = [0.3, -1.0, 2.5, 0.3, 0.0]
    for k in range(1, 6):
        expected = fmean(map(max, combinations(scores, k)))
        assert best_at_k(scores, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "values", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["8", "7", "8"], [0, 1, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),
        (["8", "7"], [0, 1], 0.5),
        (["7", "8", "9"], [1, 0, 0], 1 / 3),
        (["7", None, None], [1, 0, 0], 1.0),
        ([None, None], [0, 0], 0.0),
    ],
)
def test_majority(answers, values, expected) -> None:
    assert majority(answers, values) == pytest.approx(expected)


def results(source: str, prompts: dict[str, list[tuple[float, str | None]]]) -> list[ValResult]:
    return [
        ValResult(data_source=source, uid=uid, score=score, answer=answer)
        for uid, answers in prompts.items()
        for score, answer in answers
    ]


def test_validation_metrics() -> None:
    gsm8k = {
        "a": [(1.0, "7"), (1.0, "7"), (0.1, "8"), (0.0, None)],
        "b": [(0.0, "1"), (0.0, "2"), (0.1, "2"), (0.0, "3")],
    }
    got = validation_metrics(results("openai/gsm8k", gsm8k) + results("math", {"a": [(1.0, None)]}))
    assert got == pytest.approx(
        {
            "val-core/openai/gsm8k/reward/mean@4": 2.2 / 8,
            "val-core/openai/gsm8k/acc/mean@4": 0.25,
            "val-core/openai/gsm8k/acc/pass@1": 0.25,
            "val-core/openai/gsm8k/acc/pass@2": (1 - 1 / 6) / 2,
            "val-core/openai/gsm8k/acc/pass@4": 0.5,
            "val-core/openai/gsm8k/acc/maj@4": 0.5,
            "val-aux/openai/gsm8k/num_prompts": 2,
            "val-aux/openai/gsm8k/reward/std@4": (0.47631397 + 0.04330127) / 2,
            "val-aux/openai/gsm8k/reward/best@1/mean": 2.2 / 8,
            "val-aux/openai/gsm8k/reward/best@2/mean": (5.1 / 6 + 0.3 / 6) / 2,
            "val-aux/openai/gsm8k/reward/best@4/mean": 0.55,
            "val-core/math/reward/mean@1": 1.0,
            "val-core/math/acc/mean@1": 1.0,
            "val-core/math/acc/pass@1": 1.0,
            "val-aux/math/num_prompts": 1,
        }
    )


def test_without_acc_a_score_of_1_is_success() -> None:
    got = validation_metrics(results("x", {"a": [(1.0, None), (0.9, None), (0.0, None)]}))
    assert got["val-core/x/acc/mean@3"] == pytest.approx(1 / 3)
    assert [name for name in got if "/acc/pass@" in name] == [
        f"val-core/x/acc/pass@{k}" for k in (1, 2, 3)
    ]
    assert not any("/maj@" in name for name in got)


def test_unequal_numbers_of_answers_are_refused() -> None:
    uneven = results("x", {"a": [(1.0, None)] * 2, "b": [(1.0, None)]})
    with pytest.raises(ValueError, match="'x': 1 answers to prompt 'b' but 2 to 'a'"):
        validation_metrics(uneven)


def test_no_results_no_metrics() -> None:
    assert validation_metrics([]) == {}
