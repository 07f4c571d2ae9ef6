"""Trajectories to packed batches, to rows and back, and which rank computes which sequence."""

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from minirl.types import MicroBatch, Trajectory

QUADRATIC_LENGTH = 16384
"""Tokens at which attention costs as much as all else, for models of 1B to 8B parameters
(6 x hidden size)."""


def pack(
    trajectories: list[Trajectory],
    token_rewards: list[list[float]],
    group_ids: list[int],
    trains: list[bool] | None = None,
    prompts: list[list[int]] | None = None,
    sample_ids: list[int] | None = None,
) -> MicroBatch:
    """Lay trajectories end to end; `token_rewards[i]` has one reward per response token.

    A trajectory with `trains[i]` false keeps its place, with response_mask 0 everywhere: it does
    not enter the loss. `prompts[i]`, where given, are used in place of its own prompt's tokens.
    Trajectories with the same `sample_ids[i]` are stretches of one conversation.
    """
    trains = trains or [True] * len(trajectories)
    prompts = prompts or [t.prompt_ids for t in trajectories]
    for t, reward in zip(trajectories, token_rewards, strict=True):
        if len(reward) != len(t.response_ids):
            raise ValueError(f"{len(reward)} rewards for {len(t.response_ids)} response tokens")
    prompt_lengths = torch.tensor([len(ids) for ids in prompts], dtype=torch.int64)
    lengths = prompt_lengths + torch.tensor(
        [len(t.response_ids) for t in trajectories], dtype=torch.int64
    )
    num_tokens = int(lengths.sum())
    starts = torch.cumsum(lengths, 0) - lengths
    sequence_ids = torch.repeat_interleave(lengths)

    def laid(pairs: Iterable[tuple[Iterable[float], Iterable[float]]], dtype: type) -> Tensor:
        # torch.tensor(list) takes three times as long, in which no other thread runs.
        parts = (part for prompt_and_response in pairs for part in prompt_and_response)
        return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype, num_tokens))

    def behind_prompts(responses: Iterable[Iterable[float]]) -> Tensor:
        blank = (repeat(0.0, len(ids)) for ids in prompts)
        return laid(zip(blank, responses, strict=True), np.float32)

    masks = (
        t.response_mask if train else repeat(0.0, len(t.response_mask))
        for t, train in zip(trajectories, trains, strict=True)
    )
    return MicroBatch(
        tokens=laid(zip(prompts, (t.response_ids for t in trajectories), strict=True), np.int64),
        positions=torch.arange(num_tokens) - starts[sequence_ids],
        sequence_ids=sequence_ids,
        response_mask=behind_prompts(masks),
        rollout_logprobs=behind_prompts(t.response_logprobs for t in trajectories),
        token_rewards=behind_prompts(token_rewards),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        sample_ids=None if sample_ids is None else torch.tensor(sample_ids, dtype=torch.int64),
    )


def to_rows(batch: MicroBatch, name: str) -> Tensor:
    """The field `name` of the response part as [B, T], padded on the right with 0.

    Row i holds the response of sequence i; T is the longest response.
    """
    values = getattr(batch, name)
    responses = _responses(batch, values)
    padded = values.new_zeros(batch.num_sequences, max(map(len, responses), default=0))
    for row, response in zip(padded, responses, strict=True):
        row[: len(response)] = response
    return padded


