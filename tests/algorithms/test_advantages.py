"""Every estimator by hand on small cases, and what holds for all of them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from minirl.algorithms import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    compute_advantages,
    group_difficulty,
    requirements,
    whiten,
)

F64 = torch.float64
ARRAYS = (
    "token_rewards",
    "response_mask",
    "values",
    "logprob_stats",
    "logprobs",
    "hinted_logprobs",
)


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


def outcome(rewards: list[float], groups: list[int], lengths: list[int] | None = None, **more):
    """Rows of `lengths` sampled tokens with the reward on the last."""
    lengths = lengths or [1] * len(rewards)
    positions = torch.arange(max(lengths))
    ends = torch.tensor(lengths)[:, None]
    return AdvantageInputs(
        token_rewards=tensor(rewards)[:, None] * (positions == ends - 1),
        response_mask=(positions < ends).to(F64),
        group_ids=torch.tensor(groups),
        **more,
    )


def per_row(name: str, inputs: AdvantageInputs, **options) -> list[float]:
    """The one advantage of each row (first column), after checking that all its tokens have it."""
    advantages, returns = compute_advantages(name, inputs, **options)
    torch.testing.assert_close(advantages, advantages[:, :1] * inputs.response_mask)
    assert torch.equal(advantages, returns)
    return advantages[:, 0].tolist()


REWARDS, GROUPS = [1.0, 0.0, 0.0, 2.0, 5.0], [7, 7, 7, 3, 3]


def test_grpo():
    # group 7: mean 1/3, unbiased variance 1/3; group 3: mean 3.5, unbiased variance 4.5
    s7, s3 = math.sqrt(1 / 3) + 1e-6, math.sqrt(4.5) + 1e-6
    expected = [2 / 3 / s7, -1 / 3 / s7, -1 / 3 / s7, -1.5 / s3, 1.5 / s3]
    assert per_row("grpo", outcome(REWARDS, GROUPS, [2, 1, 3, 3, 1])) == pytest.approx(expected)
    plain = per_row("grpo", outcome(REWARDS, GROUPS), norm_adv_by_std_in_grpo=False)
    assert plain == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1.5, 1.5])


def test_grpo_passk():
    rewards, groups = [1.0, 4.0, 2.0, 3.0, 3.0, 0.0], [0, 0, 0, 1, 1, 1]
    plain = per_row("grpo_passk", outcome(rewards, groups), norm_adv_by_std_in_grpo=False)
    assert plain == pytest.approx([0, 2, 0, 0, 0, 0])  # two share the lead in group 1: no margin
    std = math.sqrt(((1 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2) / 2)
    assert per_row("grpo_passk", outcome(rewards, groups))[1] == pytest.approx(2 / (std + 1e-6))


def test_rloo():
    inputs = outcome(REWARDS, GROUPS)
    assert per_row("rloo", inputs) == pytest.approx([1.0, -0.5, -0.5, -3.0, 3.0])


def test_reinforce_plus_plus_baseline():
    inputs = outcome(REWARDS, GROUPS, [2, 1, 3, 3, 1])
    raw = [2 / 3] * 2 + [-1 / 3] + [-1 / 3] * 3 + [-1.5] * 3 + [1.5]  # one per token
    mean = sum(raw) / 10
    scale = 1 / math.sqrt(sum((x - mean) ** 2 for x in raw) / 9 + 1e-8)
    expected = [(x - mean) * scale for x in (2 / 3, -1 / 3, -1 / 3, -1.5, 1.5)]
    assert per_row("reinforce_plus_plus_baseline", inputs) == pytest.approx(expected)


def test_opo():
    # group 7: (2*1 + 0 + 0) / 6 = 1/3; group 3: (3*2 + 1*5) / 4 = 2.75
    inputs = outcome(REWARDS, GROUPS, [2, 1, 3, 3, 1])
    assert per_row("opo", inputs) == pytest.approx([2 / 3, -1 / 3, -1 / 3, -0.75, 2.25])


def test_gpg():
    # 3 of 5 trajectories have a reward
    expected = [5 / 3 * x for x in (2 / 3, -1 / 3, -1 / 3, -1.5, 1.5)]
    assert per_row("gpg", outcome(REWARDS, GROUPS)) == pytest.approx(expected)
    halved = per_row("gpg", outcome(REWARDS, GROUPS), f_norm=2.0)
    assert halved == pytest.approx([x / 2 for x in expected])


def test_gdpo():
    components = {"format": tensor([1, 0, 1, 0]), "answer": tensor([0, 10, 10, 0])}
    inputs = outcome([9, 9, 9, 9], [0, 0, 1, 1], reward_components=components)
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)  # +-0.5 over the standard deviation of {0, 1}
    ten = 5 / (10 * math.sqrt(0.5) + 1e-6)
    raw = [unit - 3 * ten, -unit + 3 * ten, unit + 3 * ten, -unit - 3 * ten]
    scale = 1 / math.sqrt(sum(x * x for x in raw) / 3 + 1e-8)
    options = {"gdpo_reward_keys": ["format", "answer"], "gdpo_reward_weights": [1.0, 3.0]}
    assert per_row("gdpo", inputs, **options) == pytest.approx([x * scale for x in raw])
    only = per_row("gdpo", inputs, gdpo_reward_keys=["answer"], norm_adv_by_std_in_grpo=False)
    assert only == pytest.approx([x * math.sqrt(3) / 2 for x in (-1, 1, 1, -1)])
    with pytest.raises(ValueError, match="no reward component 'fromat'; did you mean 'format'"):
        compute_advantages("gdpo", inputs, gdpo_reward_keys=["fromat"])
    with pytest.raises(ValueError, match="gdpo_reward_weights"):
        compute_advantages("gdpo", inputs, gdpo_reward_weights=[1.0])


TURNS = tensor([[1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
TURN_REWARDS = tensor([[0, 0.5, 0, 0, 2, 0, 0], [0, 0, 1, 0, 0, 0, 0]])


def test_gae_steps_over_observations():
    values = tensor([[0.1, 0.2, 9, 9, 0.3, 9, 9], [0.4, 0.5, 0.6, 9, 9, 9, 9]])
    inputs = AdvantageInputs(
        token_rewards=TURN_REWARDS,
        response_mask=TURNS,
        group_ids=torch.tensor([0, 0]),
        values=values,
    )
    gamma, lam = 0.9, 0.8
    a4 = 2 - 0.3
    a1 = 0.5 + gamma * 0.3 - 0.2 + gamma * lam * a4
    a0 = gamma * 0.2 - 0.1 + gamma * lam * a1
    b2 = 1 - 0.6
    b1 = gamma * 0.6 - 0.5 + gamma * lam * b2
    b0 = gamma * 0.5 - 0.4 + gamma * lam * b1
    raw = tensor([[a0, a1, 0, 0, a4, 0, 0], [b0, b1, b2, 0, 0, 0, 0]])
    advantages, returns = compute_advantages("gae", inputs, gamma=gamma, lam=lam)
    torch.testing.assert_close(returns, (raw + values) * TURNS)
    sampled = raw[TURNS > 0]
    expected = (raw - sampled.mean()) / (sampled.var() + 1e-8).sqrt() * TURNS
    torch.testing.assert_close(advantages, expected)


def test_gae_with_lambda_1_is_reward_to_go_minus_value():
    values = torch.linspace(-1, 1, 14, dtype=F64).view(2, 7)
    inputs = AdvantageInputs(
        token_rewards=TURN_REWARDS,
        response_mask=TURNS,
        group_ids=torch.tensor([0, 1]),
        values=values,
    )
    _, returns = compute_advantages("gae", inputs)
    to_go = tensor([[2.5, 2.5, 0, 0, 2, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
    torch.testing.assert_close(returns, to_go)


def test_reinforce_plus_plus_carries_the_reward_through_observations():
    inputs = AdvantageInputs(
        token_rewards=TURN_REWARDS, response_mask=TURNS, group_ids=torch.tensor([0, 1])
    )
    advantages, returns = compute_advantages("reinforce_plus_plus", inputs, gamma=0.5)
    to_go = tensor([[0.75, 1.5, 0, 0, 2, 0, 0], [0.25, 0.5, 1, 0, 0, 0, 0]])
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(advantages, whiten(to_go, TURNS))
    sampled = advantages[TURNS > 0]
    assert float(sampled.mean()) == pytest.approx(0) and float(sampled.std()) == pytest.approx(1)


def test_remax():
    inputs = AdvantageInputs(
        token_rewards=TURN_REWARDS,
        response_mask=TURNS,
        group_ids=torch.tensor([0, 1]),
        greedy_rewards=tensor([1.0, 3.0]),
    )
    advantages, returns = compute_advantages("remax", inputs)
    expected = tensor([[1.5, 1.5, 0, 0, 1, 0, 0], [-2, -2, -2, 0, 0, 0, 0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + tensor([[1.0], [3.0]]) * TURNS)


def test_cpo():
    mask = tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    logprobs = torch.full((4, 4), -2.0, dtype=F64)
    gain = tensor([[2.0, 0.1, 9, 1.0], [1.5, 1.0, 9, 9], [3.0, 0.1, 1.0, 9], [2.0, 9, 9, 9]]).log()
    inputs = AdvantageInputs(
        token_rewards=tensor([[0, 0, 0, 1], [0] * 4, [0, 0, 1, 0], [1, 0, 0, 0]]),
        response_mask=mask,
        group_ids=torch.tensor([0, 0, 1, 1]),
        logprobs=logprobs,
        hinted_logprobs=logprobs + gain,
    )
    options = {"difficulty": 0.4, "weight_clip": 1.8, "norm_adv_by_std_in_grpo": False}
    advantages, _ = compute_advantages("cpo", inputs, **options)
    first = [1.8, 1 / 1.8, 1.0]  # clipped above, below, and not at all
    w0, w1, w3 = (0.5 * 3 * w / sum(first) for w in first)
    expected = [[w0, w1, 0, w3], [-0.5 * 1.2, -0.5 * 0.8, 0, 0], [0] * 4, [0] * 4]
    torch.testing.assert_close(advantages, tensor(expected))
    assert advantages[0].sum() == pytest.approx(3 * 0.5)  # the mean weight is 1
    # group 0 (difficulty 0.5) is not hard any more
    easy, _ = compute_advantages("cpo", inputs, **(options | {"difficulty": 0.5}))
    plain, _ = compute_advantages("grpo", inputs, norm_adv_by_std_in_grpo=False)
    assert torch.equal(easy, plain)
    with pytest.raises(ValueError, match="weight_clip: got 0"):
        compute_advantages("cpo", inputs, weight_clip=0.5)


def test_group_difficulty():
    inputs = outcome([1.0, 0.0, 0.0, -1.0, 3.0, 0.3], [0, 0, 0, 1, 1, 2])
    expected = [2 / 3, 2 / 3, 2 / 3, 0.5, 0.5, 0.7]
    assert group_difficulty(inputs).tolist() == pytest.approx(expected)


def test_rloo_is_unbiased_and_grpo_shrinks_it():
    """Expectation over all pairs of actions of a softmax policy, against the exact gradient."""
    logits = tensor([0.3, -0.7, 1.1])
    rewards = tensor([1.0, 0.2, -2.0])
    probs = logits.softmax(0)
    exact = probs * (rewards - (probs * rewards).sum())  # d E[r] / d logits
    score = torch.eye(3, dtype=F64) - probs  # d log pi(a) / d logits
    estimates = {"rloo": torch.zeros(3, dtype=F64), "grpo": torch.zeros(3, dtype=F64)}
    for a, b in itertools.product(range(3), repeat=2):
        inputs = outcome([float(rewards[a]), float(rewards[b])], [0, 0])
        for name, options in (("rloo", {}), ("grpo", {"norm_adv_by_std_in_grpo": False})):
            advantage = per_row(name, inputs, **options)
            sample = (advantage[0] * score[a] + advantage[1] * score[b]) / 2
            estimates[name] += probs[a] * probs[b] * sample
    torch.testing.assert_close(estimates["rloo"], exact)
    torch.testing.assert_close(estimates["grpo"], exact / 2)  # (n - 1) / n


@pytest.fixture
def full_inputs(mask) -> AdvantageInputs:
    """Every field filled; groups of 1, 2 and 3; turn rewards on sampled tokens."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=F64)

    rows = mask.shape[0]
    return AdvantageInputs(
        token_rewards=normal(*mask.shape) * mask,
        response_mask=mask,
        group_ids=torch.tensor([5, 2, 5, 2, 9, 2]),
        values=normal(*mask.shape),
        greedy_rewards=normal(rows),
        reward_components={"a": normal(rows), "b": normal(rows)},
        logprob_stats=normal(*mask.shape).abs(),
        logprobs=normal(*mask.shape),
        hinted_logprobs=normal(*mask.shape),
    )


