"""`minirl.train` as a user starts it: whole processes, the real engine, one and two ranks, two
nodes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import two_nodes

from minirl.testing import tiny_model
from minirl.tracking import read_metrics

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="exact agreement is for vLLM's CPU build; see tests/gpu"
    ),
]

END_S = 60  # in which every process has to be gone
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": solution_str.count("e") / 10, "pred": solution_str[:3]}
"""
LOSS = """
import os
from minirl.algorithms import policy_loss

def fails_on_rank_1(inputs):
    if os.environ.get("RANK") == "1":
        raise FloatingPointError("planted on rank 1")
    return policy_loss("vanilla", inputs)
"""
WAITS = """
import asyncio, os
from minirl.agent_loop import AgentLoopBase

class Waits(AgentLoopBase):
    async def run(self, sampling_params, **row):
        open(os.environ["WAITS_HERE"], "w").close()
        await asyncio.Event().wait()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: Any) -> Path:
    """A model, rows, a reward, a tool and a config, as a user would have them."""
    folder: Path = tmp_path_factory.mktemp("project")
    tiny_model(folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(48):
            row = {
                "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
                "data_source": "letters",
                "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
                "agent_name": "tool_agent",
            }
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "planted.py").write_text(LOSS)
    (folder / "waits.py").write_text(WAITS)
    (folder / "tools.yaml").write_text(
        "tools: [{class_name: 'minirl.tools.calculator:CalculatorTool'}]"
    )
    (folder / "config.yaml").write_text(f"""
model: {{path: {folder}/model, dtype: float32}}
data:
  train_files: [{folder}/rows.jsonl]
  val_files: [{folder}/rows.jsonl]
  train_batch_size: 4
  max_prompt_length: 640
actor: {{optim: {{lr: 0.001}}, max_tokens_per_micro_batch: 2048}}
rollout:
  n: 4
  response_length: 48
  enforce_eager: true
  cpu_kv_cache_gb: 0.25
  sync_check: {{max_logprob_diff: 1.0e-5, probe_length: 4}}
  multi_turn: {{tool_config_path: {folder}/tools.yaml}}
reward: {{custom_reward_function: {{path: {folder}/reward.py}}}}
trainer:
  default_local_dir: {folder}/runs
  val_before_train: false
  total_training_steps: 4
