"""The benchmark of serial, sync and async rollout: what it draws, attributes, bounds and writes."""

import asyncio
import heapq
import html
import json
import math
import re
import sys
import time
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from benchmarks.async_vs_sync import figures
from benchmarks.async_vs_sync.__main__ import benchmark
from benchmarks.async_vs_sync.agent import PlannedLoop, WaitTool
from benchmarks.async_vs_sync.bound import EngineSpeed, bound, greedy
from benchmarks.async_vs_sync.rollouts import Turnstile, least_read, newly_read
from benchmarks.async_vs_sync.sampling import Device
from benchmarks.async_vs_sync.settings import (
    FOLDER,
    STEP_ARMS,
    TEMPLATE_TOKENS,
    Case,
    check_lengths,
    check_run,
    load_settings,
    load_workload,
    make_model,
    write_run,
)
from benchmarks.async_vs_sync.steps import write_rows
from benchmarks.async_vs_sync.timeline import CAUSES, WORKING, Conversation, attribute, per_bucket
from benchmarks.async_vs_sync.workload import Distribution, Plan, Turn, Workload
from minirl.agent_loop import run_agent_loop
from minirl.config import Config, ConfigError, load_config
from minirl.inputs import read_inputs
from minirl.launch import SOCKETS
from minirl.rollout.manager import TooManyFailuresError
from minirl.rollout.server import ServerStats
from minirl.testing import ScriptedServer, byte_tokenizer, make_context
from minirl.types import TokenOutput, Trajectory
from minirl.waits import CONVERSATION


def parse(value: Any, folder: Path = Path()) -> Distribution:
    return Distribution.parse(value, "tool_s", folder)


@pytest.mark.parametrize(
    ("given", "mean", "deviation"),
    [
        (0.5, 0.5, 0.0),
        ({"constant": 2}, 2.0, 0.0),
        ({"exponential": 0.3}, 0.3, 0.3),
        ({"lognormal": 0.3, "sigma": 0.5}, 0.3, 0.3 * math.sqrt(math.exp(0.25) - 1)),
    ],
)
def test_distributions_have_their_moments(given: Any, mean: float, deviation: float) -> None:
    random, same = np.random.default_rng(0), np.random.default_rng(0)
    values = [parse(given).draw(random) for _ in range(20_000)]
    assert values[:9] == [parse(given).draw(same) for _ in range(9)]
    assert np.mean(values) == pytest.approx(mean, rel=0.02)
    assert np.std(values) == pytest.approx(deviation, rel=0.05)


def test_a_tail_is_cut_before_it_is_scaled() -> None:
    random = np.random.default_rng(0)
    heavy = parse({"lognormal": 1, "sigma": 2, "max": 5})
    values = [heavy.draw(random, scale=0.1) for _ in range(1000)]
    assert max(values) == 0.5 and min(values) < 0.05


