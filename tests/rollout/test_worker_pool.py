import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, serving

from minirl.config import Config, load_config
from minirl.rollout import worker_pool
from minirl.rollout.manager import AgentLoopManager
from minirl.rollout.modes import Pace
from minirl.rollout.parts import load_parts, make_router
from minirl.rollout.server import EngineLostError
from minirl.rollout.worker import LocalWorker, Workers
from minirl.rollout.worker_pool import WorkerLostError, WorkerPool, open_pool
from minirl.testing import ScriptedServer, byte_tokenizer
from minirl.types import TokenOutput, Trajectory
from minirl.waits import WAITS

TOKENIZER = byte_tokenizer()


class SeededEngine(ScriptedEngine):
    """Calls the tool a number of times that the seed decides, then answers by it."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(ScriptedServer(TOKENIZER, self.reply, delay_s=delay_s))
        self.seeds: dict[str, int] = {}
        self.hold: asyncio.Event | None = None
        self.num_cancelled = 0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        self.seeds[request_id.rpartition("#")[0]] = sampling_params["seed"]
        try:
            return await super().generate(prompt_ids, sampling_params, request_id)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def reply(self, request_id: str, turn: int, prompt_ids: list[int]) -> str:
        seed = self.seeds[request_id]
        if self.hold and turn == 1:
            await self.hold.wait()
        if turn < 1 + seed % 2:
            call = {"name": "echo", "arguments": {"text": str(seed)}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return f"#### {seed}"


@dataclass
class Rollout:
    manager: AgentLoopManager
    workers: Workers
    engine: SeededEngine

    @property
    def pool(self) -> WorkerPool:
        assert isinstance(self.workers, WorkerPool)
        return self.workers


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "notes").mkdir()
    tools = [{"class_name": "worker_user:EchoTool", "config": {"notes": str(folder / "notes")}}]
    (folder / "tools.yaml").write_text(json.dumps({"tools": tools}))
    return folder


def make_config(project: Path, num_workers: int, *overrides: str) -> Config:
    return load_config(
        [
            f"model.path={project}/model",
            "data.max_prompt_length=512",
            "rollout={n: 2, response_length: 1024, max_failure_fraction: 0.5}",
            f"rollout.agent={{num_workers: {num_workers}}}",
            "rollout.agent.default_agent_loop=worker_user:UserLoop",
            f"rollout.multi_turn.tool_config_path={project}/tools.yaml",
            "reward.custom_reward_function={path: worker_user, name: compute_score}",
            f"trainer.default_local_dir={project}",
            *overrides,
        ]
    )


@asynccontextmanager
async def open_rollout(
    project: Path, num_workers: int, *overrides: str, delay_s: float = 0.0
) -> AsyncIterator[Rollout]:
    config = make_config(project, num_workers, *overrides)
    engine = SeededEngine(delay_s)
    async with serving(engine, project / f"e{num_workers}") as client:
        if num_workers:
            async with open_pool(config, [client], project) as pool:
                yield Rollout(AgentLoopManager(config, pool, [client]), pool, engine)
        else:
            router = make_router(config.rollout.agent, [client])
            pace = Pace(router)
            local = LocalWorker(load_parts(config).make_worker(config, pace), router, pace)
            yield Rollout(AgentLoopManager(config, local, [client]), local, engine)


def prompts(number: int, **columns: Any) -> list[dict[str, Any]]:
    return [
        {
            "uid": f"0-{i}",
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "reward_model": {"ground_truth": [Decimal("1.50"), date(2024, 2, i + 1), (i, None)]},
            **columns,
        }
        for i in range(number)
    ]


ROWS = [*prompts(5), {**prompts(6)[5], "fails": True}]


def comparable(trajectory: Trajectory) -> dict[str, Any]:
    """All but what depends on time or process."""
    values = {name: getattr(trajectory, name) for name in Trajectory.__slots__}
    calls = [(c.turn, c.name, c.arguments, c.result, c.status) for c in values.pop("tool_calls")]
    turns = [(t.finish_reason, t.num_cached_tokens) for t in values.pop("turns")]
    rewards = [(r.name, r.value) for r in values.pop("rewards")]
    assert values.pop("start") < values.pop("end")
    metrics = {k: v for k, v in values.pop("metrics").items() if not k.endswith(("_s", "seconds"))}
    error = values.pop("error")
    last_line = error and error.splitlines()[-1]
    compared = {"calls": calls, "turns": turns, "rewards": rewards, "metrics": metrics}
    return {**values, **compared, "error": last_line}


def processes(log_names: str) -> list[int]:
    """Worker processes that write to such a log file."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and log_names in _stderr_of(folder):
            found.append(int(folder.name))
    return found


