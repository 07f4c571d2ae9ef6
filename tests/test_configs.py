"""Every recipe that is shipped: it loads, and all that it names is there."""

from pathlib import Path

import pytest

from minirl.agent_loop import load_agent_loops
from minirl.checks import check_algorithms
from minirl.config import load_config
from minirl.inputs import _check_names
from minirl.tools import load_tools

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
DEMO = ROOT / "configs" / "debug" / "calculator_grpo.yaml"
"""The other files of its folder say what they change of it."""


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_a_shipped_config(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name files from there
    layers = [file] if file == DEMO or file.parent != DEMO.parent else [DEMO, file]
    config = load_config([str(layer) for layer in layers])
    assert config.data.train_files and config.trainer.experiment_name != "minirl"
    _check_names(config)
    check_algorithms(config)
    assert file == DEMO or config.trainer.experiment_name != "demo"
    if path := config.rollout.multi_turn.tool_config_path:
        assert load_tools(path)
    if path := config.rollout.agent.agent_loop_config_path:
        assert load_agent_loops(path)


def test_the_demo_is_among_them() -> None:
    assert DEMO in FILES
