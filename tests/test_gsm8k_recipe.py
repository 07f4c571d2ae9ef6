"""The recipe examples/gsm8k_tool: its rows, its configs, and conversations with both rewards."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.gsm8k_tool.prepare import prepare
from minirl.agent_loop import ToolAgentLoop
from minirl.agent_loop.run import run_agent_loop
from minirl.config import Config, load_config
from minirl.data import load_rows
from minirl.inputs import Inputs, read_inputs
from minirl.rewards import load_reward_manager, token_rewards
from minirl.testing import ScriptedServer, make_context, tiny_model
from minirl.types import Trajectory

ROOT = Path(__file__).parents[1]
FOLDER = "examples/gsm8k_tool"
CONFIG = f"{FOLDER}/config.yaml"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the invented problems as both splits, made by the command."""
    out = tmp_path_factory.mktemp("gsm8k")
    tiny_model(out / "model")
    problems = f"{FOLDER}/problems.jsonl"
    command = [sys.executable, "-m", "examples.gsm8k_tool.prepare", "--out", str(out)]
    told = subprocess.check_output(
        [*command, "--train", problems, "--test", problems], cwd=ROOT, text=True
    )
    assert told.splitlines() == [f"{out}/{s}.parquet: 10 rows" for s in ("train", "test")]
    return out


def load(data: Path, *arguments: str) -> Config:
    return load_config(
        [
            *(CONFIG, f"model.path={data}/model", f"data.train_files=[{data}/train.parquet]"),
            *(f"data.val_files=[{data}/test.parquet]", "data.train_batch_size=8"),
            *("actor.ppo_mini_batch_size=8", "data.max_prompt_length=2048"),  # a token is a byte
            *arguments,
        ]
    )


@pytest.fixture
def inputs(data: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    monkeypatch.chdir(ROOT)  # the recipe names files from there
    return read_inputs(load(data))


def call(answer: str) -> str:
    arguments = json.dumps({"name": "calc_gsm8k_reward", "arguments": {"answer": answer}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


async def converse(inputs: Inputs, row: dict[str, Any], *replies: str) -> Trajectory:
    server = ScriptedServer(inputs.tokenizer, replies)
    overrides = ["data.max_prompt_length=2048", "rollout.response_length=2048"]
    context = make_context(server, tools=list(inputs.tools.values()), overrides=overrides)
    row = {**row, "raw_prompt": row["prompt"], "uid": "0-0"}
    [trajectory] = await run_agent_loop(ToolAgentLoop(context), {}, row)
    return trajectory


def test_rows_have_the_columns_of_verl(data: Path) -> None:
    rows = load_rows([data / "train.parquet"])
    row = rows[2]
    assert list(row) == [
        *("data_source", "agent_name", "prompt", "ability", "reward_model", "extra_info")
    ]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"] == row["extra_info"]["question"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1260"}  # was 1,260
    assert row["extra_info"]["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1260"}}
    }
    assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("train", 2)
    assert (row["data_source"], row["agent_name"]) == ("openai/gsm8k", "tool_agent")


def test_the_invented_problems_are_solved_rightly(data: Path) -> None:
    """Each <<expression=result>> holds, and the last result is the answer (cents: a hundredth)."""
    for row in load_rows([data / "train.parquet"]):
        answer, truth = row["extra_info"]["answer"], float(row["reward_model"]["ground_truth"])
        steps = [part.split(">>")[0].split("=") for part in answer.split("<<")[1:]]
        for expression, result in steps:
            assert eval(expression) == float(result), expression
        assert float(steps[-1][1]) * (100 if "cents" in answer else 1) == truth


def test_config_tools_and_rows_pass_the_check_at_start(inputs: Inputs) -> None:
    assert (len(inputs.train_rows), len(inputs.val_rows)) == (10, 10)
    assert list(inputs.tools) == ["calc_gsm8k_reward"]


@pytest.mark.parametrize("overlay", ["config_3b.yaml", "shaped_reward.yaml"])
def test_an_overlay_passes_it_too(
    data: Path, overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(data, f"{FOLDER}/{overlay}")
    read_inputs(config)
    assert config.trainer.experiment_name != load(data).trainer.experiment_name


async def test_a_conversation_that_corrects_itself(inputs: Inputs) -> None:
    row = inputs.train_rows[0]
    trajectory = await converse(
        inputs, row, f"84 - 59 is 35.{call('35')}", f"No.{call('25')}", "#### 25"
    )
    assert [record.result for record in trajectory.tool_calls] == [
        "Current parsed answer='35' reward=0.0",
        "Current parsed answer='25' reward=1.0",
    ]
    assert trajectory.turn_rewards == [-0.05, 0.0, 0.0]
    assert trajectory.reward_breakdown == {"tool/calc_gsm8k_reward": 1.0}

    await inputs.reward_manager(trajectory, row, "#### 25")
    assert (trajectory.reward, trajectory.answer) == (1.0, "25")
    rewards = token_rewards(trajectory, "turn")
    first, _, last = trajectory.turn_ends
    assert {i: r for i, r in enumerate(rewards) if r} == {first - 1: -0.05, last - 1: 1.0}


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([call("25"), "#### 25"], {"acc": 1, "format": 0, "tool_bonus": 0.1}),
        (["#### 25"], {"acc": 1, "format": 0, "tool_bonus": 0}),
        ([call("24"), "#### 24"], {"acc": 0, "format": 0.1, "tool_bonus": 0}),
        ([call("24"), "I do not know."], {"acc": 0, "format": 0, "tool_bonus": 0}),
    ],
)
@pytest.mark.parametrize("manager", ["naive", "prime"])
async def test_the_shaped_reward(
    data: Path, inputs: Inputs, manager: str, replies: list[str], expected: dict[str, float]
) -> None:
    config = load(data, f"{FOLDER}/shaped_reward.yaml", f"reward.reward_manager={manager}")
    score = load_reward_manager(config.reward, response_length=1024)
    row = inputs.train_rows[0]
    trajectory = await converse(inputs, row, *replies)
    await score(trajectory, row, inputs.chat.decode(trajectory.response_ids))
    parts = trajectory.reward_breakdown
    length_penalty = -0.05 * len(trajectory.response_ids) / 1000
    assert parts["length_penalty"] == pytest.approx(length_penalty)
    assert {key: parts[key] for key in expected} == expected
    outcome = expected["acc"] + expected["format"] + expected["tool_bonus"]
    assert trajectory.reward == pytest.approx(outcome + length_penalty)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "?", "answer": "#### 4"}\n{"question": "?", "answer": "4"}', "problem 2: "),
        ('{"question": "?", "answer": "#### four"}', "problem 1: .*got 'four'"),
        ('{"question": "?"}', "problem 1: KeyError"),
        ("[1]", "problem 1: TypeError"),
        ("{", "problem 1: JSONDecodeError"),
        ("", "has no problems"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=message):
        prepare(file, "train", tmp_path)
