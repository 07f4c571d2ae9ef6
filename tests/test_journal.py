import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minirl.config import load_config
from minirl.journal import (
    Conversation,
    Header,
    Journal,
    Journals,
    Outcome,
    config_digest,
    files_digest,
    read_journal,
)
from minirl.rollout.worker import SampleRequest
from minirl.types import TokenOutput, ToolCallRecord, Trajectory

TRUTH = object()  # what a row holds need not be writable
THIRD = float(np.float32(1 / 3))


def request(uid: str = "0-1", index: int = 0, seed: int = 7) -> SampleRequest:
    row = {"uid": uid, "prompt": [], "reward_model": {"ground_truth": TRUTH}}
    return SampleRequest(row=row, sample_index=index, seed=seed, sampling_params={})


def conversation(uid: str = "0-1") -> list[Trajectory]:
    first = Trajectory(prompt_ids=[1, 2], uid=uid, ground_truth=TRUTH)
    output = {"token_ids": [3, 4], "logprobs": [-THIRD, float("-inf")], "finish_reason": "stop"}
    first.append_sampled(TokenOutput(**output))  # type: ignore[arg-type]
    first.append_observation([5])
    first.metrics["seconds"] = np.float64(0.5)
    first.tool_calls.append(
        ToolCallRecord(turn=0, name="t", arguments="{}", result="\u00fc", status="ok", reward=0.25)
    )
    last = replace(first, turn_rewards=[0.25], reward=1 / 3, termination="stop", answer="72")
    return [first, last]


def header(step: int = 3, **changes: Any) -> Header:
    values = {"config": "c", "files": "f", "parameters": "p", "environment": {"torch": "2"}}
    return Header(step=step, weight_version=step - 1, **values | changes)  # type: ignore[arg-type]


def journal_with(path: Path, count: int) -> None:
    journal = Journal.begin(path, header())
    for index in range(count):
        asyncio.run(journal.append(request(index=index), conversation()))
    journal.close()


def test_what_was_appended_is_found_once_and_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    journal_with(tmp_path / "j", 2)
    journal = Journal.begin(tmp_path / "j", header(environment={"torch": "3"}))
    assert journal.find(request(index=1)) == conversation()
    assert journal.find(request(index=1)) is None
    others = [request(uid="0-2"), request(index=2), request(seed=8)]
    assert [journal.find(other) for other in others] == [None] * 3
    assert journal.find(request(index=0)) == conversation()
    assert journal.outcome is None
    journal.close()


@pytest.mark.parametrize("cut", [1, 7, 60])
async def test_a_torn_record_is_dropped_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    await asyncio.to_thread(journal_with, path, 3)
    os.truncate(path, path.stat().st_size - cut)
    journal = Journal.begin(path, header())
    await journal.append(request(index=5), conversation())
    journal.close()
    records, size = read_journal(path)
    found = [r.sample_index for r in records if isinstance(r, Conversation)]
    assert found == [0, 1, 5] and size == path.stat().st_size


def test_nothing_behind_a_damaged_record_is_used(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal_with(path, 1)
    end_of_first = path.stat().st_size
    journal_with(path, 2)
    content = bytearray(path.read_bytes())
    content[end_of_first + 20] ^= 1
    path.write_bytes(content)
    assert [type(record) for record in read_journal(path)[0]] == [Header, Conversation]


@pytest.mark.parametrize("change", [{"config": "x"}, {"files": "x"}, {"parameters": None}])
def test_a_journal_of_something_else_is_begun_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "j"
    journal_with(path, 1)
    Journal.begin(path, header(**change)).close()
    assert [type(record) for record in read_journal(path)[0]] == [Header]
    path.write_text("something else")
    Journal.begin(path, header()).close()
    assert read_journal(path)[0] == [header()]


def test_outcomes_are_compared_to_the_last_bit() -> None:
    first = Outcome(parameters="a", metrics={"x": 0.1, "y": float("nan"), "z": 0.0})
    assert first.differences(Outcome(parameters="a", metrics=dict(first.metrics))) == []
    other = Outcome(parameters="b", metrics={"x": np.nextafter(0.1, 1), "z": -0.0, "w": 1.0})
    assert sorted(first.differences(other)) == ["parameters", "w", "x", "y", "z"]


@pytest.fixture
def journals(tmp_path: Path) -> Journals:
    config = load_config(["model.path=m", f"trainer.default_local_dir={tmp_path}"])
    made = Journals(config, {})
    for step in (1, 2, 3):
        made.begin(step, None).end(Outcome(parameters=None, metrics={}))
    made.begin(4, None)
    yield made
    made.close()


def steps(journals: Journals) -> list[int]:
    return sorted(int(path.name[5:]) for path in journals.folder.iterdir())


def test_a_step_that_did_not_end_or_is_another_is_followed_by_none(journals: Journals) -> None:
    assert steps(journals) == [1, 2, 3, 4]
    assert journals.begin(2, None).outcome and steps(journals) == [1, 2, 3, 4]
    journals.begin(3, "other parameters")
    assert steps(journals) == [1, 2, 3]
    journals.forget(2)
    assert steps(journals) == [3]
    journals.clear()
    assert steps(journals) == []


def test_a_run_has_begun_when_its_first_step_fits(journals: Journals) -> None:
    assert journals.has_begun(None) and not journals.has_begun("other parameters")
    journals.forget(1)
    assert not journals.has_begun(None)


def test_a_digest_changes_with_what_matters(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    rubric = f"reward.reward_kwargs={{rubric: {'Be fair. ' * 100}}}"  # names no file
    settings = ["model.path=m", f"data.train_files=[{rows}]", rubric]
    config = load_config(settings)
    elsewhere = ["trainer.experiment_name=x", "trainer.save_freq=3", "rollout.agent.num_workers=2"]
    same = load_config(
        [*settings, *elsewhere, "rollout.trace=null", "rollout.val_kwargs.temperature=0.5"]
    )
    assert config_digest(config) == config_digest(same)
    for change in ("trainer.seed=1", "rollout.temperature=0.5", "actor.optim.lr=1", "rollout.n=3"):
        assert config_digest(config) != config_digest(load_config([*settings, change]))
    before = files_digest(config)
    assert before == files_digest(same)
    rows.write_text("{}\n{}\n")
    assert before != files_digest(config)


def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config([f"model.path={tmp_path}"])
    before = files_digest(config)
    (tmp_path / "pytorch_model.bin").symlink_to("gone")
    assert files_digest(config) == before
