"""What README.md shows works as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

from minirl.agent_loop import AGENT_LOOPS, run_agent_loop
from minirl.testing import ScriptedServer, byte_tokenizer, make_context
from minirl.tools import FunctionTool

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def shown(text: str) -> dict[str, Any]:
    """What the Python block with `text` in it defines."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    [block] = [block for block in blocks if text in block]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(block, names)
    return names


def test_the_tool() -> None:
    tool = shown("@function_tool")["weather"]
    assert isinstance(tool, FunctionTool)
    properties = tool.parameters_schema["properties"]
    assert properties == {"city": {"type": "string", "description": "Name of the city."}}


@pytest.mark.parametrize(
    ("limit", "termination", "num_turns"), [(8, "stop", 2), (2, "turn_length", 1)]
)
async def test_the_agent_loop(
    monkeypatch: pytest.MonkeyPatch, limit: int, termination: str, num_turns: int
) -> None:
    """Also where its first turn is cut, behind which nothing can be asked."""
    monkeypatch.setattr(AGENT_LOOPS, "_entries", dict(AGENT_LOOPS._entries))
    loop = shown("AskTwice")["AskTwice"]
    limits = [f"rollout.multi_turn.max_tokens_per_turn={limit}"]
    context = make_context(ScriptedServer(byte_tokenizer(), ["yes", "no"]), overrides=limits)
    row = {"raw_prompt": [{"role": "user", "content": "Is it?"}]}
    [trajectory] = await run_agent_loop(loop(context), {}, row)
    assert (trajectory.termination, trajectory.num_turns) == (termination, num_turns)
    assert trajectory.error is None


def test_every_file_to_open_is_there() -> None:
    _, table = README.split("## To change X, open Y")
    named = re.findall(r"`([\w/]+(?:\.py|\.md|/))`", table)
    folders = [ROOT / name for name in ("minirl", "benchmarks", "tests")]
    paths = folders + [path for folder in folders for path in folder.rglob("*")]
    there = [f"{path}{'/' * path.is_dir()}" for path in paths]
    assert len(named) > 50
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
