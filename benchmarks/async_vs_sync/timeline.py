"""What each moment of a rollout went into, from the times that trajectories carry.

A conversation is, at any moment, in the engine (`generating`), in a tool (`tools`), `held` by
rollout.mode although it could go on, or in code of rank 0 (`driver`). The engine is idle when no
conversation is in it, and each idle moment has one cause.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minirl.types import Trajectory

Span = tuple[float, float]
"""Start and end, by time.perf_counter()."""

WORKING = "generating"
CAUSES = {
    "tools": "all conversations that have begun are in tools",
    "tail": "the same, when at most a quarter of them are left and none will begin",
    "barrier": "a conversation could go on, and the others' tools are waited for",
    "sync": "weight sync, engines put to sleep and woken",
    "trainer": "old log-probs, advantages, update",
    "driver": "agent loops, chat, rewards, records, transport: code of rank 0",
}
"""Of idle moments; `sync` and `trainer` occur in whole steps only."""
TAIL_SHARE = 0.25


@dataclass(kw_only=True)
class Conversation:
    """When one was where; the spans of a kind do not overlap."""

    start: float
    end: float
    generating: list[Span] = field(default_factory=list)
    tools: list[Span] = field(default_factory=list)
    held: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Sampled, per span of `generating`."""

    @classmethod
    def of(cls, trajectory: Trajectory, held: Sequence[Span]) -> "Conversation":
        """From its records; `held` are the spans between asking for a turn and its start."""
        assert trajectory.start is not None and trajectory.end is not None
        calls = [(c.start, c.start + c.seconds) for c in trajectory.tool_calls if c.start]
        turns = [(t.start, t.end) for t in trajectory.turns if t.start and t.end]
        return cls(
            start=trajectory.start,
            end=trajectory.end,
            generating=turns,
            tools=merged(calls),
            held=list(held),
            tokens=sampled_per_turn(trajectory),
        )


def sampled_per_turn(trajectory: Trajectory) -> list[int]:
    """Tokens of the policy's."""
    ends = [0, *trajectory.turn_ends]
    return [sum(trajectory.response_mask[a:b]) for a, b in pairwise(ends)]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Their union, in order, without overlaps."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def attribute(
    conversations: Sequence[Conversation],
    start: float,
    end: float,
    trainer: Sequence[Span] = (),
    aborted: Sequence[Span] = (),
) -> dict[str, float]:
    """Seconds of [start, end] that the engine worked, and idle ones by cause; together all of them.

    It works for conversations that were aborted too (`aborted` has their turns). A moment has the
    first cause of these that is true: the trainer works beside the rollout (`trainer` has its
    spans), code of rank 0 is busy with a conversation (driver), one is held back (barrier), all are
    in tools (tail or tools).
    """
    events = _events(conversations, start, end, {"trainer": trainer, WORKING: aborted})
    most = _most_at_once(conversations)
    last_begins = max((c.start for c in conversations), default=start)
    seconds = dict.fromkeys([WORKING, *CAUSES], 0.0)
    now: Counter[str] = Counter()
    for (time, kind, change), following in pairwise([*events, (end, "active", 0)]):
        now[kind] += change
        if following[0] > time:
            all_begun = time >= last_begins
            is_tail = all_begun and now["active"] <= TAIL_SHARE * most
            seconds[_state(now, is_tail)] += following[0] - time
    return seconds


def _state(now: Counter[str], is_tail: bool) -> str:
    if now[WORKING]:
        return WORKING
    if now["trainer"]:
        return "trainer"
    if not now["active"] or now["active"] > now["tools"] + now["held"]:
        return "driver"
    if now["held"]:
        return "barrier"
    return "tail" if is_tail else "tools"


def _events(
    conversations: Sequence[Conversation],
    start: float,
    end: float,
    others: Mapping[str, Sequence[Span]],
) -> list[tuple[float, str, int]]:
    """(time, state, +1 or -1) in order, within [start, end]; the first is at `start`."""
    spans = [(kind, span) for kind, of_kind in others.items() for span in of_kind]
    for c in conversations:
        spans.append(("active", (c.start, c.end)))
        for kind, of_kind in ((WORKING, c.generating), ("tools", c.tools), ("held", c.held)):
            spans += [(kind, span) for span in of_kind]
    events = [(start, "active", 0)]
    for kind, span in spans:
        a, b = (min(max(time, start), end) for time in span)
        events += [(a, kind, 1), (b, kind, -1)]
    return sorted(events, key=lambda event: event[0])


def _most_at_once(conversations: Sequence[Conversation]) -> int:
    """The largest number of conversations under way at one time."""
    changes = [(c.start, 1) for c in conversations] + [(c.end, -1) for c in conversations]
    most = number = 0
    for _, change in sorted(changes):  # at one time, ends before begins
        number += change
        most = max(most, number)
    return most


def per_bucket(
    conversations: Sequence[Conversation], start: float, end: float, width: float
) -> list[dict[str, float]]:
    """For each `width` seconds: how many conversations were, on average, in each state, and how
    many tokens were sampled (a turn's evenly over its time)."""
    buckets = [
        {"at_s": at * width, WORKING: 0.0, "tools": 0.0, "held": 0.0, "tokens": 0.0}
        for at in range(max(1, -int(-(end - start) // width)))
    ]
    for c in conversations:
        for kind, spans in ((WORKING, c.generating), ("tools", c.tools), ("held", c.held)):
            for a, b in spans:
                for bucket, seconds in _shares(buckets, a - start, b - start, width):
                    bucket[kind] += seconds / width
        for (a, b), tokens in zip(c.generating, c.tokens, strict=True):
            for bucket, seconds in _shares(buckets, a - start, b - start, width):
                bucket["tokens"] += tokens * seconds / (b - a)
    return buckets


def _shares(
    buckets: list[dict[str, float]], a: float, b: float, width: float
) -> Iterable[tuple[dict[str, float], float]]:
    for index in range(max(0, int(a / width)), min(len(buckets), int(b / width) + 1)):
        seconds = min(b, (index + 1) * width) - max(a, index * width)
        if seconds > 0:
            yield buckets[index], seconds