@pytest.mark.parametrize(
    "text", ["0.5\n2\n", '{"tool_calls": [{"seconds": 0.5}, {"seconds": 2}], "uid": "3"}\n']
)
def test_a_trace_is_what_was_recorded(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    trace = parse({"trace": "trace.jsonl"}, tmp_path)
    random = np.random.default_rng(0)
    assert {trace.draw(random) for _ in range(50)} == {0.5, 2.0}


def test_of_a_long_trace_only_what_is_drawn_is_read() -> None:
    read = []

    class Recorded:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> float:
            read.append(index)
            return ([0.5] * 100)[index]

    recorded: Any = Recorded()
    assert Distribution("trace", recorded=recorded).draw(np.random.default_rng(0)) == 0.5
    assert len(read) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (-1, "tool_s.constant: got -1; must be a number"),
        ({"lognormal": "much"}, "tool_s.lognormal: got 'much'"),
        ({"log_normal": 1}, "tool_s.log_normal: no such key; did you mean 'lognormal'"),
        ({"max": 1}, "name one of constant, exponential"),
        ({"constant": 1, "sigma": 2}, "tool_s.sigma: got 2; lognormal alone has one"),
        ({"trace": "none.txt"}, "tool_s.trace: got 'none.txt'; there is no file"),
        ({"trace": "bad.txt"}, "bad.txt: line 2: got 'soon'"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(tmp_path: Path, given: Any, words: str) -> None:
    (tmp_path / "bad.txt").write_text("1\nsoon\n")
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(given, tmp_path)


def workload(**given: Any) -> Workload:
    return Workload(**{"name": "w", "about": "", "turns": 3, "prompt_tokens": 9} | given)


def test_a_conversation_is_the_same_among_few_and_many() -> None:
    drawn = workload(response_tokens={"exponential": 20}, tool_s={"exponential": 1})
    assert drawn.draw(50, seed=1)[:3] == drawn.draw(3, seed=1) != drawn.draw(3, seed=2)
    for plan in drawn.draw(3, seed=1):
        assert [turn.tool_s is None for turn in plan.turns] == [False, False, True]


def test_short_prompts_differ_too() -> None:
    rows = [plan((1, None), prompt=3).row("u", salt) for salt in range(300, 900)]
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)


def test_shares_of_slow_and_failing_calls() -> None:
    plans = workload(
        response_s=0.1, tool_s=1, slow_share=0.2, slow_factor=4, failing_share=0.1
    ).draw(2000, seed=0, token_s=0.01, latency_scale=0.5)
    calls = [turn for plan in plans for turn in plan.turns if turn.tool_s is not None]
    assert {turn.response_tokens for turn in calls} == {10}
    assert {turn.tool_s for turn in calls} == {0.5, 2.0}
    assert np.mean([turn.tool_s == 2 for turn in calls]) == pytest.approx(0.2, abs=0.02)
    assert np.mean([turn.fails for turn in calls]) == pytest.approx(0.1, abs=0.02)


def talk(start: float, *states: tuple[str, float]) -> Conversation:
    """One that goes through `states` for so many seconds each."""
    spans: dict[str, list[tuple[float, float]]] = {WORKING: [], "tools": [], "held": [], "": []}
    now = start
    for state, seconds in states:
        spans[state].append((now, now + seconds))
        now += seconds
    del spans[""]  # code of rank 0
    tokens = [1] * len(spans[WORKING])
    return Conversation(
        start=start,
        end=now,
        generating=spans[WORKING],
        tools=spans["tools"],
        held=spans["held"],
        tokens=tokens,
    )


GENERATE, TOOL = (WORKING, 1.0), ("tools", 5.0)


def spent(conversations: list[Conversation], start: float, end: float) -> dict[str, float]:
    found = attribute(conversations, start, end)
    return {cause: seconds for cause, seconds in found.items() if seconds}


def test_one_after_another_waits_for_tools() -> None:
    talks = [talk(7.0 * i, GENERATE, TOOL, GENERATE) for i in range(8)]
    assert spent(talks, 0, 56) == {WORKING: 16, "tools": 40}


def test_at_once_they_share_the_engine_and_the_wait() -> None:
    talks = [talk(0.0, GENERATE, TOOL, GENERATE) for _ in range(8)]
    assert spent(talks, 0, 7) == {WORKING: 2, "tools": 5}


def test_a_barrier_waits_for_the_slowest_tool() -> None:
    quick = talk(0.0, GENERATE, ("tools", 1.0), ("held", 4.0), GENERATE)
    slow = talk(0.0, GENERATE, TOOL, GENERATE)
    assert spent([quick, slow], 0, 7) == {WORKING: 2, "tools": 1, "barrier": 4}


def test_the_last_quarter_is_the_tail() -> None:
    talks = [talk(0.0, GENERATE) for _ in range(6)]
    talks += [talk(0.0, GENERATE, ("tools", 2.0), GENERATE), talk(0.0, GENERATE, TOOL, GENERATE)]
    # from 1 to 2 and 4 to 6 two and one are left of eight
    assert spent(talks, 0, 7) == {WORKING: 3, "tail": 4}


def test_code_of_rank_0_is_the_driver_and_so_is_what_is_around_the_conversations() -> None:
    first = talk(1.0, ("", 0.5), GENERATE, ("", 0.25), TOOL, GENERATE)
    second = talk(1.5, GENERATE, TOOL)
    assert spent([first, second], 0, 10) == {WORKING: 2, "driver": 1.5 + 0.25 + 1.25, "tools": 5}


def test_the_trainer_beside_an_idle_engine_is_no_wait() -> None:
    talks = [talk(0.0, GENERATE, TOOL, GENERATE) for _ in range(8)]
    found = attribute(talks, 0, 7, trainer=[(0.5, 3.0)])
    assert {cause: s for cause, s in found.items() if s} == {WORKING: 2, "trainer": 2, "tools": 3}


def test_the_engine_works_for_what_is_aborted_too() -> None:
    talks = [talk(0.0, GENERATE, TOOL, GENERATE) for _ in range(8)]
    found = attribute(talks, 0, 7, aborted=[(0.5, 2.0), (3.0, 4.0)])
    assert {cause: s for cause, s in found.items() if s} == {WORKING: 4, "tools": 3}


async def test_turns_that_are_cut_off_were_in_the_engine() -> None:
    began, asked = asyncio.Event(), time.perf_counter()

    class Server:
        async def generate(self, *_: Any, **__: Any) -> TokenOutput:
            began.set()
            return await asyncio.get_running_loop().create_future()

    async def converse() -> None:
        CONVERSATION.set("0/4")
        await turnstile.generate("request", prompt_ids=[1], sampling_params={})

    turnstile = Turnstile(Server())
    task = asyncio.create_task(converse())
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    [(start, end)] = turnstile.generating["0/4"]
    assert task.cancelled() and asked <= start <= end <= time.perf_counter()


def test_the_samples_of_a_prompt_differ(tmp_path: Path) -> None:
    """Else there is nothing that over-sampling could make shorter."""
    write_rows(load_settings(FOLDER / "cpu.yaml"), 4, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    plans = [plan for row in rows for plan in row["extra_info"]["plans"]]
    assert len(rows) == 4 and len(plans) == 4 * 5  # over_sample_rate is a quarter
    assert len({plan["turns"][0]["tool_s"] for plan in plans}) == len(plans)


STATES = st.lists(st.tuples(st.sampled_from([WORKING, "tools", "held", ""]), st.floats(0, 3)))
TALKS = st.lists(st.builds(lambda start, states: talk(start, *states), st.floats(-1, 5), STATES))


@settings(max_examples=100)
@given(TALKS, st.floats(0.1, 12))
def test_causes_add_up_to_the_time(talks: list[Conversation], end: float) -> None:
    found = attribute(talks, 0.0, end)
    assert sum(found.values()) == pytest.approx(end)
    assert min(found.values()) >= 0
    spans = [span for c in talks for span in c.generating]
    cuts = sorted({0.0, end, *(t for span in spans for t in span if 0 < t < end)})
    worked = sum(b - a for a, b in pairwise(cuts) if any(s <= (a + b) / 2 < e for s, e in spans))
    assert found[WORKING] == pytest.approx(worked)


def test_the_timeline_has_every_second_once() -> None:
    talks = [talk(0.0, GENERATE, TOOL, GENERATE), talk(0.5, GENERATE, ("tools", 2.0))]
    buckets = per_bucket(talks, 0.0, 7.0, 1.0)
    assert len(buckets) == 7
    assert [b[WORKING] for b in buckets] == [1.5, 0.5, 0, 0, 0, 0, 1]
    assert sum(b["tools"] for b in buckets) == pytest.approx(7.0)
    assert sum(b["tokens"] for b in buckets) == pytest.approx(3.0)


SPEED = EngineSpeed(step_s={1: 0.01, 2: 0.012, 4: 0.016}, prefill_token_s=0.001, request_s=0.003)


def plan(*turns: tuple[int, float | None], prompt: int = 100, observation: int = 0) -> Plan:
    return Plan(prompt, tuple(Turn(n, tool_s, observation) for n, tool_s in turns))


def test_the_longest_chain_bounds() -> None:
    """Alone: prompt 0.103 s, tokens 0.1 s, tool 2 s, observation 0.053 s, tokens 0.2 s."""
    found = bound([plan((10, 2.0), (20, None), observation=50), plan((1, None))], SPEED)
    assert found.seconds == found.chain_s == pytest.approx(2.456)
    assert found.work_s == pytest.approx(31 * 0.006 + 0.259)
    assert found.pipeline_s == pytest.approx(10 * 0.006 + 0.103 + 2.253)


def test_the_work_bounds() -> None:
    """Four at once have 0.004 s per token."""
    found = bound([plan((100, None), prompt=0)] * 4, SPEED)
    assert found.chain_s == pytest.approx(1.003)
    assert found.seconds == pytest.approx(found.work_s) == pytest.approx(1.612)


def test_work_before_the_tools_bounds() -> None:
    """All first turns (0.172 s) have to be over before the last tool begins (0.5 s, 0.103 s)."""
    found = bound([plan((10, 0.5), (10, None), prompt=0)] * 4, SPEED)
    assert (found.chain_s, found.work_s) == pytest.approx((0.706, 0.344))
    assert found.pipeline_s == pytest.approx(0.775)


def test_work_before_the_tools_of_unequal_conversations_bounds() -> None:
    """Three first turns (0.129 s) come before the last of their tools begins; one is short."""
    talks = [plan((10, 0.5), (10, None), prompt=0)] * 3 + [plan((1, 0.0), (1, None), prompt=0)]
    found = bound(talks, SPEED)
    assert found.seconds == found.pipeline_s == pytest.approx(0.129 + 0.5 + 0.103)


def least_makespan(number: int, turns: tuple[int, int], tool: int, speed: EngineSpeed) -> int:
    """In ms, of so many equal conversations of two turns, by a search through all schedules: in
    each step any of those that are ready, or none until the next tool has answered."""
    ms = {n: round(1e3 * speed.step_of(n)) for n in range(1, number + 1)}
    prompt, last = round(1e3 * speed.request_s), sum(turns)
    start = ((0, 0),) * number  # tokens so far and what is left of the tool, of each
    shortest, heap = {start: 0}, [(0, start)]
    while heap:
        now, state = heapq.heappop(heap)
        if all(done == last for done, _ in state):
            return now
        if now > shortest[state]:
            continue
        ready = [i for i, (done, wait) in enumerate(state) if not wait and done < last]
        waits = [wait for _, wait in state if wait]
        moves = [chosen for size in range(1, number + 1) for chosen in combinations(ready, size)]
        for chosen in [*moves, *([()] if waits else [])]:
            begin = sum(state[i][0] in (0, turns[0]) for i in chosen)
            passed = ms[len(chosen)] + prompt * begin if chosen else min(waits)
            after = [(done, max(wait - passed, 0)) for done, wait in state]
            for i in chosen:
                done = state[i][0] + 1
                after[i] = (done, tool if done == turns[0] else 0)
            following = tuple(sorted(after))
            if now + passed < shortest.get(following, math.inf):
                shortest[following] = now + passed
                heapq.heappush(heap, (now + passed, following))
    raise AssertionError


@pytest.mark.parametrize(
    ("steps", "prompt", "tool"),
    [
        ({1: 10, 4: 10}, 0, 40),  # a step takes as long for four: all together
        ({1: 10, 4: 25}, 0, 40),
        ({1: 10, 4: 25}, 4, 25),
        ({1: 10, 2: 18, 4: 38}, 3, 60),  # next to nothing is shared: one after another
        ({1: 3, 4: 30}, 2, 60),
        ({1: 10, 2: 16, 4: 20}, 0, 0),
    ],
)
@pytest.mark.parametrize("turns", [(1, 1), (2, 2), (3, 1)])
def test_no_schedule_beats_the_bound(
    steps: dict[int, int], prompt: int, tool: int, turns: tuple[int, int]
) -> None:
    speed = EngineSpeed(
        step_s={n: ms / 1e3 for n, ms in steps.items()},
        prefill_token_s=0.0,
        request_s=prompt / 1e3,
    )
    plans = [plan((turns[0], tool / 1e3), (turns[1], None))] * 4
    best, found = least_makespan(4, turns, tool, speed) / 1e3, bound(plans, speed)
    assert 0.8 * best < found.seconds <= best + 1e-9
    assert best <= greedy(plans, speed) + 1e-9


def test_conversations_that_share_steps_bound() -> None:
    """As thin as `fixed > N each` makes it, all together is best: the bound is what that takes."""
    speed = EngineSpeed(step_s={1: 0.010, 8: 0.0135}, prefill_token_s=0.0, request_s=0.0)
    plans = [plan((10, 0.5), (5, None))] * 8
    found = bound(plans, speed)
    assert found.seconds == found.shared_s == pytest.approx(0.5 + 15 * 0.0135)
    longer = [*plans[:7], plan((11, 0.5), (5, None))]
    assert bound(longer, speed).shared_s == pytest.approx(found.shared_s)  # by the shortest


def test_what_the_engine_read_is_what_its_cache_did_not_hold() -> None:
    trajectory, evicted = talk_with_cache(32), talk_with_cache(0)
    assert newly_read(trajectory) == [40, 40 + 5 + 7 - 32]
    assert least_read([trajectory, evicted]) == [40, 20]
    assert plan((5, 0.1), (3, None)).reading([40, 20]).new_tokens == [40, 20]


def talk_with_cache(second: int) -> Trajectory:
    """Two turns, and what the prefix cache held at the second."""
    trajectory = Trajectory(prompt_ids=[1] * 40)
    for sampled, cached in ((5, 0), (3, second)):
        trajectory.append_sampled(
            TokenOutput(
                token_ids=[2] * sampled,
                logprobs=[-1.0] * sampled,
                finish_reason="stop",
                num_cached_tokens=cached,
            )
        )
        if trajectory.num_turns == 1:
            trajectory.append_observation([3] * 7)
    return trajectory


def test_greedy_decodes_what_it_may() -> None:
    """Together 2 steps of 0.012 s; then one waits 0.5 s for its tool, then 3 steps of 0.01 s; each
    of the three requests adds 0.003 s."""
    plans = [plan((2, 0.5), (3, None), prompt=0), plan((2, None), prompt=0)]
    assert greedy(plans, SPEED) == pytest.approx(0.024 + 0.5 + 0.03 + 0.009)
    with_prompts = [replace(p, prompt_tokens=100) for p in plans]
    assert greedy(with_prompts, SPEED) == pytest.approx(0.024 + 0.2 + 0.5 + 0.03 + 0.009)


TURNS = st.lists(st.tuples(st.integers(1, 12), st.floats(0, 0.5)), min_size=1, max_size=4)


@settings(max_examples=100)
@given(
    st.lists(st.builds(lambda turns: plan(*turns, observation=9), TURNS), min_size=1, max_size=4)
)
def test_nothing_beats_the_bound(plans: list[Plan]) -> None:
    assert bound(plans, SPEED).seconds <= greedy(plans, SPEED) + 1e-9


def test_everything_that_comes_with_it_can_be_run(tmp_path: Path) -> None:
    for name in ("cpu", "gpu"):
        loaded = load_settings(FOLDER / f"{name}.yaml")
        path = write_run(loaded, tmp_path, tmp_path / "model", tmp_path / "rows.jsonl")
        cases = [replace(c, conversations=[8]) for c in loaded.cases + loaded.full]
        check_lengths(cases, loaded, load_config([str(path)]))
    assert {p.stem for p in FOLDER.glob("workloads/*.yaml")} == {c.workload for c in loaded.cases}


@pytest.mark.parametrize("given", ["over_sample_rate=0.5", "agent.num_workers=2"])
def test_what_the_arms_do_not_have_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"^rollout.{given.split('=')[0]}: got "):
        check_run(load_config(["model.path=none", f"rollout.{given}"]))


def test_only_what_has_several_sizes_grows() -> None:
    sizes = [("a", 8), ("b", 8), ("b", 9), ("c", 8)]
    cases: Any = [SimpleNamespace(workload=name, conversations=n) for name, n in sizes]
    assert figures.grown(cases) == ["b"]
    assert figures.grown([cases[0], cases[0]]) == []


def test_the_bar_of_a_mode_is_as_long_as_its_time() -> None:
    idle = dict.fromkeys(CAUSES, 0.0)
    runs = [
        {"seconds": 2.0, "generating_s": 2.0 - tail, "idle_s": idle | {"tail": tail}}
        for tail in (0.0, 0.5, 0.6)
    ]
    runs[1] = runs[1] | {"generating_s": 0.5, "idle_s": idle | {"tail": 0.5, "tools": 1.0}}
    bars = figures.spent([("async", runs)], "rollouts").axes[0].patches
    assert sum(bar.get_width() for bar in bars if bar.get_height()) == pytest.approx(1)


CASES = [{"workload": "search", "conversations": [8]}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repetitons": 2}, "repetitons"),
        ({"cases": CASES, "repetitions": 0}, "repetitions: got 0; at least 1"),
        ({"cases": [{**CASES[0], "repetitions": -1}]}, "repetitions: got -1; at least 1"),
        ({}, "cases: got []; name a workload"),
        ({"cases": [{"workload": "serch", "conversations": [8]}]}, "no 'serch'; there are code"),
        ({"cases": [{"workload": "search", "conversations": []}]}, "conversations: got []"),
        (
            {"cases": [{"workload": "search", "conversations": [8], "modes": ["asinc"]}]},
            "modes: got 'asinc'; of serial, sync, async",
        ),
        (
            {"cases": [{"workload": "search", "conversations": [8, 9], "modes": ["serial"]}]},
            "modes: got ['serial']; nothing is run with 9 conversations",
        ),
        ({"cases": CASES, "full": CASES}, "search with 8 conversations: got 2; name it once"),
        ([], "mine.yaml: Cannot merge"),
        (3, "mine.yaml: Invalid loaded object type: int"),
        ({"cases": CASES, "seed": -1}, "seed: got -1; 0 or more"),
        ({"cases": CASES, "steps": {"prompts": 0}}, "search: prompts: got 0; at least 1"),
        (
            {"cases": CASES, "steps": {"over_sample_rate": -0.5}},
            "over_sample_rate: got -0.5; 0 or more",
        ),
        (
            {"cases": CASES, "steps": {"workload": "textbook"}},
            "response_s: got 0.1; give response_tokens",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    given = {"model": {}, "run": {}} | change if isinstance(change, dict) else change
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"shape": "debug", "dtype": "float"}, "model.dtype: got 'float'; one of float32, bf"),
        ({"shape": "debug", "hidden_size": 64}, "model: got ['hidden_size']; shape says it all"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(
    tmp_path: Path, model: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where random models are kept
    loaded = replace(load_settings(FOLDER / "cpu.yaml"), model=model)
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_model(loaded, tmp_path)


def test_a_workload_with_a_wrong_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("about: x\nturns: 1\nprompt_tokens: 9\nresponse_token: 3\n")
    with pytest.raises(ConfigError, match="response_token: no such key; did you mean 'response_t"):
        load_workload(str(path))


def test_a_conversation_that_is_too_long_is_told_before_an_engine_starts() -> None:
    config = load_config(["model.path=none", "rollout.response_length=64"])
    loaded = load_settings(FOLDER / "cpu.yaml")
    with pytest.raises(ConfigError, match=r"rollout\.response_length: got 64; a conv"):
        check_lengths(loaded.cases, loaded, config)
    with pytest.raises(ConfigError, match=r"max_model_len: got 192; the engine's speed .* of 256"):
        check_lengths([], loaded, replace(config, data=replace(config.data, max_prompt_length=128)))


def test_prompts_are_as_long_as_was_checked(tmp_path: Path) -> None:
    """The tool's schema is in none of them: it would be hundreds of tokens."""
    loaded, rows = load_settings(FOLDER / "cpu.yaml"), tmp_path / "rows.jsonl"
    path = write_run(loaded, tmp_path, make_model(loaded, tmp_path), rows)
    config = load_config([str(path), f"data.max_prompt_length={32 + TEMPLATE_TOKENS}"])
    check_lengths([Case(workload="search", conversations=[8])], loaded, config)
    write_rows(loaded, config.rollout.n, rows)
    assert len(read_inputs(config).train_rows) == 4


def test_a_prompt_before_responses_of_some_time_is_checked_too() -> None:
    loaded = load_settings(FOLDER / "cpu.yaml")
    config = load_config(["model.path=none", f"data.max_prompt_length={15 + TEMPLATE_TOKENS}"])
    with pytest.raises(
        ConfigError, match=r"data\.max_prompt_length: got \d+; a conv.* of textbook"
    ):
        check_lengths([Case(workload="textbook", conversations=[8])], loaded, config)


@pytest.mark.parametrize("given", [{}, {"seed": 5}])
async def test_a_conversation_has_seeds_where_the_run_gives_them(given: dict[str, int]) -> None:
    server = ScriptedServer(byte_tokenizer(), ["abcdef"])
    row = {"raw_prompt": [{"role": "user", "content": "x"}], "uid": "u", "sample_index": 0}
    row["extra_info"] = {"plans": [{"turns": [{"response_tokens": 3}]}]}
    [trajectory] = await run_agent_loop(PlannedLoop(make_context(server)), given, row)
    assert trajectory.error is None and len(trajectory.response_ids) == 3
    assert [r.sampling_params.keys() & {"seed"} for r in server.requests] == [given.keys()]


async def test_a_tool_says_all_that_is_planned(tmp_path: Path) -> None:
    loaded = load_settings(FOLDER / "gpu.yaml")
    run = write_run(loaded, tmp_path, tmp_path / "model", tmp_path / "rows.jsonl")
    [trajectory] = await hold(plan((3, 0.0), (3, None), observation=3000), str(run))
    assert [call.result for call in trajectory.tool_calls] == ["." * 3000]


async def test_a_conversation_that_is_not_too_long_is_held(tmp_path: Path) -> None:
    given = {"turns": 10, "prompt_tokens": 9, "response_tokens": 1, "failing_share": 1}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"about": ""} | given))
    case = Case(workload=f"{tmp_path}/mine.yaml", conversations=[1])
    loaded = replace(load_settings(FOLDER / "cpu.yaml"), steps=None)
    limits = [f"rollout.response_length={10 + 10 * TEMPLATE_TOKENS}"]
    limits += [f"data.max_prompt_length={9 + TEMPLATE_TOKENS}"]
    check_lengths([case], loaded, load_config(["model.path=none", *limits]))
    [planned] = case.load().draw(1, seed=0)
    [trajectory] = await hold(planned, *limits)
    assert trajectory.error is None and trajectory.num_turns == 10


