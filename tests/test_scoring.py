"""Runs with a reward model: its scores are in every place where rewards are read."""

import asyncio
import json
import os
import re
import socket
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from scripted_run import SeededEngine, first_step, make_config, make_project, scripted_run
from transformers import AutoModelForSequenceClassification

from minirl.check_logprobs import check_logprobs
from minirl.config import Config, ConfigError, load_config
from minirl.evaluate import evaluate
from minirl.inputs import read_inputs
from minirl.testing import tiny_model
from minirl.tracking import read_metrics
from minirl.train import train

RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float("-1" not in solution_str)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    tiny_model(folder / "rm", reward_model="sequence", seed=5)
    (folder / "rule.py").write_text(RULE)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["data_source"] = "nobody knows"
    (folder / "unknown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def with_model(project: Path, name: str, *overrides: str) -> Config:
    return make_config(project, name, f"reward.reward_model.path={project}/rm", *overrides)


def scores_of(project: Path, trajectories: list[dict[str, Any]]) -> list[float]:
    """By transformers' own forward pass over prompt and response."""
    model = AutoModelForSequenceClassification.from_pretrained(project / "rm")
    tokens = [torch.tensor([t["prompt_ids"] + t["response_ids"]]) for t in trajectories]
    with torch.no_grad():
        return [float(model(ids).logits) for ids in tokens]


def written(config: Config, step: int, split: str) -> list[dict[str, Any]]:
    file = config.trainer.run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


async def run_training(config: Config) -> list[dict[str, Any]]:
    async with scripted_run(config) as run:
        await train(run)
    return read_metrics(config.trainer.run_dir)


async def test_the_model_is_the_only_reward(project: Path) -> None:
    """With the policy itself as the engine, and rows for which there is no reward function."""
    config = with_model(
        project, "only", "reward.reward_model.combine=only", "reward.reward_model.weight=3",
        f"data.train_files=[{project}/unknown.jsonl]", "rollout.name=transformers",
        "rollout.response_length=12", "trainer.total_training_steps=2",
        "rollout.sync_check={max_logprob_diff: 1e-4, probe_length: 4}",
        f"data.val_files=[{project}/unknown.jsonl]",
    )  # fmt: skip
    rows = await run_training(config)
    for row in rows[1:]:
        trajectories = written(config, row["step"], "train")
        scores = scores_of(project, trajectories)
        assert len(set(scores)) == 12
        rewards = [t["reward"] for t in trajectories]
        assert rewards == pytest.approx([3 * score for score in scores], abs=1e-4)
        assert row["critic/score/mean"] == pytest.approx(fmean(rewards), abs=1e-5)
        for name, value in (
            ("mean", fmean(scores)), ("std", pstdev(scores)), ("min", min(scores)),
            ("max", max(scores)), ("truncated", 0),
        ):  # fmt: skip
            assert row[f"reward_model/{name}"] == pytest.approx(value, abs=1e-5)
        assert row["timing_s/reward_model"] > 0 and row["actor/grad_norm"] > 0
    answers = written(config, 0, "val")
    mean = fmean(scores_of(project, answers)) * 3
    assert rows[0]["val-core/nobody knows/reward/mean@1"] == pytest.approx(mean, abs=1e-4)


async def test_beside_a_rule_and_under_every_reader(project: Path) -> None:
    """Rule + score is what the batch, the greedy baseline, evaluation and the filter see."""
    config = with_model(
        project, "add", "algorithm.adv_estimator=remax", "reward.reward_model.weight=0.5",
        f"data.val_files=[{project}/rows.jsonl]", "algorithm.filter_groups.metric=rm_score",
        "rollout.n=4",
    )  # fmt: skip
    async with first_step(config) as steps:
        SeededEngine.last.calls.clear()
        groups = await steps.generate()
        batch = await steps.assemble(groups)
    assert SeededEngine.last.calls[:3] == [("sleep", 1), ("wake_up", None), ("sleep", 2)]
    assert len(groups) == 4
    for t in steps.trajectories:
        rule, score = t.reward_breakdown["rule_score"], t.reward_breakdown["rm_score"]
        [expected] = scores_of(
            project, [{"prompt_ids": t.prompt_ids, "response_ids": t.response_ids}]
        )
        assert score == pytest.approx(expected, abs=1e-5)
        assert t.reward == pytest.approx(rule + 0.5 * score) and rule in (0, 1)
    greedy = [t.reward for t in steps.trajectories if t.sample_index == -1]
    assert [group.greedy_reward for group in groups] == greedy
    rewards = [t.reward or 0.0 for group in groups for t in group.trajectories]
    assert float(batch.token_rewards.sum()) == pytest.approx(sum(rewards), abs=1e-4)
    async with scripted_run(config, training=False) as run:
        await evaluate(run)
    report = json.loads((config.trainer.run_dir / "evaluation.json").read_text())
    answers = written(config, 0, "evaluate")
    rules = [t["reward_breakdown"]["rule_score"] for t in answers]
    assert report["val-core/calculator/acc/mean@1"] == fmean(rules) == 0.5
    assert report["val-core/calculator/reward/mean@1"] == pytest.approx(
        fmean(rules) + 0.5 * fmean(scores_of(project, answers)), abs=1e-5
    )


async def test_engine_and_trainer_can_be_compared_without_a_rule(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_model(
        project, "compared", "reward.reward_model.combine=only", "rollout.name=transformers",
        f"data.val_files=[{project}/unknown.jsonl]", "rollout.response_length=6",
        "rollout.sync_check={max_logprob_diff: 1e-4, probe_length: 4}",
    )  # fmt: skip
    async with scripted_run(config, training=False) as run:
        await check_logprobs(run)
    assert re.search(r"all +│ \d\d+ +│ \d\.\d+e-0[6-9]", capsys.readouterr().out)


async def test_the_filter_compares_what_the_model_says(project: Path) -> None:
    """A rule alone would leave the groups of two answers; equal answers have equal scores."""
    config = with_model(
        project, "filtered", "algorithm.filter_groups.max_num_gen_batches=2",
        "reward.reward_model.combine=only", f"reward.custom_reward_function.path={project}/rule.py",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    async with first_step(config) as steps:
        groups = await steps.generate()
    assert groups
    for group in groups:
        assert len({t.reward_breakdown["rule_score"] for t in group.trajectories}) == 2
        assert len({t.reward for t in group.trajectories}) == 2
        assert all(t.reward == t.reward_breakdown["rm_score"] for t in group.trajectories)


def train_as(rank: int, port: int, config: Config) -> None:
    """A rank of two, in a process of its own; as torchrun starts it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip

    async def main() -> None:
        async with scripted_run(config) as run:
            await train(run)

    asyncio.run(main())


def test_two_ranks_score_together_to_the_end(project: Path, forkserver: ForkServerContext) -> None:
    """Rank 0 alone knows how often it samples; the other scores as often, and keeps its engine up
    until the last answer of the validation is there."""
    config = with_model(
        project, "two", "rollout.name=transformers", "rollout.response_length=6",
        f"data.train_files=[{project}/unknown.jsonl]", f"data.val_files=[{project}/unknown.jsonl]",
        "reward.reward_model={combine: only, max_length: 20}", "trainer.test_freq=1",
        "trainer.total_training_steps=1", "algorithm.filter_groups.max_num_gen_batches=3",
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        forkserver.Process(target=train_as, args=(rank, port, config), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(900)
    assert [process.exitcode for process in ranks] == [0, 0]
    before, after = read_metrics(config.trainer.run_dir)
    assert {"val-core/nobody knows/reward/mean@1"} <= before.keys() & after.keys()
    assert after["reward_model/truncated"] == 1 and after["actor/grad_norm"] > 0


def problem(project: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_inputs(with_model(project, "refused", *overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_refused_at_the_start(project: Path) -> None:
    folder = problem(project, f"reward.reward_model.path={project}/model")
    assert folder.startswith("reward.reward_model.path: ") and "with num_labels=2" in folder
    cpo = problem(project, "algorithm.adv_estimator=cpo", "algorithm.cpo={}")
    assert cpo.startswith("reward.reward_model: ") and "no success" in cpo
    unknown = f"data.train_files=[{project}/unknown.jsonl]"
    assert "data_source: " in problem(project, unknown)
    manager = ["reward.reward_model={path: m, combine: only}", "reward.reward_manager=dapo"]
    with pytest.raises(ConfigError, match=r"reward\.reward_manager: got 'dapo'; with reward"):
        load_config(["model.path=m", *manager])
    with pytest.raises(ConfigError, match=r"reward_model\.path: got ''; name a model folder"):
        load_config(["model.path=m", "reward.reward_model={}"])
