"""Thousands of conversations in which everything goes wrong at once, and what must hold then."""

import asyncio
import gc
import json
import logging
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import chaos_user
import psutil
import pytest
from chaos_checks import check_nothing_is_left, check_releases, check_results, notes_of
from chaos_engine import MCP_TOOLS, TOKENIZER, ChaosEngine, Script, name_of
from scripted_engine import serving

from minirl.agent_loop import derive_seed
from minirl.config import Config, load_config
from minirl.rollout.client import AsyncLLMServerManager
from minirl.rollout.manager import AgentLoopManager, TooManyFailuresError, groups_for_training
from minirl.rollout.modes import Pace
from minirl.rollout.parts import load_parts, make_router
from minirl.rollout.server import EngineLostError
from minirl.rollout.worker import LocalWorker
from minirl.rollout.worker_pool import Slot, WorkerPool, open_pool
from minirl.tools import mcp_session
from minirl.types import Trajectory

N = 3
SEED = 20  # another one is another chaos
SOCKETS = count()


@dataclass
class Rollout:
    manager: AgentLoopManager
    engines: list[ChaosEngine]
    router: AsyncLLMServerManager | None = None
    pool: WorkerPool | None = None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("c")
    TOKENIZER.save_pretrained(folder / "model")
    gc.collect()
    gc.freeze()  # what is imported need not be looked through again and again
    yield folder
    gc.unfreeze()
    chaos_user.END_OF_TEST.set()


def make_config(
    project: Path, notes: Path, *overrides: str, tools: Sequence[dict[str, Any]] = ()
) -> Config:
    entries = [
        *tools,
        {"class_name": "chaos_user:ChaosTool", "config": {"notes": str(notes)}},
        {"class_name": "chaos_user:thread"},
    ]
    (notes / "tools.yaml").write_text(json.dumps({"tools": entries}))
    return load_config(
        [
            f"model.path={project}/model",
            "data.max_prompt_length=2048",
            f"rollout={{n: {N}, response_length: 1400, max_failure_fraction: 1}}",
            "rollout.agent.default_agent_loop=chaos_user:ChaosLoop",
            "rollout.agent.max_sticky_sessions=100",
            f"rollout.multi_turn={{tool_config_path: {notes}/tools.yaml, tool_timeout_s: 1.5}}",
            "rollout.multi_turn={max_tool_response_length: 40, max_tokens_per_turn: 600}",
            "rollout.multi_turn={max_user_turns: 5, max_tool_calls: 9, max_parallel_calls: 3}",
            "rollout.multi_turn.stop_when='stop here'",
            "reward.custom_reward_function={path: chaos_user, name: compute_score}",
            f"trainer={{default_local_dir: {notes}, seed: {SEED}}}",
            *overrides,
        ]
    )


