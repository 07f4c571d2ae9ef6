"""The benchmarks run, on small numbers, and what they say adds up."""

import argparse
import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks import (
    algorithms,
    chaos,
    gpu_engine,
    gpu_session,
    rollout_driver,
    rollout_overhead,
    routing,
    scaling,
    startup,
    threads,
    train_step,
    vs_trl,
    vs_trl_task,
)
from benchmarks.gpu_engine import Job
from benchmarks.rollout_routing import CachingServer
from benchmarks.shapes import random_model
from examples.calculator import demo
from minirl.config import load_config
from minirl.rollout.server import ServerService
from minirl.tools import load_tools


async def test_routing_compares_its_arms() -> None:
    workload = replace(routing.ALONE, num_prompts=8, tool_s=0.0)
    rounds = await routing.measure([CachingServer(0), CachingServer(1)], workload, 2)
    assert {len(values) for figures in rounds.values() for values in figures.values()} == {2}
    compared = routing.compare(rounds)
    assert all(ratio > 0.98 for ratio in compared["hit rate, sticky / one"])
    assert all(ratio < 0.9 for ratio in compared["hit rate, spread / sticky"])
    report = routing.report({"alone": {"rounds": rounds, "ratios": compared}})
    assert len(report.splitlines()) == 2 + 3 + 1 + 2 + 4


async def test_scaling_counts_what_a_trajectory_costs(tmp_path: Path) -> None:
    """The engine is in this process here."""
    address, this = f"ipc://{tmp_path}/engine", psutil.Process()
    service = ServerService(rollout_driver.ScriptedTurns(), address, ["generate", "stats"])
    serving = asyncio.create_task(service.serve())
    try:
        costs = await scaling._measure(tmp_path, address, 0, [8, 16], this)
    finally:
        gc.unfreeze()
        serving.cancel()
    assert len(costs) == 2
    for cost in costs:
        assert list(cost) == list(scaling.FIGURES)
        assert cost["wall"] > 0 and cost["rank 0"] > 0 and cost["workers"] == 0
    results = {"8": {"0": {figure: [value] for figure, value in costs[0].items()}}}
    assert scaling.report(results).splitlines()[-1].endswith("| 1 |")


@pytest.mark.parametrize("part", vs_trl.PARTS)
def test_both_arms_of_vs_trl_have_the_same_questions(part: str, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    questions = tmp_path / "questions.jsonl"
    questions.write_text(f"{json.dumps(row)}\n" * 100)
    task = replace(vs_trl.PARTS[part], questions=str(questions), num_prompts=4, num_steps=2)
    given = vs_trl_task.read_questions(task)
    assert given == [{"prompt": row["prompt"], "ground_truth": "2"}] * 12
    config = vs_trl._config(task, tmp_path, "transformers")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in rows] == [r["prompt"] for r in given]
    assert config.data.train_batch_size * (config.trainer.total_training_steps or 0) == len(rows)
    if task.with_tool:
        tools = load_tools(config.rollout.multi_turn.tool_config_path or "")
        assert isinstance(tools["calculator"], vs_trl_task.WaitingCalculator)
    else:
        assert config.rollout.multi_turn.tool_config_path is None


def test_trl_has_threads_as_without_minirl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # as minirl sets it, which vs_trl imports
    assert {arm: vs_trl._environment(arm).get("GOMP_SPINCOUNT") for arm in vs_trl.ARMS} == {
        **{"vllm": None, "transformers": None},
        "trl": "300000",
    }


