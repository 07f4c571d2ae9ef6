"""examples/history_summary, and what becomes of several trajectories per conversation."""

import json
import re
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_run import TOKENIZER, first_step, make_config, make_project
from scripted_run import SeededEngine as Engine

from examples.history_summary.agent import REQUEST
from examples.history_summary.task import make_rows
from minirl.agent_loop import load_agent_loops
from minirl.checks import check_algorithms
from minirl.config import load_config
from minirl.tools import load_tools
from minirl.trainer import packing
from minirl.types import Trajectory

FOLDER = "examples/history_summary"
NUM_PAGES = 4


class SummaryEngine(Engine):
    """Reads the pages that its context has not, or guesses, by its seed; then adds up."""

    def reply(self, request_id: str, turn: int, prompt_ids: list[int]) -> str:
        text = TOKENIZER.decode(prompt_ids)
        lists = [map(int, amounts.split(", ")) for amounts in re.findall(r"nts: ([\d, ]+)\.", text)]
        noted = re.search(r"read (\d+), total (\d+)", text)
        num_read, total = map(int, noted.groups()) if noted else (0, 0)
        num_read, total = num_read + len(lists), total + sum(map(sum, lists))
        if REQUEST in text:
            return f"read {num_read}, total {total}"
        if turn == 0 and self.params[request_id]["seed"] % 3 == 0:
            return "#### 1"
        if num_read < NUM_PAGES:
            call = {"name": "read_page", "arguments": {"page": num_read + 1}}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        return f"#### {total}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    rows = make_rows(4, seed=0, num_pages=NUM_PAGES)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "loops.yaml").write_text(
        "- {name: history_summary, stretch_tokens: 150,"
        " _target_: 'examples.history_summary.agent:HistorySummaryAgent'}"
    )
    return folder


async def test_stretches_from_the_engine_to_the_gradient(project: Path) -> None:
    config = make_config(
        project,
        "summary",
        "rollout={name: 'test_history_summary:SummaryEngine', n: 4, response_length: 1024}",
        "data.max_prompt_length=2048",
        f"data.val_files=[{project}/rows.jsonl]",
        f"rollout.agent.agent_loop_config_path={project}/loops.yaml",
        f"rollout.multi_turn.tool_config_path={FOLDER}/tools.yaml",
    )
    async with first_step(config) as steps:
        groups = await steps.generate()
        batch = await steps.assemble(groups)
        batch.old_logprobs, _ = await steps.compute_logprobs(batch)
        batch.advantages, batch.returns = await steps.compute_advantages(batch)
        await steps.update_actor(batch)
        await steps.record(batch)
        await steps.finish()
        metrics = await steps.validate()
    check_stretches(steps.trajectories)
    check_advantages(groups, batch)
    assert metrics["val-aux/openai/gsm8k/num_prompts"] == 4
    assert "val-core/openai/gsm8k/reward/mean@1" in metrics


def check_stretches(trajectories: list[Trajectory]) -> None:
    """Each begins with what the one before ended with; all have the reward of the last."""
    conversations = [
        list(stretches) for _, stretches in groupby(trajectories, lambda t: (t.uid, t.sample_index))
    ]
    assert len(conversations) == 16
    assert {len(stretches) for stretches in conversations} == {1, 3}
    for stretches in conversations:
        for before, after in pairwise(stretches):
            start = before.turn_ends[-2]
            turn = zip(before.response_ids[start:], before.response_mask[start:], strict=True)
            summary = TOKENIZER.decode([token for token, mask in turn if mask])
            assert summary.startswith("read ")
            assert f"so far:\n{summary}\n" in TOKENIZER.decode(after.prompt_ids)
            assert before.termination == "stop"
        assert {t.reward for t in stretches} == {1.0 if len(stretches) > 1 else 0.0}


def check_advantages(groups: list[Any], batch: Any) -> None:
    """GRPO's of conversations, not of stretches: the mean and deviation count each once."""
    rows = packing.to_rows(batch, "advantages")
    row = 0
    for group in groups:
        rewards = {t.sample_index: t.reward for t in group.trajectories}
        assert len(rewards) == 4
        scores = torch.tensor(list(rewards.values()))
        scale = scores.std() + 1e-6
        for trajectory in group.trajectories:
            mask = torch.tensor(trajectory.response_mask)
            expected = (trajectory.reward - scores.mean()) / scale * mask
            torch.testing.assert_close(rows[row][: len(mask)], expected)
            row += 1
    assert row == batch.num_sequences
    assert set(Counter(batch.sample_ids.tolist()).values()) == {1, 3}
    assert rows.abs().max() > 0.5


def test_its_config_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    config = load_config([f"{FOLDER}/config.yaml", "model.path=m"])
    check_algorithms(config)
    assert config.rollout.agent.agent_loop_config_path
    assert list(load_agent_loops(config.rollout.agent.agent_loop_config_path)) == [
        "history_summary"
    ]
    assert config.rollout.multi_turn.tool_config_path
    assert list(load_tools(config.rollout.multi_turn.tool_config_path)) == ["read_page"]