@asynccontextmanager
async def open_rollout(
    config: Config, write: Callable[[int], Script] = Script
) -> AsyncIterator[Rollout]:
    folder = Path(config.trainer.default_local_dir)
    scripts: dict[str, Script] = {}
    engines = [ChaosEngine(scripts, delay_s=delay, write=write) for delay in (0.0, 0.02)]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(serving(engine, folder / f"s{next(SOCKETS)}"))
            for engine in engines
        ]
        if config.rollout.agent.num_workers:
            pool = await stack.enter_async_context(open_pool(config, clients, folder))
            yield Rollout(AgentLoopManager(config, pool, clients), engines, pool=pool)
        else:
            router = make_router(config.rollout.agent, clients)
            pace, parts = Pace(router), load_parts(config)
            for tool in parts.tools.values():
                stack.push_async_callback(tool.aclose)
            local = LocalWorker(parts.make_worker(config, pace), router, pace)
            yield Rollout(AgentLoopManager(config, local, clients), engines, router)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest would keep what the tracebacks in it hold."""
    monkeypatch.setattr(logging.getLogger("minirl.tools.session"), "disabled", True)


async def test_thousands_of_conversations(project: Path, tmp_path: Path) -> None:
    """The second rollout has no more memory at its end than at its beginning."""
    config = make_config(project, tmp_path)
    async with open_rollout(config) as rollout:
        await rollout.manager.sleep(1)  # so that all connections are at work
        tasks = asyncio.all_tasks()
        for step, number in ((1, 600), (2, 40)):
            rows = chaos_user.make_rows(number, SEED + step)
            trajectories = await rollout.manager.generate_sequences(rows, step=step)
            print(f"seed {SEED}:", Counter(t.termination for t in trajectories))
            check_results(config, rows, step, trajectories)
            del trajectories
            rollout.engines[0].scripts.clear()
            check_nothing_is_left(tasks)
            assert rollout.router
            assert not any(rollout.router._load.values()) and len(rollout.router._sessions) <= 100
            if step == 1:
                tracemalloc.start()
        now, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert now < 1e6 < 3e6 < peak
    check_releases(tmp_path, at_least=500)


@pytest.mark.parametrize("on_failure", ["retry", "mask", "drop_group", "raise"])
async def test_what_failures_do(project: Path, tmp_path: Path, on_failure: str) -> None:
    policy = f"rollout.on_failure={on_failure}"
    config = make_config(project, tmp_path, policy, "rollout.max_retries=1")
    rows = [{**row, "fates": {}} for row in chaos_user.make_rows(16, SEED)]
    async with open_rollout(config, partial(Script, hangs=False)) as rollout:
        if on_failure == "raise":
            with pytest.raises(TooManyFailuresError, match=r"of 48 trajectories failed"):
                await rollout.manager.generate_sequences(rows, step=1)
        else:
            trajectories = await rollout.manager.generate_sequences(rows, step=1)
            check_results(config, rows, 1, trajectories, partial(Script, hangs=False))
            check_groups(rows, trajectories, on_failure)
        first = {name_of_first_turn(config, row, index) for row in rows for index in range(N)}
        again = {script.me for script in rollout.engines[0].scripts.values()} - first
        assert bool(again) == (on_failure == "retry")
    check_releases(tmp_path, at_least=16)


def name_of_first_turn(config: Config, row: dict[str, Any], index: int) -> str:
    return name_of(derive_seed(derive_seed(config.trainer.seed, 1, row["uid"], index), 0, 0))


def check_groups(rows: list[Any], trajectories: list[Trajectory], on_failure: str) -> None:
    """What trains has a reward; what failed is left out, or takes its group with it."""
    drops = on_failure == "drop_group"
    failed = {(t.uid, t.sample_index) for t in trajectories if t.error}
    assert 0 < len(failed) < len(trajectories) / 2
    groups = groups_for_training(rows, trajectories, num_wanted=N if drops else 0)
    trained = {(t.uid, t.sample_index) for group in groups for t in group.trajectories}
    assert all(t.reward is not None for group in groups for t in group.trajectories)
    uids = {uid for uid, _ in failed} if drops else set()
    sampled = {(t.uid, t.sample_index) for t in trajectories if t.num_turns}
    assert trained == {key for key in sampled - failed if key[0] not in uids}


async def test_a_cancelled_rollout_leaves_nothing(project: Path, tmp_path: Path) -> None:
    config = make_config(project, tmp_path)
    async with open_rollout(config) as rollout:
        await rollout.manager.sleep(1)
        tasks, hold = asyncio.all_tasks(), asyncio.Event()
        for engine in rollout.engines:
            engine.hold = hold
        work = rollout.manager.generate_sequences(chaos_user.make_rows(60, SEED), step=1)
        running = asyncio.create_task(work)
        await until(lambda: sum(engine.num_held for engine in rollout.engines) > 40)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        del running, work
        await rollout.manager.sleep(1)  # behind the aborts on the same sockets
        assert sum(len(engine.aborted) for engine in rollout.engines) >= 40
        hold.set()
        await until(lambda: not any(engine.num_running for engine in rollout.engines))
        check_nothing_is_left(tasks)
    check_releases(tmp_path, at_least=30)


async def test_a_lost_engine_leaves_nothing(project: Path, tmp_path: Path) -> None:
    config = make_config(project, tmp_path)
    async with open_rollout(config) as rollout:
        await rollout.manager.sleep(1)
        tasks = asyncio.all_tasks()
        rollout.engines[1].hold = asyncio.Event()
        work = rollout.manager.generate_sequences(chaos_user.make_rows(60, SEED), step=1)
        running = asyncio.create_task(work)
        await until(lambda: rollout.engines[1].num_held > 10)
        rollout.engines[1].is_dead = True
        rollout.engines[1].hold.set()
        with pytest.raises(ExceptionGroup) as caught:
            await running
        assert caught.group_contains(EngineLostError, match="engine 0: the engine died")
        await until(lambda: not any(engine.num_running for engine in rollout.engines))
        assert asyncio.all_tasks() <= tasks
    check_releases(tmp_path, at_least=20)


async def test_tools_die_with_their_server(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MCP server that the policy ends again and again; then it lets it live."""
    monkeypatch.setattr(mcp_session, "MAX_STARTS", 99)
    server = str(Path(__file__).parent / "tools" / "mcp_server.py")
    settings = {"command": [sys.executable, server, "stdio"], "prefix": "mcp_"}
    settings["tools"] = ["echo", "fail", "picture", "die"]
    entry = {"class_name": "minirl.tools.mcp:MCPTool", "config": settings}
    config = make_config(project, tmp_path, "rollout.multi_turn.tool_timeout_s=30", tools=[entry])
    rows = [{**row, "fates": {}} for row in chaos_user.make_rows(8, SEED)]
    told = []
    async with open_rollout(config) as rollout:
        for step, deadly in ((1, True), (2, False)):
            write = partial(Script, hangs=False, mcp=MCP_TOOLS | ({} if deadly else {"die": 0}))
            for engine in rollout.engines:
                engine.write = write
            trajectories = await rollout.manager.generate_sequences(rows, step=step)
            check_results(config, rows, step, trajectories, write)
            calls = [call for t in trajectories for call in t.tool_calls]
            told.append(Counter((call.name, call.status) for call in calls))
    assert told[0]["mcp_die", "error"] and not told[0]["mcp_die", "ok"]
    assert told[1]["mcp_echo", "ok"] and not told[1]["mcp_fail", "ok"]
    check_releases(tmp_path, at_least=5)