async def hold(planned: Plan, *overrides: str) -> list[Trajectory]:
    """The conversation, over a scripted engine."""
    server = ScriptedServer(byte_tokenizer(), ["......"] * len(planned.turns))
    context = make_context(server, tools=[WaitTool({})], overrides=overrides)
    row = planned.row("u", 0) | {"sample_index": 0}
    return await run_agent_loop(PlannedLoop(context), {}, row | {"raw_prompt": row["prompt"]})


class PacedEngine(ScriptedEngine):
    """Samples as many tokens as it is asked for, in half a millisecond each."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__(ScriptedServer(byte_tokenizer(), []))
        self.busy_s = 0.0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        if not self.num_running:
            self.began = time.perf_counter()
        self.num_running += 1
        length = sampling_params["max_tokens"]
        await asyncio.sleep(length * 5e-4)
        self.num_running -= 1
        self.busy_s += 0.0 if self.num_running else time.perf_counter() - self.began
        token = 65 + sampling_params["seed"] % 2
        return TokenOutput(
            token_ids=[token] * length, logprobs=[-1.0] * length, finish_reason="length"
        )

    async def stats(self) -> ServerStats:
        return ServerStats(num_running=self.num_running, busy_s=self.busy_s)


RUN = {
    "model": {"dtype": "float32"},
    "rollout": {"name": f"{__name__}:PacedEngine", "n": 2, "sync_check": None},
    "trainer": {"device": "cpu"},
}


@pytest.fixture(scope="module")
async def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole benchmark over a scripted engine: what it left."""
    folder = tmp_path_factory.mktemp("benchmark")
    short = {
        "about": "<short>",
        "turns": 3,
        "prompt_tokens": 8,
        "response_tokens": {"lognormal": 6, "sigma": 0.3},
        "observation_tokens": 4,
        "tool_s": {"lognormal": 0.03, "sigma": 0.8},
        "failing_share": 0.2,
    }
    (folder / "short.yaml").write_text(yaml.safe_dump(short))
    given = {
        "model": {},
        "run": RUN,
        "repetitions": 2,
        "cases": [
            {"workload": f"{folder}/short.yaml", "conversations": [2, 6], "serial_up_to": 2},
            {
                "workload": f"{folder}/short.yaml",
                "conversations": [2],
                "turns": 1,
                "repetitions": 1,
                "modes": ["async"],
            },
        ],
        "steps": {"workload": f"{folder}/short.yaml", "prompts": 2, "arms": STEP_ARMS[1:]},
    }
    await run_benchmark(folder, given)
    return folder


