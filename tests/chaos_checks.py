"""What must hold after a chaotic rollout: of every trajectory, of the tools, of this process."""

import asyncio
import gc
import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
from chaos_engine import TOKENIZER, Script

from minirl.agent_loop import AgentLoopBase, derive_seed
from minirl.config import Config
from minirl.metrics import trajectory_metrics
from minirl.testing import ScriptedServer
from minirl.tools import ToolSession
from minirl.types import ToolCallRecord, Trajectory
from minirl.waits import WAITS

OK = {"say", "hang_on", "block", "flood", "binary", "forge", "bytes"}
CUT = {"aborted", "turn_length", "response_length", "error"}
"""Reasons to end within a turn; `error`, when what there was of the answer could not be scored."""
NAME = re.compile(r"c\d+c")


def check_results(
    config: Config,
    rows: list[dict[str, Any]],
    step: int,
    trajectories: list[Trajectory],
    write: Callable[[int], Script] = Script,
) -> None:
    """Every prompt has its results, in order, and each is what its seed asks for."""
    n = config.rollout.n
    by_key = {
        key: list(group) for key, group in groupby(trajectories, lambda t: (t.uid, t.sample_index))
    }
    assert list(by_key) == [(row["uid"], index) for row in rows for index in range(n)]
    assert sum(map(len, by_key.values())) == len(trajectories)
    for row in rows:
        for index in range(n):
            stretches = by_key[row["uid"], index]
            assert len(stretches) <= 1 + (row["fates"].get(str(index)) == "rewrite")
            script = script_of(config, step, stretches[0], write)
            check_conversation(row, script, stretches)
    limits = {"response_length": 9, "max_prompt_length": 9}
    shares = trajectory_metrics(trajectories, **limits).result()
    reasons = [v for k, v in shares.items() if k.startswith("agent_loop/termination/")]
    assert sum(reasons) == pytest.approx(1) and len(reasons) == 11


def script_of(
    config: Config, step: int, first: Trajectory, write: Callable[[int], Script]
) -> Script:
    """What the policy was to say: by the prompt's seed, not the engine's; of the attempt kept."""
    seed = derive_seed(config.trainer.seed, step, first.uid, first.sample_index)
    retries = config.rollout.max_retries if config.rollout.on_failure == "retry" else 0
    seeds = [seed, *(derive_seed(seed, "retry", attempt + 1) for attempt in range(retries))]
    scripts = [write(derive_seed(s, 0, 0)) for s in seeds]
    said = TOKENIZER.decode(first.response_ids[: first.turn_ends[0]] if first.turn_ends else [])
    fitting = [s for s in scripts if (s.text(0) + "<|im_end|>").startswith(said)]
    assert fitting
    return fitting[-1]


def check_conversation(row: dict[str, Any], script: Script, stretches: list[Trajectory]) -> None:
    asked = 0
    for trajectory in stretches:
        check_tokens(trajectory)
        check_turns(trajectory, script, asked)
        check_calls(trajectory, script.me, row["extra_info"]["tools_kwargs"]["chaos"])
        check_outcome(trajectory)
        asked += trajectory.num_turns
        asked += script.fate == "abort_at_once" and asked == script.fate_turn


def check_tokens(t: Trajectory) -> None:
    """Lengths and masks; only what was sampled has a log-probability; the last turn is sampled."""
    assert len(t.response_ids) == len(t.response_mask) == len(t.response_logprobs) <= 1400
    assert len(t.turn_ends) == len(t.turn_rewards) == len(t.weight_versions)
    assert (t.turn_ends[-1] if t.turn_ends else 0) == len(t.response_ids)
    logprobs = [
        ScriptedServer.logprob(token) if mask else 0.0
        for token, mask in zip(t.response_ids, t.response_mask, strict=True)
    ]
    assert t.response_logprobs == logprobs


