from dataclasses import fields

import pytest
import torch

from minirl.types import PER_SEQUENCE, MicroBatch, TokenOutput, Trajectory, conversations


def sampled(*tokens: int, version: int = 0) -> TokenOutput:
    return TokenOutput(
        token_ids=list(tokens),
        logprobs=[-t / 10 for t in tokens],
        finish_reason="stop",
        weight_version=version,
    )


def test_a_two_turn_conversation() -> None:
    t = Trajectory(prompt_ids=[1, 2])
    t.append_sampled(sampled(3, 4, version=5))
    t.append_observation([8, 9, 10])
    t.append_sampled(sampled(6, version=7))
    assert t.response_ids == [3, 4, 8, 9, 10, 6]
    assert t.response_mask == [1, 1, 0, 0, 0, 1]
    assert t.response_logprobs == [-0.3, -0.4, 0, 0, 0, -0.6]
    assert (t.turn_ends, t.turn_rewards, t.weight_versions) == ([2, 6], [0, 0], [5, 7])
    assert t.token_ids == [1, 2, *t.response_ids]
    assert t.num_turns == 2
    assert t.reward is None and t.termination is None


def test_tokens_without_their_logprobs_are_refused() -> None:
    t = Trajectory(prompt_ids=[1])
    output = TokenOutput(token_ids=[1, 2], logprobs=[-1.0], finish_reason="stop")
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        t.append_sampled(output)
    assert t.response_ids == t.response_mask == t.response_logprobs == t.turn_ends == []


def test_trajectories_share_nothing() -> None:
    first, second = Trajectory(prompt_ids=[1]), Trajectory(prompt_ids=[1])
    output = sampled(2)
    first.append_sampled(output)
    first.append_observation([3])
    assert second.response_ids == [] and output.token_ids == [2]


def test_conversations_are_their_last_stretches() -> None:
    made = [
        Trajectory(prompt_ids=[number], uid=uid, sample_index=index)
        for number, (uid, index) in enumerate([("a", 0), ("a", 0), ("a", 1), ("b", 0), ("b", 0)])
    ]
    assert [t.prompt_ids for t in conversations(made)] == [[1], [2], [4]]


def make_batch(lengths: list[int], **optional: torch.Tensor) -> MicroBatch:
    total, size = sum(lengths), torch.tensor(lengths)
    return MicroBatch(
        tokens=torch.arange(100, 100 + total),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        sequence_ids=torch.repeat_interleave(size),
        response_mask=(torch.arange(total) % 2).float(),
        rollout_logprobs=-torch.arange(total).float(),
        token_rewards=torch.zeros(total),
        lengths=size,
        prompt_lengths=torch.ones_like(size),
        group_ids=torch.arange(len(lengths)) + 7,
        **optional,
    )


def test_select_takes_whole_sequences_in_the_given_order() -> None:
    batch = make_batch([3, 1, 2], advantages=torch.arange(6.0))
    picked = batch.select([2, 0])
    assert picked.tokens.tolist() == [104, 105, 100, 101, 102]
    assert picked.positions.tolist() == [0, 1, 0, 1, 2]
    assert picked.sequence_ids.tolist() == [0, 0, 1, 1, 1]  # counted anew
    assert picked.lengths.tolist() == [2, 3]
    assert picked.group_ids.tolist() == [9, 7]
    assert picked.advantages is not None and picked.advantages.tolist() == [4, 5, 0, 1, 2]
    assert picked.old_logprobs is None
    assert (picked.num_tokens, picked.num_sequences) == (5, 2)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1]], ids=str)
def test_select_where_every_sequence_is_one_token(lengths: list[int]) -> None:
    """[T] and [S] are equal then; they must not be mixed up."""
    batch = make_batch(lengths)
    order = list(range(len(lengths)))[::-1]
    picked = batch.select(order)
    assert picked.tokens.tolist() == [100 + i for i in order]
    assert picked.group_ids.tolist() == [7 + i for i in order]
    assert picked.sequence_ids.tolist() == list(range(len(lengths)))


def test_selecting_nothing_and_everything() -> None:
    batch = make_batch([2, 3], returns=torch.ones(5))
    nothing = batch.select([])
    assert (nothing.num_tokens, nothing.num_sequences) == (0, 0)
    assert nothing.tokens.dtype == torch.int64 and nothing.response_mask.dtype == torch.float32
    for f in fields(MicroBatch):
        before, after = getattr(batch, f.name), getattr(batch.select([0, 1]), f.name)
        assert (before is None and after is None) or torch.equal(before, after)


def test_parts_of_a_batch_make_the_whole_again() -> None:
    batch = make_batch([2, 1, 3, 1])
    parts = [batch.select([1, 3]), batch.select([0, 2])]
    tokens = torch.cat([p.tokens for p in parts])
    assert sorted(tokens.tolist()) == batch.tokens.tolist()
    for part in parts:
        assert part.lengths.sum() == part.num_tokens
        for f in fields(part):
            value = getattr(part, f.name)
            size = part.num_sequences if f.name in PER_SEQUENCE else part.num_tokens
            assert value is None or value.shape == (size,)


def test_to_moves_every_tensor_and_keeps_what_is_unset() -> None:
    moved = make_batch([2], values=torch.ones(2)).to(torch.device("meta"))
    for f in fields(moved):
        value = getattr(moved, f.name)
        assert value is None or value.device.type == "meta"
    assert moved.values is not None and moved.returns is None