def _stderr_of(folder: Path) -> str:
    try:
        return os.readlink(folder / "fd" / "2")
    except OSError:
        return ""


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def rolled_out(project: Path) -> dict[int, tuple[list[Trajectory], dict[str, float]]]:
    """By number of workers: the trajectories and the manager's metrics."""

    async def roll_out(num_workers: int) -> tuple[list[Trajectory], dict[str, float]]:
        async with open_rollout(project, num_workers, delay_s=0.005) as rollout:
            trajectories = await rollout.manager.generate_sequences(ROWS, step=3)
            if num_workers:
                assert len(processes(str(project))) == num_workers
            return trajectories, rollout.manager.metrics

    return {n: asyncio.run(roll_out(n)) for n in (0, 1, 2)}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_same_trajectories_as_in_rank_0(rolled_out: Any, num_workers: int) -> None:
    expected, trajectories = rolled_out[0][0], rolled_out[num_workers][0]
    assert [(t.uid, t.sample_index) for t in trajectories] == [
        (row["uid"], k) for row in ROWS for k in range(2)
    ]
    assert [comparable(t) for t in trajectories] == [comparable(t) for t in expected]
    assert {t.num_turns for t in trajectories} == {0, 2, 3}
    done = [t for t in trajectories if not t.error]
    assert [t.ground_truth for t in done] == [
        row["reward_model"]["ground_truth"] for row in ROWS[:5] for _ in range(2)
    ]
    assert all(t.reward == len(repr(t.ground_truth)) for t in done)


def test_an_error_in_a_worker_is_its_trajectorys(rolled_out: Any) -> None:
    failed = [t for t in rolled_out[2][0] if t.error]
    assert [(t.uid, t.termination, t.reward) for t in failed] == [("0-5", "error", None)] * 2
    for trajectory in failed:
        assert re.search(r'worker_user\.py", line \d+, in run\n', trajectory.error)
        assert trajectory.error.endswith("ZeroDivisionError: planted in 0-5\n")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_workers_count_is_summed(rolled_out: Any, num_workers: int) -> None:
    expected, metrics = rolled_out[0][1], rolled_out[num_workers][1]
    assert metrics.keys() == expected.keys()
    turns = sum(t.num_turns for t in rolled_out[0][0])
    assert metrics["rollout/requests/server_0"] == expected["rollout/requests/server_0"] == turns
    assert metrics["rollout/worker_restarts"] == 0


def test_tools_are_released_and_closed_in_the_worker(rolled_out: Any, project: Path) -> None:
    notes = {
        int(path.name): path.read_text().splitlines() for path in (project / "notes").iterdir()
    }
    assert sum(words.count("create") for words in notes.values()) == 3 * 10
    for words in notes.values():
        assert words.count("release") == words.count("create")
    del notes[os.getpid()]
    assert len(notes) == 3
    for words in notes.values():
        assert words.count("create") >= 3 and words[-2:] == ["no vllm", "aclose"]
        assert words.count("aclose") == 1


def test_no_process_and_no_socket_is_left(rolled_out: Any, project: Path) -> None:
    assert processes(str(project)) == []
    assert not list(project.glob("worker_*"))


