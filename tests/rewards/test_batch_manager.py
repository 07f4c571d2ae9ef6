import asyncio
import threading

import numpy as np
import pytest

from minirl.config import BatchRewardConfig, ConfigError, CustomRewardConfig, RewardConfig
from minirl.rewards import BatchRewardManager, load_reward_manager
from minirl.types import Trajectory
from minirl.waits import WAITS

CUSTOM = CustomRewardConfig(path="test_batch_manager", name="compute_score")


def compute_score(data_sources, solution_strs, ground_truths, extra_infos, *, bonus=0.0):
    assert threading.current_thread() is not threading.main_thread()
    columns = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [
        {"score": (solution == truth) + bonus, "size": len(solution_strs), "index": info["index"]}
        for _, solution, truth, info in columns
    ]


class Gate:
    """A reward function that waits to be let through; keeps what it was called with."""

    def __init__(self):
        self.calls = []
        self.called = asyncio.Semaphore(0)
        self.open = asyncio.Event()

    async def __call__(self, data_sources, solution_strs, ground_truths, extra_infos):
        self.calls.append(solution_strs)
        self.called.release()
        await self.open.wait()
        return np.array([float(solution) for solution in solution_strs])


def make(function, **batch):
    batch = BatchRewardConfig(**{"max_delay_s": 0.0, **batch})
    return BatchRewardManager(function, custom_reward_function=CUSTOM, batch=batch)


async def score(manager, solution):
    trajectory = Trajectory(prompt_ids=[0])
    row = {"reward_model": {"ground_truth": "4"}, "extra_info": {"index": 7}}
    await manager(trajectory, row, str(solution))
    return trajectory


async def test_by_config_each_gets_its_own_result():
    config = RewardConfig(
        reward_manager="batch", custom_reward_function=CUSTOM, reward_kwargs={"bonus": 2.0}
    )
    manager = load_reward_manager(config, response_length=9)
    results = await asyncio.gather(*(score(manager, n) for n in range(6)))
    assert [t.reward for t in results] == [2, 2, 2, 2, 3, 2]
    assert results[0].reward_breakdown == {"size": 6, "index": 7}


async def test_what_comes_in_during_a_call_goes_into_the_next_up_to_its_size():
    gate = Gate()
    manager = make(gate, max_size=3)
    tasks = [asyncio.create_task(score(manager, 0))]
    await gate.called.acquire()
    tasks += [asyncio.create_task(score(manager, n)) for n in range(1, 6)]
    await asyncio.sleep(0)
    assert [line.rpartition(": ")[0] for line in WAITS.report(0).split("\n  ")] == [
        "1 for reward: the function, on a batch of 1",
        "5 for reward: the batch before its own",
    ]
    gate.open.set()
    results = await asyncio.gather(*tasks)
    assert gate.calls == [["0"], ["1", "2", "3"], ["4", "5"]]
    assert [t.reward for t in results] == [0, 1, 2, 3, 4, 5]


async def test_a_call_waits_for_others():
    gate = Gate()
    gate.open.set()
    manager = make(gate, max_delay_s=0.2)
    first = asyncio.create_task(score(manager, 0))
    await asyncio.sleep(0.02)
    await asyncio.gather(first, score(manager, 1))
    assert gate.calls == [["0", "1"]]


async def test_a_cancelled_caller_leaves_the_others_to_the_next_call():
    gate = Gate()
    manager = make(gate)
    tasks = [asyncio.create_task(score(manager, n)) for n in range(4)]
    await gate.called.acquire()
    tasks[0].cancel()  # it makes the call
    tasks[2].cancel()  # it waits
    await gate.called.acquire()
    gate.open.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.calls == [["0", "1", "2", "3"], ["1", "3"]]
    assert [getattr(t, "reward", None) for t in results] == [None, 1, None, 3]


async def test_a_score_that_is_none_fails_its_trajectory_only():
    gate = Gate()
    gate.open.set()
    manager = make(gate)
    good, bad = await asyncio.gather(
        score(manager, 1), score(manager, "nan"), return_exceptions=True
    )
    assert good.reward == 1 and isinstance(bad, ValueError)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "it returned 1 results for 2 trajectories"),
        ({"score": 1}, "expected a list of 2 results"),
        (0.5, "it returned 0.5; expected a list"),
        (KeyError("x"), "failed on a batch: 'x'"),
    ],
)
async def test_a_failed_call_fails_all_and_the_next_works(result, message):
    answers = [result, [3.0]]

    async def function(*columns):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    manager = make(function)
    failures = await asyncio.gather(score(manager, 1), score(manager, 2), return_exceptions=True)
    for failure in failures:
        assert isinstance(failure, RuntimeError) and message in str(failure)
    assert (await score(manager, 3)).reward == 3


@pytest.mark.parametrize("section", ["batch", "pool", "overlong_buffer"])
def test_a_section_that_the_manager_does_not_read_is_refused(section):
    from minirl.config import load_config

    config = load_config(["model.path=m", f"reward.{section}={{}}"])
    with pytest.raises(ConfigError, match=rf"reward\.{section}: reward_manager=naive has no such"):
        load_reward_manager(config.reward, response_length=999)