TRACED = ("token_rewards", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


def response_values(batch: MicroBatch, sequence: int) -> dict[str, list[float]]:
    """What is known of each response token of one sequence, for traces: TRACED, where set."""
    start = int(batch.lengths[:sequence].sum())
    response = slice(
        start + int(batch.prompt_lengths[sequence]), start + int(batch.lengths[sequence])
    )
    values = {name: getattr(batch, name) for name in TRACED}
    return {name: value[response].tolist() for name, value in values.items() if value is not None}


def from_rows(batch: MicroBatch, rows: Tensor) -> Tensor:
    """The inverse of `to_rows`: values [B, T] at their tokens, [N], 0 on prompts."""
    packed = rows.new_zeros(batch.num_tokens)
    for response, row in zip(_responses(batch, packed), rows, strict=True):
        response.copy_(row[: len(response)])
    return packed


def _responses(batch: MicroBatch, values: Tensor) -> list[Tensor]:
    """Of values [N], each sequence's response: views."""
    sequences = values.split(batch.lengths.tolist())
    starts = batch.prompt_lengths.tolist()
    return [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]


def response_positions(batch: MicroBatch) -> Tensor:
    """Index of each token within its response, negative in the prompt: [N] int64."""
    return batch.positions - batch.prompt_lengths[batch.sequence_ids]


def empty_like(batch: MicroBatch) -> MicroBatch:
    """One token that does not train, with the fields of `batch`: what an idle rank computes on."""
    zeros = {name: torch.zeros(1, dtype=v.dtype) for name, v in batch.tensors().items()}
    one = torch.ones(1, dtype=torch.int64)
    return MicroBatch(**zeros | {"lengths": one, "prompt_lengths": one})


def trained_per_sequence(batch: MicroBatch) -> Tensor:
    """Tokens with response_mask 1 of each sequence: [S] float32."""
    return torch.zeros(batch.num_sequences).index_add(0, batch.sequence_ids, batch.response_mask)


def mini_batches(batch: MicroBatch, prompts_per_mini_batch: int) -> list[list[int]]:
    """Sequence indices of each mini-batch: whole groups, in the order of the batch.

    The last mini-batch is smaller when groups were dropped.
    """
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_ids.tolist()):
        groups.setdefault(group, []).append(sequence)
    members = list(groups.values())
    chunks = range(0, len(members), prompts_per_mini_batch)
    return [list(chain(*members[i : i + prompts_per_mini_batch])) for i in chunks]


def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Spread sequences over ranks and micro-batches: [rank][slot] is a list of sequence indices.

    Every rank has the same number of slots, the fewest that are found; a slot holds at most
    `max_tokens` tokens, or one longer sequence, or nothing. Estimated costs are balanced, first
    within a slot, where ranks wait for each other, then over the slots. A function of its
    arguments alone: every rank computes the same plan without communication.
    """
    order = sorted(range(len(lengths)), key=lambda s: (-lengths[s], s))
    tokens = sum(min(n, max_tokens) for n in lengths)
    alone = sum(2 * n > max_tokens for n in lengths)  # no two of them share a slot
    fill = cache(lambda num_slots: _fill(order, lengths, num_slots * num_ranks, max_tokens))
    least = most = max(1, -(-tokens // (num_ranks * max_tokens)), -(-alone // num_ranks))
    while fill(most) is None:  # one by one, it could be thousands of times
        least, most = most + 1, most + 2 * (most - least + 1)
    num_slots = bisect_left(range(most), True, lo=least, key=lambda n: fill(n) is not None)
    bins = fill(num_slots) or []
    bins.sort(key=lambda members: -sum(cost(lengths[s]) for s in members))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for slot in range(num_slots):
        near = bins[slot * num_ranks : (slot + 1) * num_ranks]
        for rank, members in enumerate(near if slot % 2 == 0 else reversed(near)):
            ranks[rank].append(sorted(members))
    return ranks


def cost(length: int) -> float:
    """Estimated work for a sequence, in tokens: linear, plus quadratic for attention."""
    return length * (1 + length / QUADRATIC_LENGTH)


def _fill(
    order: list[int], lengths: list[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Each sequence, longest first, into the cheapest bin with room; None when one has none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, 0, b) for b in range(num_bins)]  # (cost, tokens, bin)
    full: list[tuple[int, float, int]] = []  # (tokens, cost, bin) without room for the last one
    for s in order:
        while full and full[0][0] + lengths[s] <= max_tokens:
            tokens, spent, b = heapq.heappop(full)
            heapq.heappush(heap, (spent, tokens, b))
        while heap and heap[0][1] and heap[0][1] + lengths[s] > max_tokens:
            spent, tokens, b = heapq.heappop(heap)
            heapq.heappush(full, (tokens, spent, b))
        if not heap:
            return None
        spent, tokens, b = heap[0]
        bins[b].append(s)
        heapq.heapreplace(heap, (spent + cost(lengths[s]), tokens + lengths[s], b))
    return bins
