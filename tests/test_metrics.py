import math
from itertools import count

import pytest

from minirl.metrics import Metrics, slowest_metrics, timer, trajectory_metrics
from minirl.types import TokenOutput, ToolCallRecord, Trajectory


def test_each_reduction() -> None:
    metrics = Metrics()
    for value in (1.0, 5.0):
        metrics.add("mean", value, reduce="mean")
        metrics.add("sum", value, reduce="sum")
        metrics.add("min", value, reduce="min")
        metrics.add("max", value, reduce="max")
        metrics.add("last", value, reduce="last")
    assert metrics.result() == {"mean": 3.0, "sum": 6.0, "min": 1.0, "max": 5.0, "last": 5.0}


def test_merge_takes_the_other_for_the_later() -> None:
    left, right = Metrics(), Metrics()
    left.add("a", 1, reduce="last")
    right.update({"a": 2, "b": 3}, reduce="last")
    left.merge(right)
    assert left.result() == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
def test_nan_is_never_swallowed(reduce, values) -> None:
    metrics = Metrics()
    for value in values:
        metrics.add("x", value, reduce=reduce)
    assert math.isnan(metrics.result()["x"])


def test_conflicting_reductions_are_refused() -> None:
    left, right = Metrics(), Metrics()
    left.add("actor/loss", 1, reduce="mean")
    right.add("actor/loss", 1, reduce="sum")
    with pytest.raises(ValueError, match=r"'actor/loss' is reduced by 'mean' and now by 'sum'"):
        left.merge(right)
    with pytest.raises(ValueError, match="by 'mean' and now by 'max'"):
        left.add("actor/loss", 1, reduce="max")
    assert left.result() == {"actor/loss": 1.0}


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of mean"):
        Metrics().add("x", 1.0, reduce="median")


def test_the_seconds_of_a_timer_add_up(monkeypatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("minirl.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    for _ in range(2):
        with timer(metrics, "gen"):
            pass
    assert metrics.result() == {"timing_s/gen": 5.0}


SAMPLE = count()


def make_trajectory(uid: str, reward: float | None, lengths: list[int], **fields) -> Trajectory:
    fields = {"sample_index": next(SAMPLE), **fields}
    trajectory = Trajectory(prompt_ids=[1, 2, 3], uid=uid, reward=reward, **fields)
    for n in lengths:
        trajectory.append_sampled(
            TokenOutput(token_ids=[7] * n, logprobs=[-0.5] * n, finish_reason="stop")
        )
    return trajectory


def tool_call(status) -> ToolCallRecord:
    return ToolCallRecord(turn=0, name="python", arguments="{}", result="", status=status)


@pytest.fixture
def trajectories() -> list[Trajectory]:
    return [
        make_trajectory(
            "a",
            1.0,
            [2, 2],
            termination="stop",
            tool_calls=[tool_call("ok"), tool_call("timeout")],
            reward_breakdown={"format": 1.0},
            metrics={"generate_s": 1.5},
        ),
        make_trajectory("a", 0.0, [10], termination="response_length", metrics={"generate_s": 0.5}),
        make_trajectory("b", 0.0, [1], termination="stop", tool_calls=[tool_call("ok")]),
        make_trajectory("b", 0.0, [1], termination="stop", reward_breakdown={"format": 0.0}),
        make_trajectory("c", None, [], termination="error", error="Traceback ..."),
    ]


def test_trajectory_metrics(trajectories) -> None:
    got = trajectory_metrics(trajectories, response_length=10, max_prompt_length=4).result()
    expected = {
        "critic/score/mean": 0.25,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.25,
        "critic/groups/no_signal": 0.5,
        "response_length/mean": 16 / 5,
        "response_length/max": 10,
        "response_length/min": 0,
        "response_length/clip_ratio": 1 / 5,
        "prompt_length/mean": 3,
        "prompt_length/clip_ratio": 0,
        "num_turns/mean": 1,
        "num_turns/max": 2,
        "num_turns/min": 0,
        "agent_loop/tool_calls/mean": 3 / 5,
        "agent_loop/tool_calls/ok": 2 / 3,
        "agent_loop/tool_calls/timeout": 1 / 3,
        "agent_loop/tool_calls/malformed": 0,
        "agent_loop/failures": 1,
        "agent_loop/termination/stop": 3 / 5,
        "reward/format/mean": 0.5,
        "trajectory/generate_s/mean": 1.0,
        "trajectory/generate_s/max": 1.5,
        "perf/total_num_tokens": 31,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    shares = [v for name, v in got.items() if name.startswith("agent_loop/termination/")]
    assert len(shares) == 11 and sum(shares) == pytest.approx(1)


def test_trajectory_metrics_of_parts_merge_to_those_of_the_whole(trajectories) -> None:
    limits = {"response_length": 10, "max_prompt_length": 4}
    parts = [trajectory_metrics(part, **limits) for part in (trajectories[:2], trajectories[2:])]
    whole = trajectory_metrics(trajectories, **limits).result()
    parts[0].merge(parts[1])
    assert parts[0].result() == pytest.approx(whole)


def test_rewards_that_the_estimator_saw_are_kept_apart_from_scores(trajectories) -> None:
    got = trajectory_metrics(
        trajectories[:2], response_length=10, max_prompt_length=4, rewards=[0.9, -0.1]
    ).result()
    assert got["critic/score/mean"] == 0.5
    assert got["critic/rewards/mean"] == pytest.approx(0.4)
    assert got["critic/rewards/min"] == -0.1


def test_the_figures_of_the_slowest(trajectories) -> None:
    trajectories[0].metrics["seconds"], trajectories[1].metrics["seconds"] = 2.0, 3.0
    assert slowest_metrics(trajectories) == {
        "agent_loop/slowest/seconds": 3.0,
        "agent_loop/slowest/generate_s": 0.5,
        "agent_loop/slowest/num_turns": 1,
        "agent_loop/slowest/prompt_length": 3,
        "agent_loop/slowest/response_length": 10,
    }
    assert slowest_metrics([]) == {}


def test_a_group_of_one_is_no_group() -> None:
    single = [make_trajectory("a", 1.0, [1], termination="stop")]
    got = trajectory_metrics(single, response_length=10, max_prompt_length=4).result()
    assert "critic/groups/no_signal" not in got