async def test_a_tool_that_waits_answers_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(vs_trl_task.asyncio, "sleep", sleep)
    tool = vs_trl_task.WaitingCalculator({})
    answer, _, _ = await tool.execute("", {"expression": "2 * 3"})
    assert answer.text == "6" and len(waited) == 1
    for number in range(4000):
        await vs_trl_task.wait(f"{number} + 1")
    assert sum(waited) / len(waited) == pytest.approx(vs_trl_task.MEAN_S, rel=0.1)
    assert max(waited) > 2 and min(waited) < 0.03


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [
        (rollout_overhead, "--repetitions"),
        (routing, "--repetitions"),
        (scaling, "--repetitions"),
        (startup, "--repetitions"),
        (threads, "--repetitions"),
        (train_step, "--repetitions"),
        (vs_trl, "--repetitions"),
        (vs_trl, "--steps"),
    ],
)
def test_what_is_never_done_has_no_figures(
    benchmark: Any, option: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", option, "0"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert f"argument {option}: got 0; at least 1" in capsys.readouterr().err


def test_settings_for_a_demo_that_has_ended_are_refused(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    figures = {"val_before": 0.25, "val_after": 0.95, "num_steps": 60}
    figures |= {"train_seconds": 1.0, "first_step_seconds": 1.0}
    (tmp_path / "runs" / "demo" / "summary.json").write_text(json.dumps(figures))
    monkeypatch.setattr(sys, "argv", ["demo"])
    demo.main()
    assert "25.0% before, 95.0% after 60 steps" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["demo", "rollout.n=4"])
    with pytest.raises(SystemExit):
        demo.main()
    assert "rollout.n=4: runs/demo has ended already" in capsys.readouterr().err


def test_every_core_counts_whatever_the_shell_says_of_threads(monkeypatch: Any) -> None:
    given = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        given[arm] = {k: v for k, v in env.items() if k.startswith(("OMP_", "GOMP_"))}
        assert env["PATH"] and ("--two-pools" in command) == (arm == "two_pools")
        [out] = [word.removeprefix("--out=") for word in command if word.startswith("--out=")]
        found = {"seconds old_log_prob": [1.0, 3.0, 2.0], "seconds update_actor": [4.0]}
        Path(out).write_text(json.dumps({"phases": found}))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setattr(threads.subprocess, "run", run)
    for arm in threads.ARMS:
        assert threads.measure(arm) == {"old_log_prob": 2.0, "update_actor": 4.0}
    assert given == threads.ARMS


def test_what_keeps_a_core_busy_ends_with_its_benchmark(monkeypatch: Any) -> None:
    loops, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        loops.append(popen(command))
        return loops[-1]

    monkeypatch.setattr(threads.subprocess, "Popen", start)
    with threads.busy(1):
        assert loops[0].poll() is None
    monkeypatch.setattr(threads, "os", SimpleNamespace(getpid=lambda: -1))  # which is gone
    with threads.busy(1):
        assert loops[1].wait(timeout=120) == 0


def test_the_demos_first_step_is_none_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, now = tmp_path / "metrics.jsonl", [0.0]

    def record(step: int, seconds: float) -> None:
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "seconds": seconds, demo.SCORE: 0.5}) + "\n")

    class Process:
        """Resumes a run behind its second step, and records the third after 40 s."""

        returncode = 0

        def __init__(self, command: list[str]) -> None:
            pass

        def poll(self) -> int | None:
            if now[0] == 40:
                record(3, 72.0)
            return None if now[0] < 60 else 0

    def sleep(seconds: float) -> None:
        now[0] += 10

    for step in (0, 1, 2):
        record(step, 30.0 + step)
    monkeypatch.setattr(demo.subprocess, "Popen", Process)
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(demo.time, "sleep", sleep)
    figures = demo.train(tmp_path, [])
    assert figures["first_step_seconds"] == 50 and figures["train_seconds"] == 60
    assert figures["num_steps"] == 3


def test_another_seed_is_another_run_of_each_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def train(run_dir: Path, arguments: list[str]) -> dict[str, float]:
        assert f"trainer.experiment_name={run_dir.name}" in arguments
        made.append((run_dir, arguments[1]))
        run_dir.mkdir()
        return {"val_before": 0.2, "val_after": 0.9, "num_steps": 60, "train_seconds": 200}

    monkeypatch.setattr(algorithms, "prepare", lambda seed: (0.0, [f"trainer.seed={seed}"]))
    monkeypatch.setattr(algorithms, "train", train)
    monkeypatch.setattr(algorithms, "learning_curve", lambda runs, *_, **__: made.append(runs))
    for seed in (0, 1, 0):
        monkeypatch.setattr("sys.argv", ["", "grpo", f"--seed={seed}", f"--out={tmp_path}"])
        with pytest.raises(SystemExit, match="0"):
            algorithms.main()
    first, second = tmp_path / "grpo", tmp_path / "grpo-1"
    runs = [(first, "trainer.seed=0"), [first], (second, "trainer.seed=1"), [second], [first]]
    assert made == runs


def test_a_model_of_which_a_part_was_written_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(model: Qwen3ForCausalLM, folder: Path) -> None:
        model.config.save_pretrained(folder)  # as save_pretrained begins
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Qwen3ForCausalLM, "save_pretrained", cut_off)
        random_model("debug", "cpu", torch.float32)
    folder = random_model("debug", "cpu", torch.float32)
    assert (folder / "config.json").exists() and (folder / "model.safetensors").exists()