async def run_benchmark(folder: Path, given: dict[str, Any]) -> None:
    (folder / "mine.yaml").write_text(yaml.safe_dump(given))
    loaded = load_settings(folder / "mine.yaml")
    write_rows(loaded, 2, folder / "rows.jsonl")
    model = make_model(loaded, folder)
    config = load_config([str(write_run(loaded, folder, model, folder / "rows.jsonl"))])
    try:
        await benchmark(loaded, loaded.cases, folder, False, config)
    finally:
        SOCKETS.remove()


async def test_a_case_that_fails_takes_none_of_the_others_with_it(tmp_path: Path) -> None:
    for name, seconds in (("short", 0.002), ("long", 60)):
        short = {"about": "", "turns": 1, "prompt_tokens": 8, "response_s": seconds}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(short))
    cases = [
        {"workload": f"{tmp_path}/{name}.yaml", "conversations": [1]} for name in ("short", "long")
    ]
    with pytest.raises(ExceptionGroup) as caught:
        await run_benchmark(tmp_path, {"model": {}, "run": RUN, "repetitions": 1, "cases": cases})
    assert caught.group_contains(TooManyFailuresError, match="its plan is longer than")
    results = json.loads((tmp_path / "results.json").read_text())
    assert [case["workload"] for case in results["cases"]] == ["short"]


