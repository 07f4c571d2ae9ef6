import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest

from minirl.config import ConfigError, CustomRewardConfig, RewardConfig, RewardPoolConfig
from minirl.rewards import load_reward_manager
from minirl.rewards.prime import ScoringPool
from minirl.types import Trajectory
from minirl.waits import WAITS

SOURCE = """
import asyncio, os, re, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, *, factor=1):
    print("noise on", sys.stdin.read())
    if solution_str == "hang":
        re.match("(a|a)*b", "a" * 40)  # in C, and it holds the interpreter's lock
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "wait":
        while not os.path.exists(ground_truth): time.sleep(0.01)
    return {"score": factor * len(solution_str), "pid": os.getpid(), "pred": 4,
            "torch": "torch" in sys.modules, "main": "minirl_custom_main" in sys.modules,
            "turns": extra_info["num_turns"], "index": extra_info["index"]}

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return 0.25
"""


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(SOURCE)

    def make(name="compute_score", num_processes=2, timeout_s=60.0, **kwargs):
        config = RewardConfig(
            reward_manager="prime",
            custom_reward_function=CustomRewardConfig(path=str(path), name=name),
            reward_kwargs=kwargs,
            pool=RewardPoolConfig(num_processes=num_processes, timeout_s=timeout_s),
        )
        return load_reward_manager(config, response_length=100)

    return make


async def score(manager, solution, truth=None):
    trajectory = Trajectory(prompt_ids=[0])
    row = {"reward_model": {"ground_truth": truth}, "extra_info": {"index": 7}}
    await manager(trajectory, row, solution)
    return trajectory


async def test_scores_in_another_process_which_imports_only_what_the_function_does(make):
    manager = make(factor=3)
    first, second = await score(manager, "ab"), await score(manager, "abc")
    assert (first.reward, second.reward, first.answer) == (6.0, 9.0, "4")
    parts = first.reward_breakdown
    assert parts["pid"] not in (0, os.getpid()) and parts["pid"] == second.reward_breakdown["pid"]
    assert {**parts, "pid": 0} == {
        **{"pid": 0, "torch": 0, "main": 0, "turns": 0, "index": 7, "timeout": 0}
    }


async def test_items_run_at_once_up_to_the_number_of_processes(make, tmp_path):
    manager = make(num_processes=2)
    tasks = [asyncio.create_task(score(manager, "wait", str(tmp_path / n))) for n in "abc"]
    busy, waiting = "2 for reward: the function", "1 for reward: a free process"
    for _ in range(6000):
        if busy in (report := WAITS.report(0)) and waiting in report:
            break
        await asyncio.sleep(0.01)
    assert busy in report and waiting in report
    (tmp_path / "b").touch()  # the second ends while the first still runs
    await asyncio.wait_for(tasks[1], 60)
    assert not tasks[0].done()
    (tmp_path / "c").touch()
    await asyncio.wait_for(tasks[2], 60)
    (tmp_path / "a").touch()
    results = await asyncio.gather(*tasks)
    assert len({t.reward_breakdown["pid"] for t in results}) == 2


async def test_what_hangs_is_killed_and_scores_0_with_a_mark(make):
    manager = make(num_processes=1, timeout_s=2.0)
    pid = int((await score(manager, "a")).reward_breakdown["pid"])
    hung = await score(manager, "hang")
    assert (hung.reward, hung.reward_breakdown) == (0.0, {"timeout": 1.0})
    assert not psutil.pid_exists(pid)
    after = await score(manager, "a")
    assert after.reward == 1.0 and after.reward_breakdown["pid"] != pid


async def test_failures_are_told(make):
    manager = make(num_processes=1)
    with pytest.raises(
        RuntimeError, match=r"(?s)the reward function raised:.*in compute_score.*no"
    ):
        await score(manager, "raise")
    with pytest.raises(RuntimeError, match="ended, exit status 7"):
        await score(manager, "exit")
    assert (await score(manager, "a")).reward == 1.0


async def test_a_coroutine_function(make):
    assert (await score(make("later"), "a")).reward == 0.25


async def test_cancelling_kills_the_process(make, tmp_path):
    manager = make(num_processes=1)
    pid = int((await score(manager, "a")).reward_breakdown["pid"])
    task = asyncio.create_task(score(manager, "wait", str(tmp_path / "never")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid)


async def test_a_process_ends_with_its_manager(make):
    manager = make()
    pid = int((await score(manager, "a")).reward_breakdown["pid"])
    assert psutil.pid_exists(pid)
    del manager
    assert not psutil.pid_exists(pid)


def hang(path, sender):
    async def main():
        pool = ScoringPool(CustomRewardConfig(path=path), {}, RewardPoolConfig())
        first = await pool.score("", "a", None, {"num_turns": 0, "index": 0})
        sender.send(first["pid"])
        await pool.score("", "hang", None, {})

    asyncio.run(main())


def test_a_hanging_process_ends_with_a_parent_that_is_killed(make, tmp_path, forkserver):
    make()  # writes the file
    receiver, sender = forkserver.Pipe(duplex=False)
    parent = forkserver.Process(target=hang, args=(str(tmp_path / "my_reward.py"), sender))
    parent.start()
    child = psutil.Process(receiver.recv())
    before = child.cpu_times().user
    while child.cpu_times().user < before + 0.2:  # until it hangs, in C
        time.sleep(0.01)
    parent.kill()
    parent.join()
    child.wait(timeout=30)
    assert not child.is_running()


def test_the_scorer_of_gsm8k_comes_without_torch():
    program = "import minirl.rewards.gsm8k, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_it_needs_a_function_by_name():
    for manager in ("prime", "batch"):
        with pytest.raises(ConfigError, match=r"custom_reward_function: got null; .*name your own"):
            load_reward_manager(RewardConfig(reward_manager=manager), response_length=1)