async def test_killed_workers(project: Path, tmp_path: Path) -> None:
    """What a killed process held goes with it: of its tools nobody calls `release`.

    Its conversations begin again elsewhere; whatever they create there is released.
    """
    config = make_config(project, tmp_path, "rollout.agent.num_workers=2")
    rows = chaos_user.make_rows(50, SEED)
    killed = []
    async with open_rollout(config, partial(Script, hangs=False)) as rollout:
        assert rollout.pool
        hold = asyncio.Event()
        for engine in rollout.engines:
            engine.hold = hold
        work = rollout.manager.generate_sequences(rows, step=1)
        running = asyncio.create_task(work)
        for slot, enough in zip(rollout.pool.slots, (30, 12), strict=True):
            await until(lambda n=enough: sum(e.num_held for e in rollout.engines) > n)
            killed.append(kill(slot))
            for engine in rollout.engines:
                engine.num_held = 0
        hold.set()
        trajectories = await running
        assert rollout.manager.metrics["rollout/worker_restarts"] == 2
        check_results(config, rows, 1, trajectories, partial(Script, hangs=False))
    notes = notes_of(tmp_path)
    lost = [process for process in killed if process in notes]
    assert lost
    for process in lost:
        whats = Counter(what for what, _ in notes[process])
        assert whats["release"] < whats["create"]
        (tmp_path / str(process)).unlink()
    check_releases(tmp_path, at_least=20)


def kill(slot: Slot) -> int:
    """The process of a worker, which is gone."""
    [process] = [p for p in psutil.process_iter() if slot_of(p) == str(slot.log_file)]
    process.kill()
    return process.pid


def slot_of(process: psutil.Process) -> str:
    """The log file that a worker process writes to."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/2")
    except OSError:
        return ""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