def test_chaos_takes_away_its_own_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("undisturbed", "disturbed_1", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    monkeypatch.setattr(chaos.CONTEXT, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(chaos, "prepare", lambda seed: sys.exit("no policy"))
    monkeypatch.setattr("sys.argv", ["chaos", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match="no policy"):
        chaos.main()
    assert list(tmp_path.glob("*/*")) == [tmp_path / "mine" / "metrics.jsonl"]


def test_startup_can_write_elsewhere_than_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "elsewhere" / "startup.json"
    (tmp_path / "python").write_text("#!/bin/sh\necho ready\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(startup.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(startup, "first_step", lambda config: 9e9)
    monkeypatch.setattr("sys.argv", ["startup", "--repetitions=2", f"--out={out}"])
    startup.main()
    rows = json.loads(out.read_text())
    assert rows["first step"] == [9e9] * 2 and all(s > 0 for s in rows["engine alone"])


TESTS_FOR_A_GPU = """
import os, pytest

def test_that_is_fine(): pass
@pytest.mark.skip(reason="no such card")
def test_for_another_card(): pass
def test_that_fails(): assert 1 == 2, "the numbers differ"
@pytest.fixture
def engine(): raise RuntimeError("no engine")
def test_without_engine(engine): pass
def test_that_ends_the_process(): os._exit(3)
"""


def test_a_gpu_session_has_what_was_tested_before_its_process_ended(
    tmp_path: Path, forkserver: ForkServerContext
) -> None:
    file, job = tmp_path / "test_gpu.py", Job(tmp_path, True, tmp_path / "results.json")
    file.write_text(TESTS_FOR_A_GPU)
    arguments = [str(file), f"--rootdir={tmp_path}", "-pno:cacheprovider"]
    process = forkserver.Process(target=gpu_session.run_tests, args=(job, arguments))
    process.start()
    process.join()
    assert process.exitcode == 3
    found = json.loads(job.results.read_text())
    tests = list(found["tests"].values())
    assert [t["outcome"] for t in tests] == ["passed", "skipped", "failure", "error", "cut off"]
    assert found["counts"]["failure"] == 1 and found["status"] is None
    assert "the numbers differ" in tests[2]["message"] and "no engine" in tests[3]["message"]


def test_a_gpu_session_without_time_keeps_what_an_earlier_call_found(tmp_path: Path) -> None:
    found = {"outcome": "done", "seconds": 99.0, "rounds": [1, 2]}
    (tmp_path / "session.json").write_text(json.dumps({"sync": found}))
    arguments = argparse.Namespace(seconds=0, parts=["sync", "decode"], dry_run=True)
    with pytest.raises(SystemExit, match="not done: decode"):
        gpu_session._session(tmp_path, arguments)
    session = json.loads((tmp_path / "session.json").read_text())
    assert session == {"sync": found, "decode": {"outcome": "no time left"}}


def test_the_float32_demo_of_a_gpu_session_is_in_float32(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(demo.shutil, "which", lambda name: f"/usr/bin/{name}")  # as with a GPU
    monkeypatch.setattr(demo, "_check", lambda command: None)
    given: dict[str, Any] = {}
    monkeypatch.setattr(gpu_session, "_demo", lambda job, seed, settings: given.update(settings))
    gpu_session.demo_float32(Job(tmp_path, True, tmp_path / "results.json"))
    _, data = demo.prepare(1)
    config = load_config([demo.CONFIG, *data, *(f"{key}={value}" for key, value in given.items())])
    assert config.model.dtype == "float32"


async def test_a_gpu_session_decodes_with_a_seed_per_request_and_without(
    tmp_path: Path, monkeypatch: Any
) -> None:
    asked: list[tuple[tuple[int, ...], bool]] = []

    class Server:
        async def generate(self, prompt: list[int], params: dict[str, Any], _: str) -> None:
            asked.append((tuple(prompt), "seed" in params))

    @asynccontextmanager
    async def engine(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(server=Server(), seconds={})

    monkeypatch.setattr(gpu_engine, "_engine", engine)
    job = Job(tmp_path, True, tmp_path / "results.json")
    await gpu_engine._decode(job, eager=True)
    runs = json.loads(job.results.read_text())["runs"]
    conversations = [(run["conversations"], run["seeded"]) for run in runs]
    assert conversations == [(1, True), (1, False), (4, True), (4, False)]
    measured = asked[-10:]
    assert [seeded for _, seeded in measured] == [True, False] + [True] * 4 + [False] * 4
    assert len({prompt for prompt, _ in measured}) == 10
