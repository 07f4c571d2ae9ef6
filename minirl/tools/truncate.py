"""Cutting token lists and texts to a length."""

from typing import Any, Literal

Side = Literal["left", "middle", "right"]

MARKERS: dict[Side, str] = {
    "left": "(truncated)...",
    "middle": "...(truncated)...",
    "right": "...(truncated)",
}


CHARACTERS_PER_TOKEN = 16
"""More than most texts have; where it is too little, more is looked at."""


def split_kept(token_ids: list[int], keep: int, side: Side) -> tuple[list[int], list[int]]:
    """What stays before and after the cut when `side` is cut away and `keep` tokens stay."""
    tail = {"left": keep, "middle": keep // 2, "right": 0}[side]
    return token_ids[: keep - tail], token_ids[len(token_ids) - tail :]


def truncate_text(tokenizer: Any, text: str, limit: int, side: Side) -> str:
    """`text` in at most `limit` tokens; a marker stands where `side` was cut away."""
    if text.isascii() and len(text) < limit:  # no token is shorter than a character
        return text
    token_ids = _encode_ends(tokenizer, text, limit)
    if len(token_ids) <= limit:
        return text
    keep = limit
    while keep > 0:
        head, tail = (tokenizer.decode(part) for part in split_kept(token_ids, keep, side))
        # a cut inside a character leaves replacement characters at the edge
        cut = head.rstrip("\ufffd") + MARKERS[side] + tail.lstrip("\ufffd")
        excess = len(tokenizer.encode(cut, add_special_tokens=False)) - limit
        if excess <= 0:
            return cut
        keep -= excess
    head, tail = (tokenizer.decode(part) for part in split_kept(token_ids, limit, side))
    return head.rstrip("\ufffd") + tail.lstrip("\ufffd")  # too short for a marker


def _encode_ends(tokenizer: Any, text: str, limit: int) -> list[int]:
    """Tokens of `text`; of one far longer than `limit`, the beginning and the end will do.

    Each has `limit` tokens or more. A second per megabyte would go into those between.
    """
    window = CHARACTERS_PER_TOKEN * limit
    while 2 * window < len(text):
        ends = text[:window], text[-window:]
        head, tail = (tokenizer.encode(end, add_special_tokens=False) for end in ends)
        if min(len(head), len(tail)) >= limit:
            return head + tail
        window *= 4
    return tokenizer.encode(text, add_special_tokens=False)