def changed(inputs: AdvantageInputs, change, rows=(0, 1, 2, 3, 4, 5)) -> AdvantageInputs:
    """`change` on every [B, T] tensor; the others with their rows in this order."""
    rows = list(rows)
    return replace(
        inputs,
        **{name: change(getattr(inputs, name)) for name in ARRAYS},
        group_ids=inputs.group_ids[rows],
        greedy_rewards=inputs.greedy_rewards[rows],
        reward_components={key: x[rows] for key, x in inputs.reward_components.items()},
    )


every_estimator = pytest.mark.parametrize("name", list(ADV_ESTIMATORS))


@every_estimator
def test_masked_positions_get_nothing_and_change_nothing(name, full_inputs):
    masked = full_inputs.response_mask == 0
    clean = compute_advantages(name, full_inputs)
    inputs = {name: getattr(full_inputs, name) for name in ARRAYS[2:]}
    nans = {name: x.masked_fill(masked, torch.nan) for name, x in inputs.items()}
    dirty = replace(full_inputs, **nans)
    for before, after in zip(clean, compute_advantages(name, dirty), strict=True):
        assert (before[masked] == 0).all() and before.isfinite().all() and before.abs().max() > 0
        assert torch.equal(before, after)


@every_estimator
def test_a_failed_trajectory_is_in_no_baseline(name, full_inputs):
    """Row 4 has no sampled token: whatever group and reward it has, the others do not see it."""
    joined = changed(full_inputs, lambda x: x.clone())
    joined.group_ids[4] = 5
    joined.token_rewards[4] = 100.0
    for before, after in zip(
        compute_advantages(name, full_inputs), compute_advantages(name, joined), strict=True
    ):
        torch.testing.assert_close(after, before)