async def test_killed_workers(
    project: Path,
    rolled_out: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_DEATHS", 2)
    monkeypatch.setattr(worker_pool, "DEATHS_WINDOW_S", 3600.0)
    with pytest.raises(ExceptionGroup) as caught:
        async with open_rollout(project, 2) as rollout:
            await in_the_middle(rollout, rolled_out[0][0], lambda: kill(rollout, 0))
            assert rollout.manager.metrics["rollout/worker_restarts"] == 1
            assert "agent-loop worker 0 was killed by SIGKILL; it is started again" in caplog.text
            await rollout.manager.generate_sequences(ROWS[:1], step=4)
            assert rollout.manager.metrics["rollout/worker_restarts"] == 0  # of this one alone
            await cancellation(rollout)
            await rollout.pool.ready()
            kill(rollout, 0), kill(rollout, 1)
            await asyncio.sleep(180)
    cause = worker_pool.WorkerLostError
    assert caught.group_contains(
        cause, match=r"3 deaths of workers within 3600 s are too many; see .*\.log"
    )
    assert processes(str(project)) == []


async def in_the_middle(
    rollout: Rollout, expected: list[Trajectory], disturb: Callable[[], Any]
) -> None:
    """Roll out, and disturb when all conversations are in their second turn."""
    rollout.engine.hold = asyncio.Event()
    running = asyncio.create_task(rollout.manager.generate_sequences(ROWS, step=3))
    await eventually(lambda: rollout.engine.num_running == 10)
    disturb()
    # what the dead one asked the engine for is given up, and asked for again by the other
    await eventually(lambda: rollout.engine.num_cancelled == 6)  # of every other prompt
    await eventually(lambda: rollout.engine.num_running == 10)
    rollout.engine.hold.set()
    trajectories = await running
    assert [comparable(t) for t in trajectories] == [comparable(t) for t in expected]


async def test_a_stopped_worker_is_replaced(
    project: Path,
    rolled_out: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that does not notice that it is to end."""
    monkeypatch.setattr(worker_pool, "MAX_DEATHS", 99)  # a busy machine may stop some, too
    monkeypatch.setattr(worker_pool, "CLOSE_S", 0.5)
    async with open_rollout(project, 2, "rollout.agent.worker_timeout_s=4") as rollout:
        rollout.engine.hold = asyncio.Event()
        running = asyncio.create_task(rollout.manager.generate_sequences(ROWS, step=3))
        await eventually(lambda: rollout.engine.num_running == 10)
        kill(rollout, 0, signal.SIGSTOP)
        await eventually(lambda: "worker 0 was killed by SIGKILL; it is started" in caplog.text)
        said = "agent-loop worker 0 has not answered for 4 s (rollout.agent.worker_timeout_s) and"
        assert said in caplog.text
        rollout.engine.hold.set()
        trajectories = await running
        expected = rolled_out[0][0]
        assert [comparable(t) for t in trajectories] == [comparable(t) for t in expected]
        await rollout.pool.ready()
        kill(rollout, 1, signal.SIGSTOP)
    assert processes(str(project)) == []


async def cancellation(rollout: Rollout) -> None:
    """It reaches the engine through the worker."""
    rollout.engine.hold = asyncio.Event()
    running = asyncio.create_task(rollout.manager.generate_sequences(ROWS, step=3))
    await eventually(lambda: rollout.engine.num_running == 10)
    assert not rollout.engine.aborted
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: len(rollout.engine.aborted) == 10)


def kill(rollout: Rollout, index: int, number: int = signal.SIGKILL) -> None:
    [pid] = processes(str(rollout.pool.slots[index].log_file))
    os.kill(pid, number)


async def test_a_worker_that_cannot_start_says_why(project: Path) -> None:
    loop = "rollout.agent.default_agent_loop=worker_refuser:RefuserLoop"
    name = "trainer.experiment_name=refused"
    log_file = make_config(project, 1, name).trainer.run_dir / "logs" / "worker_0.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as file:
        file.write(b"of a tool's program: \xff\n")  # no text
    with pytest.raises(ExceptionGroup) as caught:
        async with open_rollout(project, 1, loop, name):
            raise AssertionError("not reached")
    words = r"worker 0 ended with status 1 before it was ready: .*no license for a second process"
    assert caught.group_contains(WorkerLostError, match=words)


async def test_what_workers_say_comes_together(
    project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "NEWS_INTERVAL_S", 0.01)
    async with open_rollout(project, 1, "rollout.stall_warning_s=0.3") as rollout:
        rollout.engine.hold = asyncio.Event()
        rows = prompts(1, warns=True, blocks=True)
        with WAITS.explained(0.3):
            running = asyncio.create_task(rollout.manager.generate_sequences(rows, step=3))
            await eventually(lambda: "2 for generation on engine 0: 0-0/0 (" in caplog.text)
            rollout.engine.hold.set()
            await running
        assert rollout.manager.metrics["rollout/loop_lag_max_s"] > 0.5
        rollout.engine.is_dead = True
        with pytest.raises(ExceptionGroup) as caught:
            await rollout.manager.generate_sequences(rows, step=3)
        lost = "agent-loop worker 0: engine 0: the engine died"
        assert caught.group_contains(EngineLostError, match=lost)
    assert "agent-loop worker 0: look at 0-0\n" in caplog.text
    blocked = "1 for agent-loop worker 0, whose event loop is blocked: all of its conversations ("
    assert blocked in caplog.text
    log = (project / "minirl" / "logs" / "worker_0.log").read_text()
    assert "WARNING minirl.user: look at 0-0\n" in log


PARENT = """
import asyncio, sys
from pathlib import Path
import test_worker_pool as tests

async def main():
    async with tests.open_rollout(Path(sys.argv[1]), 2):
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def session_of(folder: Path) -> int:
    """Of the process with this folder in /proc."""
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return 0


def test_no_process_outlives_a_parent_that_was_killed(project: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", PARENT, project],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )

    def in_session() -> list[Path]:
        numbered = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        return [folder for folder in numbered if session_of(folder) == script.pid]

    assert script.stdout
    assert script.stdout.readline() == b"ready\n"
    assert len(processes(str(project))) == 2
    assert len(in_session()) >= 4  # and what imports for them
    script.kill()
    script.wait()
    deadline = time.monotonic() + 120
    while in_session() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert in_session() == []
