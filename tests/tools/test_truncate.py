import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.testing import byte_tokenizer
from minirl.tools.truncate import MARKERS, split_kept, truncate_text

TOKENIZER = byte_tokenizer()
SIDES = st.sampled_from(["left", "middle", "right"])


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "(truncated)...wxyz"),
        ("middle", "a...(truncated)...z"),
        ("right", "abcd...(truncated)"),
    ],
)
def test_the_side_that_is_named_is_cut_away(side, expected):
    assert truncate_text(
        TOKENIZER, "abcdefghijklmnopqrstuvwxyz", 18 + (side == "middle"), side
    ) == (expected)


def test_split_kept():
    ids = [0, 1, 2, 3, 4, 5]
    assert split_kept(ids, 3, "left") == ([], [3, 4, 5])
    assert split_kept(ids, 3, "middle") == ([0, 1], [5])
    assert split_kept(ids, 3, "right") == ([0, 1, 2], [])


@given(st.text(max_size=80), st.integers(1, 60), SIDES)
def test_the_limit_holds_and_short_texts_are_left_alone(text, limit, side):
    length = len(TOKENIZER.encode(text))
    cut = truncate_text(TOKENIZER, text, limit, side)
    assert len(TOKENIZER.encode(cut)) <= limit
    assert cut == text if length <= limit else cut != text
    if length > limit > len(MARKERS[side]):
        assert MARKERS[side] in cut


def test_a_text_that_is_short_in_any_case_is_not_tokenized():
    assert truncate_text(None, "abc", 4, "middle") == "abc"
    with pytest.raises(AttributeError):
        truncate_text(None, "äbc", 4, "middle")
