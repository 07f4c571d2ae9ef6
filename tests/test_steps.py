import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from scripted_run import SeededEngine, first_step, make_config, make_project, scripted_run

from minirl import credit
from minirl.agent_loop import AgentLoopOutput, SingleTurnAgentLoop
from minirl.config import Config
from minirl.rollout.manager import TooManyFailuresError
from minirl.steps import Steps
from minirl.tail import TailLogprobs
from minirl.tracking import read_metrics
from minirl.train import train
from minirl.trainer import checkpoint_folder, packing
from minirl.trainer.checkpoint import CheckpointError, Checkpoints
from minirl.trainer.policy import PolicyTrainer
from minirl.types import MicroBatch, TokenOutput, Trajectory

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if CONDITION:
        raise LookupError("planted")
    return float("-1" not in solution_str)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


async def run_training(config: Config) -> list[dict[str, Any]]:
    """Train to the end; the rows of metrics.jsonl."""
    async with scripted_run(config) as run:
        await train(run)
    return read_metrics(config.trainer.run_dir)


def trajectories_of(config: Config, step: int, split: str) -> list[dict[str, Any]]:
    file = config.trainer.run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


async def test_a_run_from_rows_to_weights(project: Path) -> None:
    config = make_config(
        project, "whole", f"data.val_files=[{project}/rows.jsonl]", "trainer.test_freq=2",
        "trainer.save_freq=2", "ref={}", "actor.use_kl_loss=true", "actor.ppo_mini_batch_size=2",
    )  # fmt: skip
    rows = await run_training(config)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        trained = trajectories_of(config, row["step"], "train")
        assert row["critic/score/mean"] == pytest.approx(sum(t["reward"] for t in trained) / 12)
        assert {t["weight_versions"][0] for t in trained} == {row["step"] - 1}
        assert len({t["uid"] for t in trained}) == 4
        assert row["actor/grad_norm"] > 0 and row["perf/total_num_tokens"] > 0
        assert row["perf/tflops/update_actor"] > 0 and row["perf/imbalance"] == 1
        assert row["agent_loop/slowest/seconds"] == row["trajectory/seconds/max"] > 0
    parts = {"gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights"}
    assert all({f"timing_s/{part}" for part in parts} <= row.keys() for row in rows[1:])
    accuracy = [row.get("val-core/calculator/acc/mean@1") for row in rows]
    assert accuracy == [0.5, None, 0.5, 0.5]  # before, every second, and after the last
    assert len(trajectories_of(config, 3, "val")) == 12
    saved = sorted(p.name for p in (config.trainer.run_dir / "checkpoints").glob("step_*"))
    assert saved == ["step_000002", "step_000003"]
    assert sum(row.get("checkpoint/write_s", 0) > 0 for row in rows) in (1, 2)  # 3 may tell of 2


