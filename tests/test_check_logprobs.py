from dataclasses import replace

import pytest
import torch

from minirl.agreement import agreement, agreement_metrics, turns_of
from minirl.trainer import packing
from minirl.types import MicroBatch, TokenOutput, Trajectory


def conversation(prompt: int, *turns: int) -> Trajectory:
    """Turns of so many sampled tokens, three tokens of observation between them."""
    trajectory = Trajectory(prompt_ids=[0] * prompt)
    for number, n in enumerate(turns):
        if number:
            trajectory.append_observation([0] * 3)
        trajectory.append_sampled(
            TokenOutput(token_ids=[1] * n, logprobs=[-1.0] * n, finish_reason="stop")
        )
    return trajectory


@pytest.fixture
def batch() -> MicroBatch:
    trajectories = [conversation(2, 3, 1), conversation(1, 2), conversation(1, 1, 1, 1, 2, 20)]
    rewards = [[0.0] * len(t.response_ids) for t in trajectories]
    return packing.pack(trajectories, rewards, [0, 0, 1])


def test_turns_and_places(batch: MicroBatch) -> None:
    turn, place = turns_of(batch)
    first = [0, 0, 1, 1, 1, 0, 0, 0, 2]
    second = [0, 1, 1]
    third = [0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 4, 0, 0, 0, *[5] * 20]
    assert turn.tolist() == first + second + third
    assert place.tolist()[: len(first + second)] == [0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1]
    assert place.tolist()[-20:] == list(range(20))


def test_a_trajectory_that_ends_another_turn_begins_anew(batch: MicroBatch) -> None:
    """A sampled token first in its sequence is no continuation of the one before."""
    two = packing.pack([conversation(0, 2), conversation(0, 2)], [[0.0] * 2] * 2, [0, 1])
    assert turns_of(two)[0].tolist() == [1] * 4 and turns_of(two)[1].tolist() == [0, 1, 0, 1]


def test_differences_by_bucket(batch: MicroBatch) -> None:
    turn, place = turns_of(batch)
    old = batch.rollout_logprobs + 0.5 * ((turn == 2) & (place == 0))  # after an observation
    found = agreement(replace(batch, old_logprobs=old))
    sizes = {name: len(values) for name, values in found.items()}
    assert sizes == {
        "turn_1": 6, "turn_2": 2, "turn_3": 1, "turn_4_on": 22, "first_token": 8,
        "after_observation": 5, "token_2_to_16": 19, "token_17_on": 4,
    }  # fmt: skip
    assert sum(n for name, n in sizes.items() if name.startswith("turn")) == int((turn > 0).sum())
    off = {name for name, values in found.items() if values.max() > 0}
    assert off == {"turn_2", "first_token", "after_observation"}
    metrics = agreement_metrics(replace(batch, old_logprobs=old))
    assert metrics["training/logprob_diff_mean/after_observation"] == pytest.approx(0.2)
    assert metrics["training/logprob_diff_max/turn_2"] == 0.5


def test_nothing_sampled_is_no_bucket(batch: MicroBatch) -> None:
    batch.response_mask = torch.zeros_like(batch.response_mask)
    assert agreement(replace(batch, old_logprobs=batch.rollout_logprobs)) == {}