def test_all_modes_are_measured_and_the_causes_add_up(measured: Path) -> None:
    results = json.loads((measured / "results.json").read_text())
    assert [case["conversations"] for case in results["cases"]] == [2, 6, 2]
    assert results["cases"][2]["workload"] == "short, 1 turns"
    assert [list(c["modes"]) for c in results["cases"]] == [
        ["serial", "sync", "async"],
        ["sync", "async"],
        ["async"],
    ]
    assert [list(c["engine"]["step_s"]) for c in results["cases"]] == [
        ["1", "2"],
        ["1", "4", "6"],
        ["1", "2"],
    ]
    for case in results["cases"]:
        assert all(seconds > 0 for seconds in case["engine"]["step_s"].values())
        tokens = [[r["tokens"] for r in m["repetitions"]] for m in case["modes"].values()]
        assert len(tokens[0]) == (1 if "1 turns" in case["workload"] else 2)
        assert all(t == tokens[0] for t in tokens)  # the same work
        for mode, found in case["modes"].items():
            for row in found["repetitions"]:
                parts = row["generating_s"] + sum(row["idle_s"].values())
                assert parts == pytest.approx(row["seconds"], rel=0.01)
                assert mode == "sync" or not row["idle_s"]["barrier"]
                assert row["last_trajectory_s"] <= row["seconds"]
            assert 0 < found["efficiency"]["min"] <= found["of_greedy"]["min"] + 1e-9
            assert len(found["samples"]) >= 2
            sampled = sum(b["tokens"] for b in found["timeline"])
            assert sampled == pytest.approx(found["repetitions"][-1]["tokens"])
    held = [r["idle_s"]["barrier"] for r in results["cases"][1]["modes"]["sync"]["repetitions"]]
    assert max(held) > 0  # six conversations, two rounds of tools that differ


