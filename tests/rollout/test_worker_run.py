"""rollout.agent.num_workers in a whole run, and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from scripted_run import make_config, make_project, scripted_run

import minirl.data
import minirl.inputs
from minirl.agent_loop import AGENT_LOOPS, SingleTurnAgentLoop
from minirl.config import ConfigError
from minirl.inputs import read_inputs
from minirl.launch import SOCKETS
from minirl.types import Termination, Trajectory

WORKERS = "rollout.agent.num_workers=1"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


async def roll_out(project: Path, *overrides: str) -> list[Trajectory]:
    config = make_config(project, "run", *overrides)
    async with scripted_run(config) as run:
        assert run.inputs and run.manager
        rows = [{**row, "uid": f"0-{i}"} for i, row in enumerate(run.inputs.train_rows)]
        return await run.manager.generate_sequences(rows, step=1)


def told(trajectory: Trajectory) -> tuple[Any, ...]:
    return trajectory.uid, trajectory.sample_index, trajectory.response_ids, trajectory.reward


async def test_a_run_with_workers_is_the_same_run(project: Path) -> None:
    expected = await roll_out(project)
    trajectories = await roll_out(project, WORKERS)
    assert [told(t) for t in trajectories] == [told(t) for t in expected]
    assert len({t.reward for t in trajectories}) == 2
    assert SOCKETS.path and not SOCKETS.path.exists()
    run_dir = make_config(project, "run").trainer.run_dir
    assert (run_dir / "logs" / "worker_0.log").exists()


def test_a_value_that_cannot_be_sent_is_refused_at_start(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_rows(files: list[str]) -> list[dict[str, Any]]:
        rows = minirl.data.load_rows(files)
        rows[2]["extra_info"] = {"mode": Termination}  # stands for what a package reads as its own
        return rows

    monkeypatch.setattr(minirl.inputs, "load_rows", load_rows)
    assert len(read_inputs(make_config(project, "x")).train_rows) == 12
    place = r"rows\.jsonl: row 2, column extra_info\.mode: got .* cannot be sent to an agent-loop"
    with pytest.raises(ConfigError, match=place):
        read_inputs(make_config(project, "x", WORKERS))


class InTheMainProgram(SingleTurnAgentLoop):
    """As if the program that the user started had registered it."""


def test_a_component_of_the_main_program_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InTheMainProgram, "__module__", "__main__")
    monkeypatch.setitem(AGENT_LOOPS._entries, "in_main", InTheMainProgram)
    loop = "rollout.agent.default_agent_loop=in_main"
    assert "__main__" not in read_inputs(make_config(project, "x", loop)).modules
    with pytest.raises(ConfigError, match=r"num_workers: got 1; the main program registers a comp"):
        read_inputs(make_config(project, "x", loop, WORKERS))


def test_modules_that_register_what_is_used_are_known(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InTheMainProgram, "__module__", "scripted_run")
    monkeypatch.setitem(AGENT_LOOPS._entries, "in_module", InTheMainProgram)
    known = read_inputs(make_config(project, "x")).modules
    loop = "rollout.agent.default_agent_loop=in_module"
    assert set(read_inputs(make_config(project, "x", loop)).modules) - set(known) == {
        "scripted_run"
    }
