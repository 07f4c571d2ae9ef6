"""Sums over sequences and groups, for rows [B, T] and packed tokens [T] alike.

Both forms reduce to one: an index tensor that says to which segment each element belongs.

    rows,   B = 2, T = 3    ids = [[0, 0, 0], [1, 1, 1]]
    packed, lengths 2, 3    ids = [0, 0, 1, 1, 1]
    groups, n = 2           ids = [0, 0, 1, 1]           (of whole rows)
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """A partition of the leading dimensions of a tensor into `num` segments."""

    ids: Tensor  # int64, 0 .. num - 1
    num: int

    @classmethod
    def of_sequences(cls, mask: Tensor, sequence_ids: Tensor | None) -> "Segments":
        """Sequences of rows [B, T] (`sequence_ids` None), or of packed tokens [T]."""
        if sequence_ids is not None:
            if sequence_ids.shape != mask.shape:
                raise ValueError(
                    f"sequence_ids: shape {tuple(sequence_ids.shape)} does not match the tokens' "
                    f"{tuple(mask.shape)}; give one id per packed token"
                )
            return cls(sequence_ids, int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0)
        if mask.dim() != 2:
            raise ValueError(
                f"tokens of shape {tuple(mask.shape)} without sequence_ids; "
                "pass rows [B, T], or packed [T] with sequence_ids"
            )
        rows = torch.arange(mask.shape[0], device=mask.device)
        return cls(rows[:, None].expand(mask.shape), mask.shape[0])

    @classmethod
    def of_groups(cls, group_ids: Tensor) -> "Segments":
        """Groups of rows that share an id; ids [B] need not be dense."""
        names, ids = group_ids.unique(return_inverse=True)
        return cls(ids, names.numel())

    def sum(self, x: Tensor) -> Tensor:
        """Sum per segment: [*ids.shape, *rest] to [num, *rest]."""
        flat = x.flatten(0, self.ids.dim() - 1)
        zeros = flat.new_zeros(self.num, *flat.shape[1:])
        return zeros.index_add(0, self.ids.flatten(), flat)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Mean per segment where the 0/1 `mask` is 1; 0 for a segment without such an element."""
        return self.sum(x * mask) / self.sum(mask).clamp(min=1)

    def max(self, x: Tensor) -> Tensor:
        """Maximum per segment of x of the shape of `ids`; -inf for an empty segment."""
        lowest = x.new_full((self.num,), -torch.inf)
        return lowest.scatter_reduce(0, self.ids.flatten(), x.flatten(), "amax")

    def spread(self, per_segment: Tensor) -> Tensor:
        """Give each element its segment's value: [num, *rest] to [*ids.shape, *rest]."""
        return per_segment[self.ids]


@dataclass(frozen=True, slots=True)
class Groups(Segments):
    """Groups of rows [B] in which several rows may be one member, and count as one.

    group of two, the first in two parts    ids = [0, 0, 0]    shares = [1/2, 1/2, 1]
    """

    shares: Tensor  # [B], 1 / number of rows of the member

    def size(self) -> Tensor:
        """Members per group [num]."""
        return self.sum(self.shares).round()

    def member_mean(self, x: Tensor) -> Tensor:
        """Mean over the members [num] of x [B]."""
        return self.sum(x * self.shares) / self.size()
