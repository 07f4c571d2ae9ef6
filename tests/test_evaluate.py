import json
from pathlib import Path

import pytest
from scripted_run import SeededEngine, make_config, make_project, scripted_run

from minirl.evaluate import evaluate, validate
from minirl.launch import SOCKETS
from minirl.train import train


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


async def test_the_start_policy_then_the_latest_checkpoint(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        project, "run[a]", f"data.val_files=[{project}/rows.jsonl]", "trainer.save_freq=2",
        "trainer.total_training_steps=2", "trainer.val_before_train=false",
    )  # fmt: skip
    report = config.trainer.run_dir / "evaluation.json"

    async def score() -> dict[str, float]:
        async with scripted_run(config, training=False) as run:
            await evaluate(run)
        return json.loads(report.read_text())

    before = await score()
    assert before["step"] == 0 and SeededEngine.last.versions == [0]
    assert before["val-core/calculator/acc/mean@1"] == 0.5
    assert "run[a]: start policy" in capsys.readouterr().out
    async with scripted_run(config) as run:
        await train(run)
    after = await score()
    assert after["step"] == 2 and SeededEngine.last.versions == [2]
    assert "checkpoint of step 2" in capsys.readouterr().out
    lines = (config.trainer.run_dir / "trajectories" / "step_000002.jsonl").read_text().splitlines()
    assert [json.loads(line)["split"] for line in lines].count("evaluate") == 12


async def test_a_failed_answer_counts_as_wrong(project: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert int(ground_truth) >= 3, 'planted'\n"
        "    return {'score': 1.0, 'pred': solution_str[5:]}\n"
    )
    config = make_config(
        project, "failing", f"data.val_files=[{project}/rows.jsonl]",
        f"reward.custom_reward_function.path={reward}",
        "rollout.val_kwargs={n: 4, temperature: 1.0}",
    )  # fmt: skip
    async with scripted_run(config, training=False) as run:
        metrics, trajectories = await validate(run, step=0)
        again, _ = await validate(run, step=7)
    assert len(trajectories) == 48
    assert sum(t.error is not None for t in trajectories) == 12
    assert metrics["val-core/calculator/acc/mean@4"] == 0.75
    assert metrics["val-core/calculator/acc/pass@4"] == 0.75
    assert again == metrics  # the same seeds at every step
    assert SOCKETS.path is not None and not SOCKETS.path.exists()


async def test_a_right_answer_that_is_punished_for_its_length_is_right(project: Path) -> None:
    config = make_config(
        project, "long", f"data.val_files=[{project}/rows.jsonl]",
        "reward.reward_manager=dapo", "reward.overlong_buffer={len: 64}",
    )  # fmt: skip
    async with scripted_run(config, training=False) as run:
        metrics, trajectories = await validate(run, step=0)
    assert max(t.reward or 0.0 for t in trajectories) < 1
    assert metrics["val-core/calculator/acc/mean@1"] == 0.5
