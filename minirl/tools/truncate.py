"""Cutting token lists and texts to a length."""

from typing import Any, Literal

Side = Literal["left", "middle", "right"]

MARKERS: dict[Side, str] = {
    "left": "(truncated)...",
    "middle": "...(truncated)...",
    "right": "...(truncated)",
}


def split_kept(token_ids: list[int], keep: int, side: Side) -> tuple[list[int], list[int]]:
    """What stays before and after the cut when `side` is cut away and `keep` tokens stay."""
    tail = {"left": keep, "middle": keep // 2, "right": 0}[side]
    return token_ids[: keep - tail], token_ids[len(token_ids) - tail :]


def truncate_text(tokenizer: Any, text: str, limit: int, side: Side) -> str:
    """`text` in at most `limit` tokens; a marker stands where `side` was cut away."""
    if text.isascii() and len(text) < limit:  # no token is shorter than a character
        return text
    token_ids = tokenizer.encode(text, add_special_tokens=False)
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
