import pytest

from minirl.registry import option_names
from minirl.rewards.gsm8k import compute_score, score_and_answer


@pytest.mark.parametrize(
    ("solution", "truth", "strict", "flexible"),
    [
        ("#### 18", "18", 1.0, 1.0),
        ("so 9 * 2 = 18\n#### 18\n", "18", 1.0, 1.0),
        ("#### 17 no, #### 18", "18", 1.0, 1.0),  # the last one counts
        ("#### 18 no, #### 17", "18", 0.1, 0.1),
        ("#### $1,234.50", "1234.5", 1.0, 1.0),
        ("#### 1,234,567", "1,234,567", 1.0, 1.0),
        ("#### -5", "-5", 1.0, 1.0),
        ("#### $-5", "-5", 1.0, 1.0),
        ("#### -$5", "-5", 1.0, 1.0),
        ("#### 5", "-5", 0.1, 0.1),
        ("#### --5", "-5", 0.0, 1.0),  # no number in strict form, and no error
        ("#### -$-5", "-5", 0.0, 1.0),
        ("#### 18.00", "18", 1.0, 1.0),
        ("#### 18.", "18", 1.0, 1.0),
        ("#### 180", "18", 0.1, 0.1),
        ("The answer is 18.", "18", 0.0, 1.0),
        ("The answer is 18 apples", "18", 0.0, 1.0),
        ("####18", "18", 0.0, 1.0),
        ("### 18", "18", 0.0, 1.0),
        ("#### eighteen", "18", 0.0, 0.0),
        ("", "18", 0.0, 0.0),
        (", . $ #### .", "18", 0.0, 0.0),
        ("#### 18" + " " * 293, "18", 1.0, 1.0),  # just inside the last 300 characters
        ("#### 18" + " " * 294, "18", 0.0, 1.0),
        ("18" + " " * 300, "18", 0.0, 0.0),
        ("#### 18", 18, 1.0, 1.0),
    ],
)
def test_scores(solution, truth, strict, flexible):
    for method, expected in (("strict", strict), ("flexible", flexible)):
        score = compute_score("openai/gsm8k", solution, truth, method=method, format_score=0.1)
        assert score == expected, method


def test_score_is_an_option_and_format_is_worth_nothing_by_default():
    assert compute_score("x", "#### 3", "3", score=2.0) == 2.0
    assert compute_score("x", "#### 4", "3") == 0.0


def test_a_ground_truth_without_a_number_is_an_error():
    with pytest.raises(ValueError, match=r"reward_model.ground_truth: got 'three'"):
        compute_score("x", "#### 3", "three")


def test_the_two_functions_agree_and_have_the_same_options():
    assert score_and_answer("x", "#### 4", "3", format_score=0.5) == {"score": 0.5, "pred": "4"}
    assert compute_score("x", "#### 4", "3", format_score=0.5) == 0.5
    assert option_names(compute_score) == {"method", "format_score", "score"}
