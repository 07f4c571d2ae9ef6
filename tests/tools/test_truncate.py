import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.testing import byte_tokenizer
from minirl.tools import truncate
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


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_of_a_flood_only_the_ends_are_tokenized(side, monkeypatch):
    """And they are cut as if all of it had been."""
    text = "".join(f"{i}é," for i in range(4000))
    tokenized = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda t, **kw: tokenized.append(t) or encode(t, **kw))
    cut = truncate_text(TOKENIZER, text, 60, side)
    assert sum(map(len, tokenized)) < len(text) / 4
    monkeypatch.setattr(truncate, "CHARACTERS_PER_TOKEN", len(text))
    assert truncate_text(TOKENIZER, text, 60, side) == cut


def test_tokens_of_many_characters_are_looked_for_further(monkeypatch):
    monkeypatch.setattr(truncate, "CHARACTERS_PER_TOKEN", 1)
    text = "<tool_response>" * 400
    assert truncate_text(TOKENIZER, text, 21, "right") == "<tool_response>" * 7 + MARKERS["right"]


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
