"""Every algorithm through `train`: the real path, with the policy itself as the engine."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from policy_engine import PolicyServer

from minirl.config import ConfigError, load_config
from minirl.launch import SOCKETS
from minirl.steps import BadStepsError
from minirl.testing import tiny_model
from minirl.tracking import read_metrics
from minirl.train import main

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    low = sum(ord(c) < 100 for c in solution_str) / 8
    return {"score": low, "vowels": solution_str.count("e") / 8, "length": len(solution_str) / 8}


def right_or_wrong(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 3 == 0)


def always_right(data_source, solution_str, ground_truth, extra_info):
    return 1.0


def number(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("e") / 8
"""
NUM_STEPS = 3


@pytest.fixture(scope="module")
def project(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("project")
    tiny_model(folder / "model", num_layers=1, hidden_size=32, head_dim=8)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(24):
            row = {
                "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
                "data_source": "letters",
                "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            }
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(f"""
model: {{path: {folder}/model, dtype: float32}}
data:
  train_files: [{folder}/rows.jsonl]
  train_batch_size: 2
  max_prompt_length: 64
actor: {{optim: {{lr: 0.001}}, max_tokens_per_micro_batch: 256}}
rollout:
  name: policy_engine:PolicyServer
  n: 3
  response_length: 8
  sync_check: {{max_logprob_diff: 1.0e-4, probe_length: 4}}
reward: {{custom_reward_function: {{path: {folder}/reward.py}}}}
trainer:
  default_local_dir: {folder}/runs
  device: cpu
  val_before_train: false
  total_training_steps: {NUM_STEPS}
  logger: [jsonl]
""")
    return folder


async def train(project: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run it; the metrics of its steps, from the first."""
    PolicyServer.requests.clear()
    arguments = [f"{project}/config.yaml", f"trainer.experiment_name={name}", *overrides]
    try:
        await main(load_config(arguments))
    finally:
        SOCKETS.remove()
    return read_metrics(project / "runs" / name)[1:]


def trajectories(project: Path, name: str, step: int, split: str = "train") -> list[dict[str, Any]]:
    path = project / "runs" / name / "trajectories" / f"step_{step:06d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


GAE = ("algorithm.adv_estimator=gae", "critic={}", "critic.optim.lr=0.01")


async def test_gae_trains_policy_and_critic(project: Path) -> None:
    rows = await train(
        project, "gae", *GAE, "rollout.n=1", "data.train_batch_size=8", "trainer.critic_warmup=1",
        "trainer.total_training_steps=12",
    )  # fmt: skip
    assert "actor/pg_loss" not in rows[0] and "actor/pg_loss" in rows[1]
    names = {"critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/grad_norm"}
    assert names <= set(rows[0]) and {"timing_s/values", "timing_s/update_critic"} <= set(rows[0])
    assert rows[0]["critic/values/mean"] == 0
    assert rows[-1]["critic/values/mean"] == pytest.approx(rows[-1]["critic/returns/mean"], abs=0.1)
    assert rows[-1]["critic/vf_loss"] < 0.5 * rows[0]["critic/vf_loss"]
