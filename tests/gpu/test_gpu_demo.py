"""The demo on a GPU: the same command as on a CPU, in bfloat16 and for a few steps."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.calculator.prepare import Settings, prepare
from minirl.tracking import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ROOT = Path(__file__).parents[2]
SCORE = "val-core/calculator/acc/mean@1"
NUM_STEPS = 15  # a CPU run in float32 goes from 25 to 85 % in ten


def test_the_demo_learns_on_a_gpu(tmp_path: Path) -> None:
    prepare(tmp_path / "data", Settings())
    settings = {
        "model.path": tmp_path / "data/model",
        "model.dtype": "bfloat16",
        "data.train_files": f"[{tmp_path}/data/train.parquet]",
        "data.val_files": f"[{tmp_path}/data/val.parquet]",
        "rollout.sync_check.max_logprob_diff": 0.05,
        "rollout.gpu_memory_utilization": 0.2,
        "trainer.device": "cuda",
        "trainer.default_local_dir": tmp_path / "runs",
        "trainer.total_training_steps": NUM_STEPS,
        "trainer.test_freq": NUM_STEPS,
        "trainer.save_freq": NUM_STEPS,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "minirl.train", "configs/debug/calculator_grpo.yaml"]
    command += [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)

    rows = read_metrics(tmp_path / "runs/demo")
    scores = [row[SCORE] for row in rows if SCORE in row]
    assert rows[-1]["step"] == NUM_STEPS
    assert scores[0] < 0.5 and scores[-1] >= scores[0] + 0.2
    for row in rows[1:]:
        assert row["training/rollout_probs_diff_mean"] <= 0.02
    assert (tmp_path / f"runs/demo/checkpoints/step_{NUM_STEPS:06d}/meta.json").is_file()
