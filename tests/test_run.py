import json
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from scripted_engine import ScriptedEngine
from scripted_run import make_config, make_project, scripted_run

from minirl import run
from minirl.config import Config, load_config
from minirl.distributed import Dist
from minirl.rollout.vllm_server import VLLMServer
from minirl.testing import ScriptedServer


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
            await run._start_engine(config, world, stack)
    assert seeds[0] == seeds[2] != seeds[1]


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
