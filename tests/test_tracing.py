import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_run import make_config, make_project, scripted_run

from minirl.tracing import TrajectoryWriter, choose_groups
from minirl.train import train
from minirl.types import RewardRecord, TokenOutput, ToolCallRecord, Trajectory


def strict_loads(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read(path: Path) -> list[dict[str, Any]]:
    return [strict_loads(line) for line in path.read_text().splitlines()]


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def make_trajectory(reward: float) -> Trajectory:
    """`hi` -> `AB`, a tool says `C`, -> `D`; times count from 1000."""
    call = ToolCallRecord(
        turn=0, name="add", arguments='{"a": 1}', result="3", status="ok", start=1003.0, seconds=2.0
    )
    trajectory = Trajectory(
        prompt_ids=[104, 105], uid="p0", reward=reward, termination="stop", tool_calls=[call],
        start=1000.5, end=1009.0, ground_truth=np.array([72]),
    )  # fmt: skip
    trajectory.append_sampled(
        TokenOutput(
            token_ids=[65, 66], logprobs=[-0.5, -math.inf], finish_reason="stop", server=1,
            start=1001.0, end=1002.5, num_cached_tokens=4,
        )
    )  # fmt: skip
    trajectory.append_observation([67])
    trajectory.append_sampled(TokenOutput(token_ids=[68], logprobs=[-1.0], finish_reason="length"))
    record = RewardRecord(name="outcome", value=reward, start=1007.0, end=1008.0)
    trajectory.rewards.append(record)
    return trajectory


def test_a_row_has_tokens_texts_and_times_since_the_step_began(tmp_path: Path) -> None:
    values = {"advantages": [0.5, 0.5, 0.0, math.nan]}
    path = TrajectoryWriter(tmp_path, decode).write(
        12, "train", [make_trajectory(1.0)], 1000.0, lambda trajectory: values
    )
    assert path == tmp_path / "trajectories/step_000012.jsonl"
    [row] = read(path)
    assert (row["step"], row["split"], row["uid"], row["reward"]) == (12, "train", "p0", 1.0)
    assert (row["prompt"], row["response"], row["termination"]) == ("hi", "ABCD", "stop")
    assert (row["response_ids"], row["response_mask"]) == ([65, 66, 67, 68], [1, 1, 0, 1])
    assert row["response_logprobs"] == [-0.5, "-Infinity", 0.0, -1.0]
    assert row["advantages"] == [0.5, 0.5, 0.0, "NaN"]
    assert row["ground_truth"] == [72]
    first, second = row["turns"]
    assert (first["text"], first["observation"], first["server"]) == ("AB", "C", 1)
    assert (second["text"], second["observation"], second["start_s"]) == ("D", "", None)
    assert (first["num_cached_tokens"], second["finish_reason"]) == (4, "length")
    [call], [reward] = row["tool_calls"], row["rewards"]
    assert (call["arguments"], call["status"]) == ('{"a": 1}', "ok")
    assert (reward["name"], reward["value"]) == ("outcome", 1.0)
    times = [(part["start_s"], part["end_s"]) for part in (row, first, call, reward)]
    assert times == [(0.5, 9.0), (1.0, 2.5), (3.0, 5.0), (7.0, 8.0)]


def test_splits_share_a_file_and_a_step_run_again_replaces_its_own(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, decode)
    writer.write(1, "train", [make_trajectory(0.0), make_trajectory(0.1)], 0.0)
    writer.write(1, "val", [make_trajectory(0.2)], 0.0)
    path = writer.write(1, "train", [make_trajectory(0.3)], 0.0)
    assert [(row["split"], row["reward"]) for row in read(path)] == [("val", 0.2), ("train", 0.3)]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, decode)
    path = writer.write(1, "val", [make_trajectory(0.2)], 0.0)
    before = path.read_text()
    with pytest.raises(UnicodeDecodeError):
        writer.write(1, "train", [Trajectory(prompt_ids=[255])], 0.0)
    assert path.read_text() == before


def test_whole_groups_are_drawn_by_the_seed() -> None:
    group_of_20 = [Trajectory(prompt_ids=[], uid=f"p{i}") for i in range(20) for _ in range(3)]

    def chosen(limit: int, seed: str = "0-1") -> list[str]:
        return [t.uid for t in choose_groups(group_of_20, limit, seed)]

    assert chosen(-1) == chosen(60) == [t.uid for t in group_of_20]
    some = chosen(14)
    assert len(some) == 12 and len(set(some)) == 4
    assert some == sorted(some, key=lambda uid: int(uid[1:]))  # in their order
    assert chosen(14) == some and set(chosen(9)) < set(some)
    assert len({tuple(chosen(14, f"0-{step}")) for step in range(20)}) > 10
    assert len(chosen(2)) == 3  # a part of a group says little


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


async def traced(project: Path, name: str, *overrides: str) -> list[list[dict[str, Any]]]:
    """What a run of two steps that validates after both leaves, by step."""
    config = make_config(
        project, name, f"data.val_files=[{project}/rows.jsonl]", "trainer.test_freq=1",
        "trainer.total_training_steps=2", "ref={}", "actor.use_kl_loss=true", *overrides,
    )  # fmt: skip
    async with scripted_run(config) as run:
        await train(run)
    return [read(file) for file in sorted(config.trainer.run_dir.glob("trajectories/*"))]


async def test_a_run_keeps_groups_with_what_training_made_of_them(project: Path) -> None:
    steps = await traced(project, "traced", "rollout.trace.max_samples_per_step=7")
    uids = [
        [[r["uid"] for r in rows if r["split"] == s] for s in ("train", "val")] for rows in steps
    ]
    assert [[len(split) for split in step] for step in uids] == [[0, 7], [6, 7], [6, 7]]
    assert uids[0][1] == uids[1][1] == uids[2][1]  # the same questions, to follow them
    assert all(len(set(train)) == 2 for train, _ in uids[1:])  # of three samples each
    trained = [row for rows in steps for row in rows if row["split"] == "train"]
    for row in trained:
        length = len(row["response_ids"])
        for name in ("old_logprobs", "ref_logprobs", "advantages", "returns", "token_rewards"):
            assert len(row[name]) == length, name
        assert sum(row["token_rewards"]) == row["reward"]
        assert all(logprob < 0 for logprob in row["old_logprobs"])
        assert (row["advantages"][-1] > 0) == (row["reward"] > 0 and any(row["advantages"]))
        [turn], [reward] = row["turns"], row["rewards"]
        times = [0, row["start_s"], turn["start_s"], turn["end_s"], reward["start_s"], row["end_s"]]
        assert times == sorted(times) and turn["server"] == 0
    assert any(any(row["advantages"]) for row in trained)
    first = [row["old_logprobs"] for row in trained if row["step"] == 1]
    assert first == [row["ref_logprobs"] for row in trained if row["step"] == 1]


async def test_no_trace(project: Path) -> None:
    assert await traced(project, "untraced", "rollout.trace=null") == []