def test_steps_are_measured_whole(measured: Path) -> None:
    steps = json.loads((measured / "results.json").read_text())["steps"]
    assert steps["conversations"] == 4 and list(steps["figures"]) == STEP_ARMS[1:]
    for mode, rows in steps["figures"].items():
        assert len(rows) == 2
        for row in rows:
            idle = row["idle_s"]
            assert row["generating_s"] + sum(idle.values()) == pytest.approx(row["seconds"])
            phases = row["phases_s"]
            trainer = ("reward", "old_log_prob", "adv", "update_actor")
            alone = sum(phases[name] for name in trainer)
            early = idle["trainer"] - alone
            assert early == pytest.approx(0) or (mode == "in_tail" and early > 0)
            assert (
                min(idle.values()) >= 0 and idle["sync"] > 0 and row["rollout_s"] < row["seconds"]
            )
            assert mode == "sync" or not idle["barrier"]


def test_the_page_needs_nothing_else(measured: Path) -> None:
    page = (measured / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 6  # idle, growth, steps, three timelines
    assert not re.search(r"<(script|img|link|iframe)|@import|src=|url\((?!#)", page)
    assert not re.search(r'(?<!xlink:)href="(?!#)', page)
    assert "&lt;short&gt;" in page and "<short>" not in page
    for name in ("idle", "growth", "steps", "timeline_short_6", "timeline_short_1_turns_2"):
        assert (measured / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for name, words in CAUSES.items():
        assert f"<dt>{name}</dt><dd>{html.escape(words)}</dd>" in page


def test_a_gpu_is_read_without_another_package(monkeypatch: Any) -> None:
    from vllm.third_party import pynvml

    found = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda uuid: SimpleNamespace(gpu=len(uuid)),
        "nvmlDeviceGetPowerUsage": lambda uuid: 350_000,
    }
    for name, function in found.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # nvidia-ml-py is not installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    assert Device().read() == {"gpu_utilization": 0.07, "gpu_power_w": 350.0}
