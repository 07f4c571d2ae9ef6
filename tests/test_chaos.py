"""Thousands of conversations in which everything goes wrong at once, and what must hold after it."""

import asyncio
import gc
import json
import logging
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import chaos_user
import pytest
pytest.register_assert_rewrite("chaos_checks")
from chaos_checks import check_nothing_is_left, check_releases, check_results
from chaos_engine import TOKENIZER, ChaosEngine, Script
from scripted_engine import serving

from minirl.agent_loop import derive_seed
from minirl.config import Config, load_config
from minirl.metrics import trajectory_metrics
from minirl.rollout.client import AsyncLLMServerManager
from minirl.rollout.manager import AgentLoopManager
from minirl.rollout.modes import Pace
from minirl.rollout.parts import load_parts, make_router
from minirl.rollout.worker import LocalWorker
from minirl.rollout.worker_pool import WorkerPool, open_pool
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
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    TOKENIZER.save_pretrained(folder / "model")
    return folder


def make_config(project: Path, notes: Path, *overrides: str) -> Config:
    tools = [
        {"class_name": "chaos_user:ChaosTool", "config": {"notes": str(notes)}},
        {"class_name": "chaos_user:thread"},
    ]
    (notes / "tools.yaml").write_text(json.dumps({"tools": tools}))
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




async def test_thousands_of_conversations(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rollout has no more memory at its end than at its beginning."""
    log = logging.getLogger("minirl.tools.session")
    monkeypatch.setattr(log, "disabled", True)  # pytest would keep what the tracebacks hold
    config = make_config(project, tmp_path)
    async with open_rollout(config) as rollout:
        await rollout.manager.sleep(1)  # so that all connections are at work
        tasks = asyncio.all_tasks()
        for step, number in ((1, 640), (2, 60)):
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
        print(now, peak)
        assert now < 1e6 < 5e6 < peak
    check_releases(tmp_path, at_least=700)
