"""Whole runs over a scripted engine: all but the engine and its weights is what a user runs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine

from minirl.config import Config, load_config
from minirl.launch import SOCKETS
from minirl.run import Run, open_run
from minirl.steps import Steps
from minirl.testing import ScriptedServer, byte_tokenizer, tiny_model
from minirl.types import TokenOutput

TOKENIZER = byte_tokenizer()


class SeededEngine(ScriptedEngine):
    """Answers two thirds of the sampled prompts, by their seed, and greedily every even one."""

    last: "SeededEngine"

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__(ScriptedServer(TOKENIZER, self.reply))
        self.params: dict[str, dict[str, Any]] = {}
        SeededEngine.last = self

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        self.params[request_id.rpartition("#")[0]] = sampling_params
        return await super().generate(prompt_ids, sampling_params, request_id)

    def reply(self, request_id: str, turn: int, prompt_ids: list[int]) -> Any:
        found = re.search(r"question (\d+)", TOKENIZER.decode(prompt_ids))
        assert found
        number, params = int(found[1]), self.params[request_id]
        right = params["seed"] % 3 if params["temperature"] else number % 2 == 0
        return f"#### {number if right else -1}"

    @property
    def versions(self) -> list[int]:
        """Of the weights that it was given."""
        return [version for name, version in self.calls if name == "finish_weight_update"]


class SilentEngine(SeededEngine):
    """Never answers."""

    def reply(self, request_id: str, turn: int, prompt_ids: list[int]) -> Any:
        return asyncio.sleep(3600, "")


def make_project(folder: Path) -> Path:
    tiny_model(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "data_source": "calculator",
            "reward_model": {"ground_truth": str(i)},
        }
        for i in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_config(project: Path, name: str, *overrides: str) -> Config:
    return load_config(
        [
            f"model={{path: {project}/model, dtype: float32}}",
            f"data={{train_files: [{project}/rows.jsonl], train_batch_size: 4}}",
            "rollout={name: 'scripted_run:SeededEngine', n: 3, response_length: 64}",
            "rollout.sync_check=null",  # a script does not compute what the trainer does
            "actor.optim.lr=0.01",
            "trainer={total_training_steps: 3, device: cpu, logger: [jsonl]}",
            f"trainer.default_local_dir={project}/runs",
            f"trainer.experiment_name={name}",
            *overrides,
        ]
    )


@asynccontextmanager
async def scripted_run(config: Config, **options: bool) -> AsyncIterator[Run]:
    try:
        async with open_run(config, **options) as run:
            yield run
    finally:
        SOCKETS.remove()


@asynccontextmanager
async def first_step(config: Config) -> AsyncIterator[Steps]:
    """In the first step of a run, whose engine has the weights."""
    async with scripted_run(config) as run:
        with Steps(run) as steps:
            await steps.start()
            await steps.update_weights()
            assert next(iter(steps)) == steps.number == 1
            yield steps
