"""The optimal token baseline against its definition, written as loops."""

import pytest
import torch

from minirl.algorithms import AdvantageInputs, compute_advantages

F64 = torch.float64


def inputs_of(mask: torch.Tensor, groups: list[int]) -> AdvantageInputs:
    draw = torch.Generator().manual_seed(1)
    return AdvantageInputs(
        token_rewards=torch.randn(mask.shape, generator=draw, dtype=F64) * mask,
        response_mask=mask,
        group_ids=torch.tensor(groups),
        logprob_stats=torch.rand(mask.shape, generator=draw, dtype=F64),
    )


def by_definition(tokens: list[tuple[list, list]], zero_tail: bool) -> list[list[float]]:
    """One group; per trajectory its sampled tokens' rewards and statistics."""
    advantages = []
    lengths = sorted(len(rewards) for rewards, _ in tokens)
    for rewards, _ in tokens:
        row = []
        for t in range(len(rewards)):
            alive = [(sum(r[t:]), sum(s[: t + 1])) for r, s in tokens if len(r) > t]
            baseline = sum(g * w for g, w in alive) / (sum(w for _, w in alive) + 1e-8)
            in_tail = t >= lengths[-2]
            row.append(sum(rewards[t:]) - (0.0 if zero_tail and in_tail else baseline))
        advantages.append(row)
    return advantages


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_single_turn(name, zero_tail):
    lengths = [3, 6, 4]
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).to(F64)
    inputs = inputs_of(mask, [0, 0, 0])
    tokens = [
        (inputs.token_rewards[i, :n].tolist(), inputs.logprob_stats[i, :n].tolist())
        for i, n in enumerate(lengths)
    ]
    advantages, returns = compute_advantages(name, inputs, handle_zero_tail=zero_tail)
    for i, expected in enumerate(by_definition(tokens, zero_tail)):
        assert advantages[i, : lengths[i]].tolist() == pytest.approx(expected)
        assert returns[i, 0] == pytest.approx(sum(tokens[i][0]))
    assert (advantages * (1 - mask) == 0).all()


def test_observations_are_skipped_or_not():
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]], dtype=F64)
    inputs = inputs_of(mask, [0, 0])
    r, s = inputs.token_rewards, inputs.logprob_stats
    skipped, _ = compute_advantages("tir_optimal_token_baseline", inputs)
    tokens = [
        (r[0, [0, 3, 4]].tolist(), s[0, [0, 3, 4]].tolist()),
        (r[1, :3].tolist(), s[1, :3].tolist()),
    ]
    first, second = by_definition(tokens, True)
    assert skipped[0, [0, 3, 4]].tolist() == pytest.approx(first)
    assert skipped[1, :3].tolist() == pytest.approx(second)
    positional, _ = compute_advantages("optimal_token_baseline", inputs)
    # position 1: only the second samples, so the baseline is its own; 3 and 4 are the first's tail
    assert positional[1, 1] == pytest.approx(0, abs=1e-6)
    assert positional[0, 3:5].tolist() == pytest.approx([float(r[0, 3:].sum()), float(r[0, 4])])
    assert positional[0, 0] == pytest.approx(first[0])


def test_a_tie_in_length_leaves_no_tail():
    inputs = inputs_of(torch.ones(3, 4, dtype=F64), [0, 0, 0])
    with_tail, _ = compute_advantages("optimal_token_baseline", inputs)
    without, _ = compute_advantages("optimal_token_baseline", inputs, handle_zero_tail=False)
    assert torch.equal(with_tail, without)


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_step_in_which_nothing_trains(name, length):
    for result in compute_advantages(name, inputs_of(torch.zeros(3, length, dtype=F64), [0, 0, 1])):
        assert torch.equal(result, torch.zeros(3, length, dtype=F64))