@every_estimator
def test_padding_is_irrelevant(name, full_inputs):
    padded = changed(full_inputs, lambda x: torch.nn.functional.pad(x, (0, 3)))
    for before, after in zip(
        compute_advantages(name, full_inputs), compute_advantages(name, padded), strict=True
    ):
        torch.testing.assert_close(after, torch.nn.functional.pad(before, (0, 3)))


@every_estimator
def test_row_order_and_group_names_are_irrelevant(name, full_inputs):
    rows = [4, 2, 0, 5, 3, 1]
    moved = changed(full_inputs, lambda x: x[rows], rows)
    moved.group_ids.mul_(-10)
    for before, after in zip(
        compute_advantages(name, full_inputs), compute_advantages(name, moved), strict=True
    ):
        torch.testing.assert_close(after, before[rows])


@pytest.mark.parametrize("name", sorted(set(ADV_ESTIMATORS) - {"optimal_token_baseline"}))
def test_length_of_observations_is_irrelevant(name, full_inputs):
    """A masked column more before every token: what the sampled tokens get stays the same."""

    def widened(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros_like(x), x], dim=2).flatten(1)

    wide = changed(full_inputs, widened)
    for before, after in zip(
        compute_advantages(name, full_inputs), compute_advantages(name, wide), strict=True
    ):
        torch.testing.assert_close(after, widened(before))


