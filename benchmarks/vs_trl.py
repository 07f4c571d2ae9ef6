"""A training step of minirl against one of TRL's GRPOTrainer, with and without a tool that waits.

    python -m benchmarks.vs_trl [--parts short long tool] [--steps N] [--repetitions 3]
                                [--out build/vs_trl.json] [--record]

Both train the demo's policy (0.64 M parameters, float32) on its questions: 16 prompts, 8 samples of
each, at most 160 tokens behind a prompt, temperature 1, one optimizer step of GRPO without KL on
all 128 trajectories, the demo's reward, a learning rate that leaves the policy as it is. The arms
run in turn, each time in a process of their own, with a seed per repetition; the first step of each
is left out. A step takes as long as its longest response, and samples differ between the arms: a
single step says little.

    short   16 steps; no tool in the prompt: one turn, which ends after some 9 tokens
    long    4 steps; the same by that policy with random weights, which mostly reaches the limit
    tool    2 steps; the calculator, up to 4 turns; a call takes log-normal time, 0.3 s in the mean

`vllm` and `transformers` are `minirl.train` as a user runs it, with that engine: vLLM in a process
of its own, or transformers in the trainer's, as TRL has it. The engine is given the weights after
each update, with the probe that proves it, every conversation calls its tool when it gets there,
the update packs sequences, and trajectories are written to the run directory.
`trl` is `GRPOTrainer(tools=[...])` with an `async` tool and its own loop: transformers' `generate`
samples one turn of all conversations that go on, then it awaits the calls of one conversation after
the other, then the next turn; the update pads. It writes nothing but its log. Neither computes old
log-probabilities: the only optimizer step of a batch has them. TRL's other ways to sample
(`use_vllm`, continuous batching), which are off by default, call tools in the same loop; its
experimental AsyncGRPOTrainer, which needs a vLLM server, is another trainer.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import uvloop
from transformers import AutoTokenizer

from benchmarks.measure import ratios
from benchmarks.results import count, make_parser, provenance, start_load, table, write_section
from benchmarks.trl_arm import run_trl
from benchmarks.vs_trl_task import Step, Task, read_questions, write_tools
from examples.calculator.demo import CONFIG, prepare
from examples.calculator.policy import build_model
from minirl.config import Config, load_config
from minirl.tracking import read_metrics
from minirl.train import main as train


def run_minirl(task: Task, engine: str) -> list[Step]:
    """The steps but the first, which warms up."""
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as folder:
        config = _config(task, Path(folder), engine)
        uvloop.run(train(config))
        rows = [row for row in read_metrics(config.trainer.run_dir) if row["step"] > 1]
    return [
        Step(
            seconds=row["timing_s/step"],
            tokens=row["response_length/mean"],
            tool_calls=row["agent_loop/tool_calls/mean"],
        )
        for row in rows
    ]


def _config(task: Task, folder: Path, engine: str) -> Config:
    """The demo's, with the task's limits; rows without the demo's agent_name."""
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for row in read_questions(task):
            truth = {"ground_truth": row["ground_truth"]}
            found = {"prompt": row["prompt"], "reward_model": truth, "data_source": "calculator"}
            file.write(json.dumps(found) + "\n")
    loop = "tool_agent" if task.with_tool else "single_turn_agent"
    tools = write_tools(folder) if task.with_tool else "null"
    return load_config(
        [
            CONFIG,
            f"model.path={task.model}",
            f"data={{train_files: [{rows}], val_files: [], shuffle: false}}",
            f"data.train_batch_size={task.num_prompts}",
            f"actor.optim={{lr: {task.lr}, lr_scheduler_type: constant}}",
            f"rollout={{name: {engine}, n: {task.n}, response_length: {task.response_length}}}",
            f"rollout.agent.default_agent_loop={loop}",
            f"rollout.multi_turn={{tool_config_path: {tools}, max_tokens_per_turn: null}}",
            f"rollout.multi_turn.max_assistant_turns={task.max_turns}",
            f"trainer={{total_training_steps: {task.num_steps + 1}, test_freq: -1, save_freq: -1}}",
            f"trainer={{default_local_dir: {folder}, experiment_name: run, logger: [jsonl]}}",
            *("trainer.val_before_train=false", "trainer.device=cpu", f"trainer.seed={task.seed}"),
        ]
    )


def _write_random_policy() -> None:
    """The demo's policy before its warm-up."""
    tokenizer = AutoTokenizer.from_pretrained(PARTS["tool"].model)
    for part in (build_model(tokenizer, seed=0), tokenizer):
        part.save_pretrained(PARTS["long"].model)


ARMS = {
    "vllm": partial(run_minirl, engine="vllm"),
    "transformers": partial(run_minirl, engine="transformers"),
    "trl": run_trl,
}
PARTS = {
    "short": Task(with_tool=False, num_steps=16),
    "long": Task(with_tool=False, num_steps=4, model="build/vs_trl/random"),
    "tool": Task(with_tool=True, num_steps=2),
}


def measure(part: str, num_steps: int, repetitions: int) -> dict[str, list[dict[str, Any]]]:
    """By arm, a run per repetition: the means of its steps."""
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in range(repetitions):
        for arm in ARMS:
            command = [sys.executable, "-m", "benchmarks.vs_trl", f"--arm={arm}", "--parts", part]
            command += [f"--steps={num_steps}", f"--seed={seed}"]
            process = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, env=_environment(arm)
            )
            if process.returncode:
                raise SystemExit(f"the arm {arm} failed with status {process.returncode}")
            steps = json.loads(process.stdout.splitlines()[-1])
            runs[arm].append({name: mean(step[name] for step in steps) for name in steps[0]})
    return runs


def _environment(arm: str) -> dict[str, str]:
    """Nothing looks for files on a network, and TRL's threads wait for one another as long as
    libgomp has it by default, not as minirl, which this program imports, has it for itself."""
    shared = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    given = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return given | shared | ({"GOMP_SPINCOUNT": "300000"} if arm == "trl" else {})


def report(results: dict[str, Any]) -> str:
    """A table per arm, and the ratios."""
    rows, compared = [], []
    for part, runs in results.items():
        columns = {arm: _columns(found) for arm, found in runs.items()}
        rows += [(part, arm, *found.values()) for arm, found in columns.items()]
        seconds = {arm: found["seconds"] for arm, found in columns.items()}
        compared.append((part, *(ratios(seconds, "trl", arm) for arm in ("vllm", "transformers"))))
    header = ("part", "arm", "s per step", "response tokens", "tool calls")
    compared_header = ("part", "time, trl / vllm", "trl / transformers")
    return f"{table(header, rows)}\n\n{table(compared_header, compared)}"


def _columns(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [run[name] for run in runs] for name in runs[0]}


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("vs_trl", __doc__, repetitions=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=count, help="that count, of a run; default: the part's")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        [part] = arguments.parts
        task = replace(PARTS[part], num_steps=arguments.steps, seed=arguments.seed)
        print(json.dumps([asdict(step) for step in ARMS[arguments.arm](task)]))
        return
    if missing := [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]:
        print(f"left out: {' and '.join(missing)} not installed (pip install trl)")
        return
    load = start_load()
    prepare(seed=0)
    _write_random_policy()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    for part in arguments.parts:
        num_steps = arguments.steps or PARTS[part].num_steps
        results[part] = measure(part, num_steps, arguments.repetitions)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(report(results))
    if arguments.record:
        about = f"TRL {version('trl')}; what each arm does stands in `benchmarks/vs_trl.py`."
        write_section("vs_trl", f"{provenance(load)}\n\n{about}\n\n{report(results)}")


if __name__ == "__main__":
    main()