""")
    return folder


class Training:
    """One started command and everything that it left."""

    def __init__(
        self, project: Path, name: str, *overrides: str, ranks: int = 0, nodes: int = 1
    ) -> None:
        self.run_dir = project / "runs" / name
        command = [sys.executable, "-m"]
        if ranks:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        if nodes == 2:
            command = two_nodes.command("--nproc-per-node=1", "-m")
        self.abandoned_before = abandoned_memory()
        self.temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        self.process = subprocess.Popen(
            [
                *(*command, "minirl.train", f"{project}/config.yaml"),
                *(f"trainer.experiment_name={name}", *overrides),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{Path(__file__).parents[1]}:{project}",
                "TMPDIR": str(self.temporary),
            },
        )

    def wait_for_step(self, step: int) -> list[psutil.Process]:
        """Its processes, once `step` is recorded."""
        deadline = time.monotonic() + 600
        while not (self.run_dir / "metrics.jsonl").exists() or self.steps()[-1:] < [step]:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.05)
        return psutil.Process(self.process.pid).children(recursive=True)

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.run_dir)]

    def output(self) -> str:
        return self.process.communicate(timeout=300)[0]

    def leaves_nothing(self, processes: list[psutil.Process]) -> str:
        """Assert that all ends in time and nothing stays; return what was printed."""
        printed = self.process.communicate(timeout=END_S)[0]
        _, alive = psutil.wait_procs(processes, END_S)
        assert not alive, printed
        deadline = time.monotonic() + END_S  # others make some, and map it a moment later
        while left := abandoned_memory() - self.abandoned_before:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert list(self.temporary.glob("minirl-*")) == []
        return printed


def abandoned_memory() -> set[str]:
    """Names of shared memory that no process has mapped. Semaphores do not count: they are mapped
    under another name than they get."""
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            names -= {Path(m.path).name for m in process.memory_maps() if "/dev/shm/" in m.path}
    return names


def reasons(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("minirl: ")]


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Training:
    """Four steps of `python -m minirl.train`."""
    training = Training(
        project, "undisturbed", "trainer.save_freq=4", "trainer.test_freq=4", "ref={}",
        "actor.use_kl_loss=true", "rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1",
    )  # fmt: skip
    printed = training.output()
    assert training.process.returncode == 0, printed
    return training


def test_a_run_leaves_what_it_promises(undisturbed: Training) -> None:
    run_dir = undisturbed.run_dir
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    names = set(rows[-1])
    parts = "gen reward ref adv update_actor update_weights testing save_checkpoint"
    assert {f"timing_s/{part}" for part in parts.split()} <= names
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"} <= names
    assert {f"val-core/letters/acc/{kind}@2" for kind in ("mean", "pass", "maj")} <= names
    terminations = sum(v for k, v in rows[-1].items() if "agent_loop/termination/" in k)
    assert terminations == pytest.approx(1)
    for row in rows[1:]:
        assert row["training/rollout_probs_diff_max"] <= 1e-5
    assert (run_dir / "config.yaml").exists() and list(run_dir.glob("tensorboard/*"))
    assert (run_dir / "checkpoints" / "step_000004" / "meta.json").exists()


def test_recorded_trajectories_mark_what_the_policy_sampled(undisturbed: Training) -> None:
    lines = (undisturbed.run_dir / "trajectories" / "step_000002.jsonl").read_text().splitlines()
    trajectories = [json.loads(line) for line in lines]
    assert len(trajectories) == 16 and len({t["uid"] for t in trajectories}) == 4
    for t in trajectories:
        assert len(t["response_ids"]) == len(t["response_mask"]) == len(t["response_logprobs"])
        assert t["response_mask"][-1] == 1
        assert all(
            p == 0 for p, m in zip(t["response_logprobs"], t["response_mask"], strict=True) if not m
        )
        assert set(t["weight_versions"]) == {1}  # synced after step 1


def kill_engine(
    training: Training, processes: list[psutil.Process], number: int = signal.SIGKILL
) -> None:
    [engine] = [p for p in processes if "EngineCore" in "".join(p.cmdline())]
    engine.send_signal(number)


def test_a_run_resumes_where_sigterm_ended_it_and_killed_it_leaves_no_engine(
    project: Path, undisturbed: Training
) -> None:
    options = ("trainer.save_freq=1", "ref={}", "actor.use_kl_loss=true")
    options += ("trainer.total_training_steps=1000",)
    training = Training(project, "resumed", *options)
    processes = training.wait_for_step(2)
    training.process.terminate()
    printed = training.leaves_nothing(processes)
    assert reasons(printed) == ["minirl: stopped by SIGTERM"]
    assert training.process.returncode == 128 + signal.SIGTERM

    again = Training(project, "resumed", *options)
    processes = again.wait_for_step(4)
    again.process.kill()
    assert not psutil.wait_procs(processes, END_S)[1]
    assert "resumed from step" in again.output()
    compared = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "response_length/mean")
    expected = read_metrics(undisturbed.run_dir)
    for ours, theirs in zip(read_metrics(again.run_dir), expected, strict=False):
        assert ours["step"] == theirs["step"]
        for name in compared:
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-4), (ours["step"], name)


def test_two_nodes_with_an_engine_each_then_ctrl_c(project: Path, undisturbed: Training) -> None:
    training = Training(
        project, "two_engines", "ref={}", "actor.use_kl_loss=true",
        "trainer.total_training_steps=1000", "rollout.agent.num_workers=1", nodes=2,
    )  # fmt: skip
    processes = training.wait_for_step(3)
    assert sum("EngineCore" in "".join(p.cmdline()) for p in processes) == 2
    os.killpg(training.process.pid, signal.SIGINT)  # what a terminal does
    printed = training.leaves_nothing(processes)
    assert reasons(printed) == ["minirl: stopped by SIGINT"]
    ours, theirs = read_metrics(training.run_dir), read_metrics(undisturbed.run_dir)
    for row in ours[1:]:
        assert row["training/rollout_probs_diff_max"] <= 1e-5
        assert {row["rollout/requests/server_0"], row["rollout/requests/server_1"]} == {8.0}
    # the same prompts and seeds, so the same step on one rank, and on two with agent loops apart
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4, abs=1e-6)


def test_one_engine_over_two_ranks_then_a_killed_engine(project: Path) -> None:
    training = Training(
        project, "tensor_parallel", "rollout.tensor_parallel_size=2",
        "trainer.total_training_steps=1000", "rollout.over_sample_rate=0.5",
        "actor.ppo_epochs=2", "actor.logprobs_in_tail=true", ranks=2,
    )  # fmt: skip
    processes = training.wait_for_step(2)
    assert sum("EngineCore" in "".join(p.cmdline()) for p in processes) == 1
    last = read_metrics(training.run_dir)[-1]
    assert last["training/rollout_probs_diff_max"] <= 1e-5
    assert 0 < last["training/logprobs_in_tail"] <= 1
    kill_engine(training, processes)
    printed = training.leaves_nothing(processes)
    assert len(reasons(printed)) == 1 and "vLLM engine died" in reasons(printed)[0]


def test_an_engine_that_is_stopped_ends_the_run_and_ends_with_it(project: Path) -> None:
    training = Training(
        project, "stopped", "trainer.total_training_steps=1000", "rollout.engine_timeout_s=15"
    )
    processes = training.wait_for_step(1)
    kill_engine(training, processes, signal.SIGSTOP)
    printed = training.leaves_nothing(processes)
    assert len(reasons(printed)) == 1 and "15 s (rollout.engine_timeout_s)" in reasons(printed)[0]


def test_an_exception_on_rank_1_ends_every_rank(project: Path) -> None:
    training = Training(
        project, "failing", "actor.policy_loss.loss_mode=planted:fails_on_rank_1",
        "rollout.name=transformers", ranks=2,
    )  # fmt: skip
    processes = training.wait_for_step(0)
    printed = training.output()
    assert reasons(printed) == ["minirl: rank 1: FloatingPointError: planted on rank 1"]
    assert training.process.returncode == 1
    assert not psutil.wait_procs(processes, END_S)[1]
    assert "planted.py" in (training.run_dir / "logs" / "rank_1.log").read_text()


def test_a_leader_that_is_stopped_in_the_rollout_is_named_by_the_others(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (project / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace("tool_agent", "waits:Waits"))
    monkeypatch.setenv("WAITS_HERE", str(tmp_path / "in_the_rollout"))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")  # torchrun's patience with it
    training = Training(
        project, "stopped_leader", f"data.train_files=[{tmp_path}/rows.jsonl]",
        "rollout.name=transformers", "trainer.collective_timeout_s=20", ranks=2,
    )  # fmt: skip
    processes = training.wait_for_step(0)
    deadline = time.monotonic() + 300
    while not (tmp_path / "in_the_rollout").exists():
        assert training.process.poll() is None, training.output()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    by_rank = {p.environ().get("RANK"): p for p in psutil.Process(training.process.pid).children()}
    leader = by_rank["0"]
    leader.send_signal(signal.SIGSTOP)
    by_rank["1"].wait(300)
    printed = training.leaves_nothing(processes)
    [reason] = reasons(printed)
    assert f"rank 0 (process {leader.pid} is stopped), which has been in step 1, gen" in reason
    assert "collective_timeout_s=20" in reason


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.temprature=1"], "rollout.temprature: no such key; did you mean 'temperature'?"),
        (["rollout.tensor_parallel_size=2"], "rollout.tensor_parallel_size: got 2, which does not"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    project: Path, overrides: list[str], message: str
) -> None:
    training = Training(project, "bad", *overrides)
    printed = training.output()
    assert training.process.returncode == 2
    assert len(reasons(printed)) == 1 and message in printed
    assert "Traceback" not in printed
    assert not (training.run_dir / "logs" / "engine_0.log").exists()  # no engine was started
