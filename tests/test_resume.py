"""A run that is killed, or fails, goes on where it was."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from scripted_run import SeededEngine, make_config, make_project, scripted_run

from benchmarks.chaos import differences, outcome
from minirl import journal
from minirl.config import Config
from minirl.journal import Conversation, read_journal
from minirl.launch import SOCKETS
from minirl.replay import journal_path
from minirl.rollout.server import EngineLostError
from minirl.rollout.transformers_server import TransformersServer
from minirl.testing import tiny_model
from minirl.tracking import read_metrics
from minirl.train import main as train_command
from minirl.train import train
from minirl.trainer.policy import PolicyTrainer
from minirl.types import TokenOutput

NUM_STEPS = 6
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    tiny_model(folder / "model", hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
    (folder / "reward.py").write_text(REWARD)
    return folder


def sampling_config(project: Path, name: str, *overrides: str) -> Config:
    """The policy samples, and what it samples does not depend on what else it does."""
    return make_config(
        project, name, "data={train_batch_size: 2}",
        "rollout={name: transformers, max_num_seqs: 1, n: 2, response_length: 6}",
        "rollout.trace.max_samples_per_step=-1", "reward.reward_manager=naive",
        f"reward.custom_reward_function.path={project}/reward.py",
        "trainer={deterministic: true, save_freq: 2, test_freq: 3, val_before_train: true}",
        f"data.val_files=[{project}/rows.jsonl]", f"trainer.total_training_steps={NUM_STEPS}",
        *overrides,
    )  # fmt: skip


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(number: int, then: Callable[..., None], function: Callable[..., Any]) -> Any:
    """`function`, but for its call `number`, which is `then` with the same arguments."""
    calls = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        return (then if next(calls) == number else function)(*args, **kwargs)

    return counted


def tear(file: int, content: bytes) -> None:
    """Half of a record gets into the file."""
    os.write(file, content[: len(content) // 2])
    die()


def at_a_checkpoint(renamed: bool, rename: Callable[..., Path]) -> Callable[..., Path]:
    """Path.rename, to die of: when a checkpoint is whole and has not its name yet, or when it is
    `renamed` and the step's numbers are not logged."""

    def watched(path: Path, target: Path) -> Path:
        is_checkpoint = Path(target).name.startswith("step_")
        if is_checkpoint and not renamed:
            die()
        moved = rename(path, target)
        if is_checkpoint:
            die()
        return moved

    return watched


Moment = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
DEATHS: dict[str, Moment] = {
    # after the header, 4 conversations and the outcome of step 1, and the header of step 2
    "while a conversation is written": (journal, "_write", partial(on_call, 10, tear)),
    "while weights are sent": (TransformersServer, "_copy", partial(on_call, 2, die)),
    "before a checkpoint": (Path, "rename", partial(at_a_checkpoint, False)),
    "behind a checkpoint": (Path, "rename", partial(at_a_checkpoint, True)),
    "while parameters change": (PolicyTrainer, "update", partial(on_call, 2, die)),
}


def live(config: Config, death: str | None) -> None:
    """A process that trains, and is killed where `death` says."""
    if death:
        where, name, changed = DEATHS[death]
        setattr(where, name, changed(getattr(where, name)))
    asyncio.run(train_command(config))
    SOCKETS.remove()


def one_life(forkserver: ForkServerContext, config: Config, death: str | None) -> None:
    process = forkserver.Process(target=live, args=(config, death), daemon=True)
    process.start()
    process.join(900)
    assert process.exitcode == (-signal.SIGKILL if death else 0), death


def test_killed_at_any_moment_it_comes_to_the_same_end(
    project: Path, forkserver: ForkServerContext
) -> None:
    undisturbed, killed = (sampling_config(project, name) for name in ("undisturbed", "killed"))
    one_life(forkserver, undisturbed, None)
    for death in [*DEATHS, None]:
        one_life(forkserver, killed, death)
    folders = killed.trainer.run_dir, undisturbed.trainer.run_dir
    assert differences(*folders, NUM_STEPS) == []
    ours, theirs = map(read_metrics, folders)
    assert [row["step"] for row in ours] == list(range(NUM_STEPS + 1))
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() >= {name for name in yours if name.startswith(("actor/", "critic/"))}
        assert [k for k in mine if k.startswith("val-core/")] == [
            k for k in yours if k.startswith("val-core/")
        ]
    assert len(hashes(folders[0])) == NUM_STEPS


def hashes(run_dir: Path) -> set[str | None]:
    return {outcome(run_dir, step) for step in range(1, NUM_STEPS + 1)}


class FailingEngine(SeededEngine):
    """Answers no more than `limit` requests, and dies when they are in the journal."""

    limit = 20
    journal: Path

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        if len(self.params) >= self.limit:
            while num_conversations(self.journal) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            raise EngineLostError("planted")
        return await super().generate(prompt_ids, sampling_params, request_id)


def num_conversations(path: Path) -> int:
    return sum(isinstance(record, Conversation) for record in read_journal(path)[0])


async def requests_of(config: Config, limit: int) -> int:
    """Train with an engine that answers `limit` requests; how many it has answered."""
    FailingEngine.limit = limit
    FailingEngine.journal = journal_path(config.trainer.run_dir, 2)
    try:
        async with scripted_run(config) as run:
            await train(run)
    except* EngineLostError:
        pass
    return len(SeededEngine.last.params)


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ((), 4 + 12),  # 8 conversations of step 2 are known, and all of step 1
        (("trainer.logger=[jsonl, console]",), 4 + 12),
        (("actor.optim.lr=0.02",), 3 * 12),
        (("trainer.resume_mode=disable",), 3 * 12),
    ],
)
async def test_only_what_is_not_in_the_journal_is_sampled(
    project: Path, change: tuple[str, ...], asked: int
) -> None:
    name = "".join(filter(str.isalnum, f"failing {change}"))
    settings = ["rollout.name=test_resume:FailingEngine", "trainer.save_freq=100"]
    config = make_config(project, name, *settings)
    assert await requests_of(config, 20) == 20
    again = make_config(project, name, *settings, *change)
    assert await requests_of(again, 1000) == asked
    assert [row["step"] for row in read_metrics(again.trainer.run_dir)] == [0, 1, 2, 3]
    is_new = (again.trainer.run_dir / "metrics.1.jsonl").exists()
    assert is_new == (asked == 36)
    assert list((again.trainer.run_dir / "journal").iterdir()) == []  # there is a checkpoint


async def test_without_checkpoints_there_is_no_journal(project: Path) -> None:
    config = make_config(project, "none", "trainer.total_training_steps=1")
    async with scripted_run(config) as run:
        await train(run)
    assert not (config.trainer.run_dir / "journal").exists()