GROUP_RELATIVE = [
    n for n in ADV_ESTIMATORS if requirements(ADV_ESTIMATORS.find(n)).min_group_size > 1
]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_of_one_has_no_baseline(name, full_inputs):
    alone = changed(full_inputs, lambda x: x)
    alone.group_ids.copy_(torch.arange(6))
    advantages, _ = compute_advantages(name, alone)
    assert (advantages == 0).all()


@pytest.mark.parametrize("name", sorted(set(GROUP_RELATIVE) - {"gdpo"}))
def test_equal_rewards_carry_no_signal(name, full_inputs):
    """Exactly 0, although the mean of three float32 0.9 is not 0.9."""
    last = full_inputs.response_mask.cumsum(1).argmax(1, keepdim=True)
    rewards = torch.zeros(6, 7).scatter(1, last, 0.9)
    inputs = AdvantageInputs(
        token_rewards=rewards,
        response_mask=torch.ones(6, 7),
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        logprob_stats=torch.ones(6, 7),
        logprobs=torch.zeros(6, 7),
        hinted_logprobs=torch.rand(6, 7),
    )
    if "optimal_token_baseline" in name:  # a token's reward-to-go is its own: compare one column
        inputs.token_rewards[:] = torch.tensor([0.0] * 6 + [0.1])
        torch.testing.assert_close(compute_advantages(name, inputs)[0], torch.zeros(6, 7))
        return
    assert (compute_advantages(name, inputs)[0] == 0).all()


