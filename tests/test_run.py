import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from scripted_engine import ScriptedEngine
from scripted_run import make_config, make_project, scripted_run

from minirl import run, train
from minirl.config import Config, ConfigError, load_config
from minirl.distributed import Dist
from minirl.launch import TrainerThread, run_command
from minirl.rollout.vllm_server import VLLMServer
from minirl.testing import ScriptedServer
from minirl.tools import BaseTool


async def test_no_engine_draws_what_another_one_draws(monkeypatch: Any) -> None:
    """For requests without seeds of their own (rollout.seeded_sampling=false)."""
    seeds = []

    def make(config: Config, **placement: Any) -> ScriptedEngine:
        seeds.append(VLLMServer(config, **placement)._engine_arguments()["seed"])
        return ScriptedEngine(ScriptedServer(None, []))

    monkeypatch.setattr(run, "SERVERS", SimpleNamespace(find=lambda name: make))
    config = load_config(["model.path=x"])
    async with AsyncExitStack() as stack:
        for rank in (0, 1, 0):
            world = Dist(rank=rank, world_size=2, local_rank=rank, device=torch.device("cpu"))
            await run._start_engine(config, world, TrainerThread(), stack)
    assert seeds[0] == seeds[2] != seeds[1]


async def test_on_a_cpu_the_trainers_thread_has_the_cores_to_itself(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Its own and libgomp's: a thread more than cores, and every operation would take longer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    setting = ("rollout.name=transformers", "trainer.deterministic=false")
    config = make_config(make_project(tmp_path), "threads", *setting)
    try:
        async with run.open_run(config) as opened:
            assert await opened.on_trainer(torch.get_num_threads) == 3
            assert torch.get_num_threads() == 1
            assert await asyncio.to_thread(torch.get_num_threads) == 1
            names = {thread.name for thread in threading.enumerate()}
            assert "trainer_0" in names and not any("engine" in name for name in names)
        assert torch.get_num_threads() == 3  # as it was told at the start
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("world_size", [1, 2])
async def test_an_engine_of_several_ranks_does_not_wait_for_their_trainers(
    world_size: int, monkeypatch: Any
) -> None:
    """A trainer waits for the others, of which one may wait for what this engine generates."""
    given = []

    def make(config: Config, **placement: Any) -> ScriptedEngine:
        given.append(placement["executor"])
        return ScriptedEngine(ScriptedServer(None, []))

    monkeypatch.setattr(run, "SERVERS", SimpleNamespace(find=lambda name: make))
    world = Dist(rank=0, world_size=world_size, local_rank=0, device=torch.device("cpu"))
    on_trainer = TrainerThread()
    async with AsyncExitStack() as stack:
        await run._start_engine(load_config(["model.path=x"]), world, on_trainer, stack)
    assert given == [on_trainer.executor if world_size == 1 else None]


class Endless(BaseTool):
    """Is never closed."""

    schema: ClassVar = {"type": "function", "function": {"name": "endless"}}

    async def execute(self, *_: Any, **kwargs: Any) -> Any: ...

    async def aclose(self) -> None:
        await asyncio.Event().wait()


async def test_a_tool_that_hangs_when_it_is_closed_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(run, "TOOL_CLOSE_S", 0.05)
    project = make_project(tmp_path)
    (project / "tools.yaml").write_text("tools: [{class_name: 'test_run:Endless'}]")
    config = make_config(
        project, "endless", f"data.val_files=[{project}/rows.jsonl]",
        f"rollout.multi_turn.tool_config_path={project}/tools.yaml",
    )  # fmt: skip
    async with asyncio.timeout(120), scripted_run(config, training=False):
        pass
    assert "tool 'endless' was not closed within 0.05 s" in caplog.text


LOCKS = """import fcntl, pathlib, sys
path = pathlib.Path(sys.argv[1])
path.parent.mkdir(parents=True)
with path.open("a") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """By another process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LOCKS, str(file)], **pipes) as other:
        assert other.stdout and other.stdout.readline() == b"locked\n"
        yield
        other.communicate()


async def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    config = make_config(make_project(tmp_path), "taken")
    log_file = config.trainer.run_dir / "logs" / "rank_0.log"
    refused = pytest.raises(ConfigError, match=r"experiment_name: .*/taken is that of a run that")
    with locked(log_file), refused:
        async with scripted_run(config):
            pass
    async with scripted_run(config):
        pass


async def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    config = make_config(make_project(tmp_path), "x", f"trainer.default_local_dir={__file__}")
    with pytest.raises(ConfigError, match=r"_dir: .*/x/logs/rank_0.log cannot be written: Not a d"):
        async with scripted_run(config):
            pass


def train_as(rank: int, port: int, config: Config) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (str(rank), "2", "127.0.0.1", str(port))
    os.environ.update(zip(names, values, strict=True))
    run_command(lambda _: train.main(config), ["model.path=unused"], usage="")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
@pytest.mark.parametrize("rank", [0, 1], ids=["that_reads", "that_waits_for_it"])
def test_a_signal_ends_a_rank_while_the_inputs_are_read(
    tmp_path: Path, forkserver: ForkServerContext, rank: int, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reached:
        port = reached.getsockname()[1]
        lines = "import socket, time", f"socket.create_connection(('127.0.0.1', {port}))"
        (tmp_path / "reward.py").write_text("\n".join([*lines, "time.sleep(3600)"]))
        reward = f"reward.custom_reward_function.path={tmp_path}/reward.py"
        config = make_config(make_project(tmp_path), "reading", reward)
        process = forkserver.Process(target=train_as, args=(rank, port, config), daemon=True)
        process.start()
        assert process.pid is not None
        reached.settimeout(120)
        with reached.accept()[0]:  # rank 0 reads, or rank 1 asks where rank 0 is
            os.kill(process.pid, number)
            process.join(120)
    assert process.exitcode == -number


async def test_what_is_said_of_the_inputs_is_in_the_log(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    file = project / "rows.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    row["prompt"][0]["content"] *= 200
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    config = make_config(
        project, "logged", f"data.val_files=[{file}]", "data.filter_overlong_prompts=true"
    )
    async with scripted_run(config, training=False):
        pass
    log = (config.trainer.run_dir / "logs" / "rank_0.log").read_text()
    assert "dropped 1 of 13 prompts" in log
