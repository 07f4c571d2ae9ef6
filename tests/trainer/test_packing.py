import heapq
import itertools
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import make_batch

from minirl.trainer import packing
from minirl.types import TokenOutput, Trajectory

LENGTHS = st.lists(st.integers(1, 90), max_size=60)


def two_trajectories() -> list[Trajectory]:
    first = Trajectory(prompt_ids=[1, 2])
    first.append_sampled(TokenOutput(token_ids=[3], logprobs=[-0.5], finish_reason="stop"))
    first.append_observation([4])
    first.append_sampled(TokenOutput(token_ids=[5], logprobs=[-0.25], finish_reason="stop"))
    second = Trajectory(prompt_ids=[6])
    second.append_sampled(
        TokenOutput(token_ids=[7, 8], logprobs=[-1.0, -2.0], finish_reason="stop")
    )
    return [first, second]


def test_pack_puts_values_at_their_tokens():
    batch = packing.pack(two_trajectories(), [[0.0, 0.0, 1.0], [0.0, -1.0]], [4, 4])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert batch.response_mask.tolist() == [0, 0, 1, 0, 1, 0, 1, 1]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, 0, -0.25, 0, -1, -2]
    assert batch.token_rewards.tolist() == [0, 0, 0, 0, 1, 0, 0, -1]
    assert batch.lengths.tolist() == [5, 3]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.group_ids.tolist() == [4, 4]


def test_to_pack_takes_no_more_memory_than_the_batch():
    trajectory = Trajectory(prompt_ids=[5] * 1000)
    sampled = TokenOutput(token_ids=[7] * 9000, logprobs=[-0.5] * 9000, finish_reason="stop")
    trajectory.append_sampled(sampled)
    rewards = [0.0] * 9000
    tracemalloc.start()
    packing.pack([trajectory] * 10, [rewards] * 10, [0] * 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 21 * 10 * 10_000  # bytes: the tokens' 8, three values of 4, without lists of them


def test_a_trajectory_that_must_not_train_keeps_its_place():
    batch = packing.pack(two_trajectories(), [[0.0] * 3, [0.0] * 2], [0, 0], trains=[False, True])
    assert batch.response_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert packing.trained_per_sequence(batch).tolist() == [0, 2]


def test_pack_refuses_rewards_of_another_length():
    with pytest.raises(ValueError, match="2 rewards for 3 response tokens"):
        packing.pack(two_trajectories(), [[0.0] * 2, [0.0] * 2], [0, 0])


def test_rows_and_back():
    batch = packing.pack(two_trajectories(), [[0.0, 0.0, 1.0], [0.0, -1.0]], [0, 1])
    rows = packing.to_rows(batch, "token_rewards")
    assert rows.tolist() == [[0, 0, 1], [0, -1, 0]]
    assert torch.equal(packing.from_rows(batch, rows), batch.token_rewards)
    nothing = packing.pack([], [], [])
    rows = packing.to_rows(nothing, "token_rewards")
    assert rows.shape == (0, 0) and packing.from_rows(nothing, rows).shape == (0,)
    big = make_batch()
    assert torch.equal(packing.from_rows(big, packing.to_rows(big, "advantages")), big.advantages)


def test_mini_batches_keep_groups_together():
    batch = make_batch(num_groups=3, group_size=2)
    batch.group_ids = torch.tensor([7, 7, 5, 5, 9, 9])
    assert packing.mini_batches(batch, 2) == [[0, 1, 2, 3], [4, 5]]


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 100))
def test_plan_covers_everything_within_the_budget(lengths, num_ranks, max_tokens):
    ranks = packing.plan(lengths, num_ranks, max_tokens)
    assert len(ranks) == num_ranks
    assert len({len(slots) for slots in ranks}) == 1
    slots = [members for rank in ranks for members in rank]
    assert sorted(s for members in slots for s in members) == list(range(len(lengths)))
    for members in slots:
        assert len(members) <= 1 or sum(lengths[s] for s in members) <= max_tokens


@pytest.mark.parametrize(
    "lengths",
    [[20 + (7919 * i) % 16000 for i in range(1024)], [9000] * 1024],
    ids=["of all lengths", "two do not fit"],
)
def test_a_plan_takes_time_in_proportion_to_its_sequences(lengths, monkeypatch):
    num_pops, pop = itertools.count(), heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda heap: (next(num_pops), pop(heap))[1])
    packing.plan(lengths, 2, 16384)
    assert next(num_pops) < 5 * len(lengths)


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 100))
def test_a_plan_has_no_slot_too_many(lengths, num_ranks, max_tokens):
    num_slots = len(packing.plan(lengths, num_ranks, max_tokens)[0])
    order = sorted(range(len(lengths)), key=lambda s: (-lengths[s], s))
    fewer = packing._fill(order, lengths, (num_slots - 1) * num_ranks, max_tokens)
    assert num_slots == 1 or fewer is None


def test_a_number_of_slots_far_above_the_least_is_found_in_a_few_attempts(monkeypatch):
    num_attempts, fill = itertools.count(), packing._fill
    monkeypatch.setattr(packing, "_fill", lambda *a: (next(num_attempts), fill(*a))[1])
    lengths = [9900, 7300] * 256  # only short ones share a slot, two by two
    assert len(packing.plan(lengths, 1, 16384)[0]) == 256 + 128
    assert next(num_attempts) < 20


def test_places_of_a_few_sequences_are_found_without_those_of_all(monkeypatch):
    batch, sizes, arange = make_batch(), [], torch.arange
    expected = [i for s in (5, 2) for i in (batch.sequence_ids == s).nonzero()[:, 0].tolist()]
    monkeypatch.setattr(torch, "arange", lambda *a: (sizes.append(len(arange(*a))), arange(*a))[1])
    assert batch.places([5, 2]).tolist() == expected
    assert sum(sizes) == len(expected)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(1, 4))
def test_plan_is_balanced(lengths, num_ranks):
    """Within a slot that has room, no two ranks differ by more than one sequence's cost."""
    (slot,) = zip(*packing.plan(lengths, num_ranks, sum(lengths)), strict=True)
    costs = [sum(packing.cost(lengths[s]) for s in members) for members in slot]
    assert max(costs) - min(costs) <= packing.cost(max(lengths)) + 1e-6