def test_rewards_are_equal_whatever_turns_earned_them():
    """1 and twice 0.2, whose sum in float32 depends on where they stand."""
    draw = torch.Generator().manual_seed(0)
    rewards = torch.zeros(64, 200)
    rewards.scatter_(1, torch.rand(64, 199, generator=draw).topk(2).indices, 0.2)[:, -1] = 1.0
    assert len(rewards.sum(1).unique()) > 1
    inputs = AdvantageInputs(
        token_rewards=rewards,
        response_mask=torch.ones(64, 200),
        group_ids=torch.zeros(64, dtype=torch.int64),
    )
    assert (compute_advantages("grpo", inputs)[0] == 0).all()


def test_whiten_with_nothing_to_whiten():
    x = tensor([[3.0, 4.0]])
    assert whiten(x, tensor([[1.0, 0.0]])).tolist() == [[0, 0]]
    assert whiten(x, tensor([[0.0, 0.0]])).tolist() == [[0, 0]]


def test_errors(full_inputs):
    plain = outcome(REWARDS, GROUPS)
    with pytest.raises(ValueError, match="'gae' needs 'values', but AdvantageInputs has none"):
        compute_advantages("gae", plain)
    with pytest.raises(ValueError, match="'cpo' needs 'logprobs'"):
        compute_advantages("cpo", plain)
    with pytest.raises(ValueError, match="unknown advantage estimator 'gpro'; did you mean 'grpo'"):
        compute_advantages("gpro", plain)
    with pytest.raises(ValueError, match="no option 'lamda'; did you mean 'lam'"):
        compute_advantages("gae", full_inputs, lamda=0.9)


def leave_alone(inputs: AdvantageInputs, *, scale: float = 1.0):
    return inputs.token_rewards * scale, inputs.token_rewards


def test_an_estimator_of_ones_own():
    inputs = outcome([1.0, 2.0], [0, 0])
    advantages, _ = compute_advantages(f"{__name__}:leave_alone", inputs, scale=3.0)
    assert advantages.tolist() == [[3.0], [6.0]]


def in_double(inputs: AdvantageInputs):
    return inputs.token_rewards.double(), inputs.token_rewards.double()


def test_what_an_estimator_of_ones_own_computes_in_is_not_what_ranks_exchange():
    inputs = replace(outcome([1.0, 2.0], [0, 0]), token_rewards=torch.tensor([[1.0], [2.0]]))
    both = compute_advantages(f"{__name__}:in_double", inputs)
    assert [x.dtype for x in both] == [torch.float32] * 2
