"""Which token stream a request continues: by its messages, as clients give them back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.openai.protocol import ChatRequest, Message
from minirl.types import Termination, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a turn of a stream ends."""

    num_messages: int
    """Up to and with the answer."""
    num_tokens: int
    is_closed: bool
    """Whether its last token is the end of the turn."""
    reason: Termination
    """What the trajectory ends for if nothing follows."""


@dataclass(eq=False, slots=True, kw_only=True)
class Stream:
    """One trajectory in the making, and the messages that its tokens stand for."""

    trajectory: Trajectory
    tools: list[dict[str, Any]] | None
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    is_busy: bool = False
    """Whether a request is extending it."""
    refused: Termination | None = None
    """Why the last request that would have extended it was not served."""

    def turn_before(self, request: ChatRequest) -> Turn | None:
        """The last turn that the request's messages hold, if what follows it is an observation."""
        sent = request.messages
        if request.tools != self.tools:  # the prompt shows them
            return None
        for turn in reversed(self.turns):
            new = sent[turn.num_messages :]
            if not new or any(message.role not in ("tool", "user") for message in new):
                continue
            pairs = zip(self.messages[: turn.num_messages], sent, strict=False)
            if all(ours.is_same(theirs) for ours, theirs in pairs):
                return turn
        return None


@dataclass(frozen=True, slots=True)
class Place:
    """Behind which turn of which stream a request goes on."""

    stream: Stream
    turn: Turn

    @property
    def is_free_end(self) -> bool:
        """Whether the stream itself can be extended from here."""
        return self.turn is self.stream.turns[-1] and not self.stream.is_busy

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to here."""
        return self.stream.trajectory.token_ids[: self.turn.num_tokens]

    def rank(self, request: ChatRequest) -> tuple[int, int]:
        """How much of the request is known here, and how much of that came back unchanged.

        The latter tells apart two answers that differ in thoughts only, which clients leave out.
        """
        pairs = zip(self.stream.messages[: self.turn.num_messages], request.messages, strict=False)
        return self.turn.num_messages, sum(ours.is_identical(theirs) for ours, theirs in pairs)


def find_place(streams: Sequence[Stream], request: ChatRequest) -> Place | None:
    """The best place, and of equal ones the latest; None where the request begins anew."""
    places = [
        Place(stream, turn)
        for stream in reversed(streams)
        if (turn := stream.turn_before(request)) is not None
    ]
    return max(places, key=lambda place: place.rank(request), default=None)
