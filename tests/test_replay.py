import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted_run import make_config, make_project, scripted_run

from minirl.config import Config, ConfigError, load_config
from minirl.journal import (
    MAGIC,
    Conversation,
    Header,
    Outcome,
    Record,
    _frame,
    read_journal,
)
from minirl.launch import SOCKETS
from minirl.ranks import first_cause
from minirl.replay import ReplayDiffersError, journal_path, main, replay
from minirl.steps import BadStepsError
from minirl.train import train

NUM_STEPS = 10
KEEP = "trainer={deterministic: true, save_freq: 4, total_training_steps: 10}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def configure(project: Path, name: str, *overrides: str) -> Config:
    """Everything that a step can compute is in it: a reference, a critic, entropy."""
    return make_config(
        project, name, KEEP, "critic={}", "ref={}", "algorithm.adv_estimator=gae",
        "actor={use_kl_loss: true, entropy_coeff: 0.01, ppo_mini_batch_size: 2}",
        "rollout.trace=null", *overrides,
    )  # fmt: skip


async def run_it(config: Config) -> Path:
    async with scripted_run(config) as run:
        await train(run)
    return config.trainer.run_dir


@pytest.fixture(scope="module")
async def recorded(project: Path) -> Path:
    return await run_it(configure(project, "recorded"))


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """To be spoilt."""
    return shutil.copytree(recorded, tmp_path / "copied")


async def replay_it(run_dir: Path, step: int) -> None:
    try:
        await replay(run_dir, step, load_config([str(run_dir / "config.yaml")]))
    except ExceptionGroup as error:
        raise first_cause(error) from error
    finally:
        SOCKETS.remove()


def times(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and "replay" not in path.parts
    }


def outcome(run_dir: Path, step: int) -> Outcome:
    last = read_journal(journal_path(run_dir, step))[0][-1]
    assert isinstance(last, Outcome)
    return last


def rewrite(run_dir: Path, step: int, records: list[Record]) -> None:
    path = journal_path(run_dir, step)
    path.write_bytes(MAGIC + b"".join(map(_frame, records)))


async def test_the_same_trajectories_give_the_same_bits(project: Path, recorded: Path) -> None:
    again = await run_it(configure(project, "again"))
    ours, theirs = ([outcome(d, s) for s in range(1, 11)] for d in (again, recorded))
    assert [a.differences(b) for a, b in zip(ours, theirs, strict=True)] == [[]] * NUM_STEPS
    assert len({o.parameters for o in ours}) == NUM_STEPS
    assert {"actor/grad_norm", "actor/pg_loss", "critic/grad_norm"} <= ours[0].metrics.keys()


def test_steps_count_from_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirl.replay.run_command", lambda *_, **__: pytest.fail("0 is no step"))
    with pytest.raises(SystemExit) as ended:
        main(["runs/x", "0"])
    assert ended.value.code == 2


@pytest.mark.parametrize(("step", "replayed"), [(1, "1 steps"), (7, "3 steps")])
async def test_a_replay_is_the_same(recorded: Path, capsys: Any, step: int, replayed: str) -> None:
    before = times(recorded)
    await replay_it(recorded, step)
    printed = capsys.readouterr().out
    assert f"{replayed}, all of them the same to the last bit" in printed
    assert outcome(recorded, step).parameters[:64] in printed.replace("\n", "")
    assert repr(outcome(recorded, step).metrics["actor/grad_norm"]) in printed
    assert times(recorded) == before


async def test_the_bad_steps_that_ended_a_run_can_be_replayed(
    project: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minirl.credit.broken_sequences", lambda batch: [0])
    config = configure(project, "bad", "trainer={max_bad_steps: 2, save_freq: -1}")
    with pytest.raises(ExceptionGroup) as caught:
        await run_it(config)
    assert isinstance(first_cause(caught.value), BadStepsError)
    await replay_it(config.trainer.run_dir, 2)
    assert "2 steps, all of them the same to the last bit" in capsys.readouterr().out
    assert not (config.trainer.run_dir / "replay" / "checkpoints").exists()


async def test_a_changed_trajectory_is_seen(copied: Path) -> None:
    records, _ = read_journal(journal_path(copied, 6))
    [one] = [r for r in records if isinstance(r, Conversation)][:1]
    one.trajectories[0].reward = 1e-3 + (one.trajectories[0].reward or 0)
    rewrite(copied, 6, records)
    with pytest.raises(ReplayDiffersError, match="step 6: parameters"):
        await replay_it(copied, 6)


def headed(run_dir: Path, step: int, **changes: Any) -> None:
    header, *records = read_journal(journal_path(run_dir, step))[0]
    assert isinstance(header, Header)
    values = {name: getattr(header, name) for name in header.__struct_fields__}
    rewrite(run_dir, step, [Header(**values | changes), *records])


def spoil_nothing(run_dir: Path) -> None:
    pass


def forget_the_end(run_dir: Path) -> None:
    rewrite(run_dir, 6, read_journal(journal_path(run_dir, 6))[0][:-1])


def forget_a_conversation(run_dir: Path) -> None:
    records, _ = read_journal(journal_path(run_dir, 6))
    rewrite(run_dir, 6, [records[0], *records[2:]])


def lose_a_step(run_dir: Path) -> None:
    journal_path(run_dir, 5).unlink()


def change_the_config(run_dir: Path) -> None:
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))


def change_the_weights(run_dir: Path) -> None:
    headed(run_dir, 5, parameters="others")


def change_the_machine(run_dir: Path) -> None:
    [header, *_] = read_journal(journal_path(run_dir, 6))[0]
    assert isinstance(header, Header)
    headed(run_dir, 6, environment=header.environment | {"the number of ranks": "8"})


def change_the_format(run_dir: Path) -> None:
    path = journal_path(run_dir, 6)
    path.write_bytes(path.read_bytes().replace(MAGIC, b"minirl journal 0\n"))


@pytest.mark.parametrize(
    ("spoil", "step", "reason"),
    [
        (forget_the_end, 6, "step 6 did not end, or its record is damaged"),
        (forget_a_conversation, 6, "has no conversation 1-"),
        (lose_a_step, 6, "has no record of step 5, which STEP=6 needs"),
        (spoil_nothing, 11, "has no record of step 11"),
        (change_the_config, 6, "was not recorded with the settings of the run's config.yaml"),
        (change_the_weights, 6, "step 5 did not begin with the parameters of .*step_000004"),
        (change_the_machine, 6, "the number of ranks was 8 and is 1 here"),
        (change_the_format, 6, "is not a journal that this version of minirl has written"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_cannot_be_replayed_is_refused(
    copied: Path, spoil: Any, step: int, reason: str
) -> None:
    spoil(copied)
    with pytest.raises(ConfigError, match=reason):
        await replay_it(copied, step)


async def test_a_run_that_was_not_deterministic_is_refused(project: Path) -> None:
    config = configure(project, "recorded", "trainer.deterministic=false")
    with pytest.raises(ConfigError, match=r"trainer\.deterministic was false"):
        await replay(config.trainer.run_dir, 1, config)