async def test_one_optimizer_step_needs_no_pass_for_old_logprobs(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own forward pass gives the same: in the loss, in the metrics, in what is recorded."""
    runs = {}
    for name in ("without", "with"):
        config = make_config(project, f"{name}_pass")
        if name == "with":
            monkeypatch.setattr(credit, "needs_old_logprobs", lambda config: True)
        rows = await run_training(config)
        recorded = [t["old_logprobs"] for t in trajectories_of(config, 3, "train")]
        assert all(row["training/rollout_probs_diff_max"] > 0 for row in rows[1:])
        assert {"timing_s/old_log_prob" in row for row in rows[1:]} == {name == "with"}
        runs[name] = rows, recorded
    (rows, recorded), (their_rows, their_recorded) = runs.values()
    for row, theirs in zip(rows, their_rows, strict=True):
        same = {
            k for k in theirs if k.startswith(("actor/", "critic/", "training/", "rollout_corr/"))
        }
        assert {k: row[k] for k in same} == pytest.approx({k: theirs[k] for k in same}, abs=1e-5)
    for mine, others in zip(recorded, their_recorded, strict=True):
        assert mine == pytest.approx(others, abs=1e-5)


class SlowestLast(SeededEngine):
    """The last conversations of a step end when the log-probabilities of the others are known."""

    known: ClassVar[dict[int, asyncio.Event]] = defaultdict(asyncio.Event)  # by step
    num_ended = 0

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        output = await super().generate(*args, **kwargs)
        step, number = divmod(self.num_ended, 12)  # 4 prompts, 3 samples each
        self.num_ended += 1
        if number >= 9:
            await self.known[step + 1].wait()
        return output


async def test_logprobs_in_the_tail_of_the_rollout(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, steps, pack = TailLogprobs.compute, count(1), packing.pack

    def pack_beside_the_loop(*args: Any) -> MicroBatch:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return pack(*args)

    async def then_end(self: TailLogprobs, trajectories: list[Trajectory]) -> None:
        assert len(trajectories) == 9
        with monkeypatch.context() as patch:  # conversations go on meanwhile
            patch.setattr(packing, "pack", pack_beside_the_loop)
            await early(self, trajectories)
        SlowestLast.known[next(steps)].set()

    monkeypatch.setattr(TailLogprobs, "compute", then_end)
    runs = []
    for in_tail in (True, False):
        name = "test_steps:SlowestLast" if in_tail else "scripted_run:SeededEngine"
        config = make_config(
            project, f"in_tail_{in_tail}", f"rollout.name={name}", "actor.ppo_mini_batch_size=2",
            f"actor.logprobs_in_tail={in_tail}", "data.val_files=[]",
        )  # fmt: skip
        rows = await asyncio.wait_for(run_training(config), 300)
        recorded = [t["old_logprobs"] for t in trajectories_of(config, 3, "train")]
        runs.append((rows, recorded))
    (rows, recorded), (their_rows, their_recorded) = runs
    assert all(0.6 < row["training/logprobs_in_tail"] < 0.9 for row in rows[1:])
    for row, theirs in zip(rows, their_rows, strict=True):
        same = {k for k in theirs if k.startswith(("actor/", "critic/", "training/"))}
        assert {k: row[k] for k in same} == pytest.approx({k: theirs[k] for k in same}, abs=1e-5)
    for mine, others in zip(recorded, their_recorded, strict=True):
        assert mine == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        ("actor.ppo_epochs=2",),
        ("actor.ppo_mini_batch_size=2",),
        ("actor.policy_loss.loss_mode=clip_cov",),
        ("algorithm.rollout_correction={}",),
        ("algorithm.use_kl_in_reward=true", "ref={}"),
        ("algorithm.adv_estimator=optimal_token_baseline",),
        ("critic={}", "algorithm.adv_estimator=gae", "trainer.critic_warmup=1"),
    ],
)
def test_what_needs_a_pass_for_old_logprobs(project: Path, settings: tuple[str, ...]) -> None:
    assert credit.needs_old_logprobs(make_config(project, "needs", *settings))
    assert not credit.needs_old_logprobs(make_config(project, "needs"))


async def test_a_write_that_fails_ends_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is where the run goes on."""
    config = make_config(
        project, "no_room", "trainer.save_freq=1", "trainer.total_training_steps=50"
    )
    publish = checkpoint_folder.publish

    def publish_one(partial: Path, final: Path) -> None:
        if final.name != "step_000001":
            raise OSError(28, "No space left on device")
        publish(partial, final)

    monkeypatch.setattr(checkpoint_folder, "publish", publish_one)
    with pytest.raises(ExceptionGroup) as caught:
        await run_training(config)
    assert caught.group_contains(CheckpointError, match=r"No space left .*/step_000001\)")
    steps = [row["step"] for row in read_metrics(config.trainer.run_dir)]
    assert steps in ([0, 1], [0, 1, 2])  # whether the write had failed by the end of step 2
    monkeypatch.undo()
    resumed = replace(config, trainer=replace(config.trainer, total_training_steps=2))
    assert [row["step"] for row in await run_training(resumed)] == [0, 1, 2]


async def test_starting_anew_keeps_the_checkpoints_of_before(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("anew", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    await run_training(make_config(project, *options, "trainer.total_training_steps=2"))
    config = make_config(
        project, *options, "trainer.total_training_steps=1", "trainer.resume_mode=disable"
    )
    rows = await run_training(config)
    assert [row["step"] for row in rows] == [0, 1]
    aside = config.trainer.run_dir / "checkpoints.1"
    assert (
        f"warning: the checkpoints of an earlier run are now in {aside}" in capfd.readouterr().err
    )
    left = sorted(path.parent.name + path.name for path in aside.parent.glob("check*/step_*"))
    assert left == ["checkpoints.1step_000002", "checkpointsstep_000001"]


async def test_the_engine_sleeps_and_is_given_every_version(project: Path) -> None:
    await run_training(make_config(project, "calls", "trainer.total_training_steps=2"))
    calls = [(n, v) for n, v in SeededEngine.last.calls if n not in ("update_weights",)]
    assert calls.pop(0)[0] == "init_weight_transfer"  # once, at the first sync
    update = [("start_weight_update", None)]

    def sync(version: int) -> list[tuple[str, Any]]:
        finish = ("finish_weight_update", version)
        return [("wake_up", ["weights"]), *update, finish, ("wake_up", ["kv_cache"])]

    assert calls == [*sync(0), ("sleep", 2), *sync(1), ("sleep", 2), *sync(2)]


async def test_the_engine_makes_room_for_a_checkpoint_of_what_is_offloaded(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is on the device then; when it is loaded, too."""
    seen: list[Any] = []

    def watch(method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            seen.append(SeededEngine.last.calls[-1:])
            return method(*args)

        return watched

    monkeypatch.setattr(Checkpoints, "save", watch(Checkpoints.save))
    monkeypatch.setattr(PolicyTrainer, "load", watch(PolicyTrainer.load))
    for offload in ("none", "optimizer"):
        for last in (1, 2):
            settings = ["trainer.save_freq=1", f"trainer.total_training_steps={last}"]
            name = f"room_{offload}"
            await run_training(make_config(project, name, f"actor.offload={offload}", *settings))
            seen.append(SeededEngine.last.calls[-1:])
    awake = [("wake_up", ["kv_cache"])]
    assert seen[:5] == [awake, awake, [], awake, awake]
    room, again = [("sleep", 1)], [("wake_up", None)]
    assert seen[5:] == [room, again, [("sleep", 2)], room, again]


async def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(project: Path) -> None:
    straight = await run_training(
        make_config(project, "straight", "trainer.total_training_steps=5")
    )
    options = ("resumed", "trainer.save_freq=2")
    await run_training(make_config(project, *options, "trainer.total_training_steps=2"))
    again = make_config(project, *options, "trainer.total_training_steps=5")
    resumed = await run_training(again)
    assert [row["step"] for row in resumed] == [row["step"] for row in straight]
    assert SeededEngine.last.versions == [2, 3, 4, 5]
    for ours, theirs in zip(resumed[1:], straight[1:], strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "training/epoch"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), (ours["step"], name)
    step_4 = [
        [(t["uid"], t["response"]) for t in trajectories_of(config, 4, "train")]
        for config in (again, make_config(project, "straight"))
    ]
    assert step_4[0] == step_4[1]  # the second epoch, in an order of its own


@asynccontextmanager
async def first_batch(config: Config) -> AsyncIterator[tuple[Steps, MicroBatch]]:
    """Of the run's first step, from a scripted engine."""
    async with first_step(config) as steps:
        yield steps, await steps.assemble(await steps.generate())


@pytest.mark.parametrize("on_failure", ["mask", "drop_group"])
async def test_what_failed_is_in_no_batch(project: Path, tmp_path: Path, on_failure: str) -> None:
    reward = tmp_path / "reward.py"
    planted = "int(ground_truth) < 2 and '-1' in solution_str"
    reward.write_text(REWARD.replace("CONDITION", planted))
    config = make_config(
        project, f"failed_{on_failure}", "rollout.n=4", f"rollout.on_failure={on_failure}",
        f"reward.custom_reward_function.path={reward}", "data.shuffle=false",
    )  # fmt: skip
    async with first_batch(config) as (steps, batch):
        trajectories = steps.trajectories
    good = [[t for t in trajectories[i : i + 4] if t.error is None] for i in (0, 4, 8, 12)]
    sizes = [len(group) for group in good]
    assert 0 < sizes[0] < 4 and sizes[2:] == [4, 4]  # of the first prompt some failed, not all
    if on_failure == "drop_group":
        good = [group for group in good if len(group) == 4]
    trained = [t for group in good for t in group]
    assert torch.bincount(batch.group_ids).tolist() == [len(group) for group in good if group]
    assert batch.tokens.tolist() == [i for t in trained for i in t.token_ids]
    assert batch.token_rewards.sum() == sum(t.reward or 0 for t in trained) > 0
    assert batch.response_mask.sum() == sum(sum(t.response_mask) for t in trained)


async def test_a_failure_in_every_group_leaves_nothing_of_what_was_scored_in_the_tail(
    project: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.replace("CONDITION", "'-1' in solution_str"))
    config = make_config(
        project, "all_dropped", "data.train_batch_size=1", "rollout.n=12", "actor.ppo_epochs=2",
        "actor.logprobs_in_tail=true", "rollout={on_failure: drop_group, max_failure_fraction: 1}",
        f"reward.custom_reward_function.path={reward}",
    )  # fmt: skip
    async with first_batch(config) as (steps, batch):
        logprobs, _ = await steps.compute_logprobs(batch)
        errors = {t.error is None for t in steps.trajectories}
    assert errors == {True, False}
    assert batch.num_sequences == logprobs.numel() == 0


async def test_masked_terminations_keep_their_place_but_do_not_train(project: Path) -> None:
    config = make_config(
        project, "masked", "rollout.response_length=7", "data.max_prompt_length=200",
        "rollout.mask_terminations=[response_length]",
    )  # fmt: skip
    async with first_batch(config) as (steps, batch):
        trajectories = steps.trajectories
    lengths = [sum(t.response_mask) for t in trajectories]
    whole = [t.termination == "stop" for t in trajectories]
    assert True in whole and False in whole  # `#### 7` and its end fit, `#### 10` does not
    trained = torch.zeros(12).index_add_(0, batch.sequence_ids, batch.response_mask).tolist()
    assert trained == [n if w else 0 for n, w in zip(lengths, whole, strict=True)]


async def test_a_step_with_nothing_to_train_on_changes_nothing(project: Path) -> None:
    silent = "rollout={name: 'scripted_run:SilentEngine', trajectory_timeout_s: 0.1}"
    config = make_config(project, "silent", silent, "trainer.total_training_steps=1")
    async with scripted_run(config) as run:
        before = [p.detach().clone() for p in run.policy.model.parameters()]
        await train(run)
        after = list(run.policy.model.parameters())
    assert all(map(torch.equal, before, after))
    row = read_metrics(config.trainer.run_dir)[-1]
    assert (row["step"], row["agent_loop/termination/timeout"]) == (1, 1.0)


async def test_a_failed_run_closes_everything(project: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.replace("CONDITION", "True"))
    config = make_config(project, "ended", f"reward.custom_reward_function.path={reward}")
    with pytest.raises(ExceptionGroup) as caught:
        await run_training(config)
    [error] = caught.value.exceptions
    assert isinstance(error, TooManyFailuresError)
    assert str(error).startswith("12 of 12 trajectories failed")
    assert not torch.distributed.is_initialized()
    log = (config.trainer.run_dir / "logs" / "rank_0.log").read_text()
    assert "the run ended early" in log and "LookupError: planted" in log


async def test_due(project: Path) -> None:
    async with scripted_run(make_config(project, "due", "trainer.total_training_steps=7")) as run:
        with Steps(run) as steps:
            await steps.start()
            due = {every: [] for every in (-1, 1, 3, 100)}
            for number in steps:
                for every, found in due.items():
                    found += [number] if steps.due(every) else []
    assert due == {-1: [], 1: [1, 2, 3, 4, 5, 6, 7], 3: [3, 6, 7], 100: [7]}


class Helped(SingleTurnAgentLoop):
    """Every turn gets half a point, as from a tool."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        trajectory = await super().run(sampling_params, **row)
        trajectory.turn_rewards[-1] = 0.5
        return trajectory


@pytest.mark.parametrize(("tool_reward", "given"), [("turn", 0.5), ("outcome", 0.5), ("log", 0.0)])
async def test_the_greedy_baseline_has_what_tools_gave(
    project: Path, tool_reward: str, given: float
) -> None:
    config = make_config(
        project, f"helped_{tool_reward}", "algorithm.adv_estimator=remax",
        f"reward.tool_reward={tool_reward}", f"rollout.agent.default_agent_loop={__name__}:Helped",
    )  # fmt: skip
    async with first_step(config) as steps:
        groups = await steps.generate()
    greedy = [t.reward for t in steps.trajectories if t.sample_index == -1]
    assert groups and [group.greedy_reward for group in groups] == [
        reward + given for reward in greedy if reward is not None
    ]