def check_turns(t: Trajectory, script: Script, asked: int) -> None:
    """What was sampled is what the script said; what lies between is the results of its calls."""
    start = 0
    for number, end in enumerate(t.turn_ends):
        mask = t.response_mask[start:end]
        begin = start + (mask.index(1) if 1 in mask else 0)
        assert t.response_mask[start:end] == [0] * (begin - start) + [1] * (end - begin)
        assert bool(number) == (begin > start)
        if number:
            check_observation(t, number - 1, t.response_ids[start:begin])
        said, whole = TOKENIZER.decode(t.response_ids[begin:end]), script.text(asked + number)
        is_cut = number == t.num_turns - 1 and t.termination in CUT
        assert said == whole + "<|im_end|>" or (is_cut and whole.startswith(said))
        assert end - begin <= 600
        start = end
    assert t.num_turns <= 6


def check_observation(t: Trajectory, turn: int, token_ids: list[int]) -> None:
    results = "".join(
        f"\n<tool_response>\n{record.result}\n</tool_response>"
        for record in t.tool_calls
        if record.turn == turn
    )
    text = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(token_ids) == text
    assert token_ids.count(TOKENIZER.eos_token_id) == 1  # what a tool forged is no control token


def check_calls(t: Trajectory, me: str, fates: dict[str, Any]) -> None:
    """Each call has the status of its deed, and no result came from another conversation."""
    for record in t.tool_calls:
        assert record.status in statuses(record, fates), record
        assert set(NAME.findall(record.result)) <= {me}, record
        assert len(TOKENIZER.encode(record.result)) <= 40
        if record.status == "ok" and record.name == "chaos":
            assert record.result.startswith(me)
    run = [record for record in t.tool_calls if record.status != "not_run"]
    assert len(run) <= 9
    assert max(Counter(record.turn for record in run).values(), default=0) <= 3
    assert sum(t.turn_rewards) == 0.25 * sum(
        record.status == "ok" and record.name == "chaos" for record in run
    )


def statuses(record: ToolCallRecord, fates: dict[str, Any]) -> set[str]:
    """Those that a call may have. On a busy machine any call may come too late."""
    if record.name not in ("chaos", "thread") or "do" not in (record.arguments or ""):
        late = {"ok", "error", "timeout"} if record.name.startswith("mcp_") else set()
        return {"unknown_tool", "malformed", "bad_arguments", "not_run"} | late
    do = json.loads(record.arguments)["do"]
    possible = {"timeout", "not_run"}
    if record.name == "chaos" and fates.get("create_kwargs"):
        possible.add("error")
    if do == "hang":
        return possible
    return possible | {"ok" if do in OK else "error"}


def check_outcome(t: Trajectory) -> None:
    """A reason, and beside it a reward or an error."""
    assert t.termination
    assert (t.error is not None) == (t.termination in ("error", "timeout"))
    assert t.error is None or t.error.startswith(("Traceback", "  + Exception Group"))
    if t.error is None and t.num_turns:
        assert t.reward is not None
    if t.error is not None:
        assert t.reward is None


def notes_of(folder: Path) -> dict[int, list[list[str]]]:
    """By process, what its tools have noted: (what, instance)."""
    return {
        int(file.name): [line.split() for line in file.read_text().splitlines()]
        for file in folder.iterdir()
        if file.name.isdigit()
    }


def check_releases(folder: Path, *, at_least: int) -> None:
    """Every tool that was created was released, once."""
    notes = list(chain.from_iterable(notes_of(folder).values()))
    created = sorted(instance for what, instance in notes if what == "create")
    assert len(created) == len(set(created)) >= at_least
    assert sorted(instance for what, instance in notes if what == "release") == created


def check_nothing_is_left(tasks: set[Any]) -> None:
    """`tasks` are those that ran before; nothing of a rollout whose results are gone is alive."""
    gc.collect()
    assert asyncio.all_tasks() <= tasks
    kinds = (Trajectory, ToolSession, AgentLoopBase, ToolCallRecord)
    assert [o for o in gc.get_objects() if issubclass(type(o), kinds)] == []
    assert WAITS.report(0.0) == ""
