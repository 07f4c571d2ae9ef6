"""A simulated user over a scripted engine, and what may go wrong with one."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scripted import TOKENIZER, call, check_invariants

from examples.guess_number import prepare, user
from minirl.agent_loop import (
    Interaction,
    ToolAgentLoop,
    interaction,
    load_interactions,
    run_agent_loop,
)
from minirl.config import ConfigError
from minirl.testing import ScriptedServer, make_context
from minirl.tools.calculator import CalculatorTool
from minirl.types import Trajectory

EXAMPLE = Path(prepare.__file__).parent / "interaction.yaml"


async def converse(
    replies: list[str], row: dict[str, Any], *overrides: str, interactions: Any = None
) -> tuple[Trajectory, ScriptedServer]:
    server = ScriptedServer(TOKENIZER, replies)
    context = make_context(server, tools=[CalculatorTool({})], overrides=overrides)
    context.interactions = interactions or load_interactions(EXAMPLE)
    [trajectory] = await run_agent_loop(
        ToolAgentLoop(context), {}, {**row, "raw_prompt": row["prompt"]}
    )
    return trajectory, server


def row(**kwargs: Any) -> dict[str, Any]:
    [made] = prepare.make_rows(1, seed=0)
    made["extra_info"]["interaction_kwargs"].update(kwargs)
    return made


async def test_the_user_answers_until_the_conversation_is_over() -> None:
    trajectory, server = await converse(["10", "Is it 15?", "13"], row(number=13))
    check_invariants(trajectory, server)
    text = TOKENIZER.decode(trajectory.response_ids)
    assert text == (
        "10<|im_end|>\n<|im_start|>user\nLarger.<|im_end|>\n<|im_start|>assistant\n"
        "Is it 15?<|im_end|>\n<|im_start|>user\nSmaller.<|im_end|>\n<|im_start|>assistant\n"
        "13<|im_end|>"
    )
    assert trajectory.termination == "stop" and trajectory.num_turns == 3
    score = user.compute_score("guess_number", text, "13", {})
    assert score["score"] == pytest.approx(0.8) and score["acc"] == 1


async def test_who_says_no_number_has_not_found_it() -> None:
    limit = "rollout.multi_turn.max_assistant_turns=2"
    trajectory, _ = await converse(["Hello.", "Hello."], row(number=user.LARGEST), limit)
    assert trajectory.termination == "max_assistant_turns"
    text = TOKENIZER.decode(trajectory.response_ids)
    assert "Say a number" in text and trajectory.num_turns == 2
    assert user.compute_score("guess_number", text, str(user.LARGEST), {})["score"] == 0


async def test_tools_and_user_take_turns() -> None:
    add = call("calculator", expression="6 + 7")
    trajectory, server = await converse([add, "12", add, "13"], row(number=13))
    check_invariants(trajectory, server)
    assert [record.result for record in trajectory.tool_calls] == ["13", "13"]
    assert trajectory.num_turns == 4 and "Larger." in TOKENIZER.decode(trajectory.response_ids)


@pytest.mark.parametrize("limit", ["max_assistant_turns", "max_user_turns"])
async def test_a_limit_ends_it(limit: str) -> None:
    trajectory, _ = await converse(["1"] * 9, row(number=13), f"rollout.multi_turn.{limit}=2")
    assert trajectory.termination == limit
    assert trajectory.num_turns == (2 if limit == "max_assistant_turns" else 3)
    assert trajectory.response_mask[-1] == 1


async def test_a_turn_that_says_stop_is_not_answered() -> None:
    settings = "rollout.multi_turn.stop_when='####'"
    trajectory, _ = await converse(["10", "#### 15", "13"], row(number=13), settings)
    assert (trajectory.termination, trajectory.num_turns) == ("stop", 2)


class Recorder(Interaction):
    log: ClassVar[list[Any]] = []

    async def start(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.log.append(("start", kwargs))
        return await super().start("me")

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[str, bool, float]:
        self.log.append((instance_id, [m["content"] for m in messages], kwargs))
        if "angry" in kwargs:
            raise LookupError("not with me")
        return "Go on.", len(messages) > 3, kwargs.get("reward", 0.5)

    async def finalize(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("finalize", instance_id))


async def test_it_is_started_asked_and_finalized_and_its_reward_is_the_turns() -> None:
    Recorder.log.clear()
    asked = {"interaction_kwargs": {"name": "recorder", "mood": "calm"}}
    given = {"prompt": [{"role": "user", "content": "Hi"}], "extra_info": asked}
    trajectory, _ = await converse(["a", "b"], given, interactions={"recorder": Recorder({})})
    kwargs = {"mood": "calm"}
    assert Recorder.log == [
        ("start", kwargs),
        ("me", ["Hi", "a"], kwargs),
        ("me", ["Hi", "a", "Go on.", "b"], kwargs),
        ("finalize", "me"),
    ]
    assert trajectory.turn_rewards == [0.5, 0.5] and trajectory.termination == "stop"


async def test_a_user_that_raises_fails_its_conversation_and_is_finalized() -> None:
    Recorder.log.clear()
    asked = {"interaction_kwargs": {"name": "recorder", "angry": True}}
    given = {"prompt": [{"role": "user", "content": "Hi"}], "extra_info": asked}
    trajectory, _ = await converse(["a"], given, interactions={"recorder": Recorder({})})
    assert trajectory.termination == "error" and "not with me" in (trajectory.error or "")
    assert Recorder.log[-1] == ("finalize", "me")


class Gone(Interaction):
    async def generate_response(self, *_: Any, **__: Any) -> tuple[str, bool, float]:
        await asyncio.sleep(3600)
        raise AssertionError

    async def finalize(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(3600)


async def test_a_user_that_never_answers_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interaction, "RELEASE_TIMEOUT_S", 0.01)
    asked = {"interaction_kwargs": {"name": "gone"}}
    given = {"prompt": [{"role": "user", "content": "Hi"}], "extra_info": asked}
    users, limit = {"gone": Gone({})}, "rollout.trajectory_timeout_s=0.1"
    async with asyncio.timeout(120):
        trajectory, _ = await converse(["a"], given, limit, interactions=users)
    assert trajectory.termination == "timeout"


async def test_a_user_whose_reward_is_no_number_fails_its_conversation_alone() -> None:
    asked = {"interaction_kwargs": {"name": "recorder", "reward": math.nan}}
    given = {"prompt": [{"role": "user", "content": "Hi"}], "extra_info": asked}
    trajectory, _ = await converse(["a", "b"], given, interactions={"recorder": Recorder({})})
    assert trajectory.termination == "error" and trajectory.turn_rewards == [0.0]
    assert "generate_response() returned the reward nan" in (trajectory.error or "")


async def test_an_unknown_user_is_named() -> None:
    trajectory, _ = await converse(["1"], row(name="number_usr"))
    assert "no interaction 'number_usr'" in (trajectory.error or "")
    assert "did you mean 'number_user'" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected `interaction:`"),
        ("interaction: [{name: a}]", "entry 1: class_name: missing"),
        (
            "interaction: [{class_name: 'examples.guess_number.user:NumberUser'}]",
            "entry 1: name: missing",
        ),
        (
            "interaction: [{name: a, class_name: 'examples.guess_number.user:last_number'}]",
            "is not an Interaction class",
        ),
        (
            "interaction: [{name: a, class_name: 'minirl.agent_loop:Interaction'}]",
            "Interaction has no method `generate_response`",
        ),
        (
            "interaction: [{name: a, clas_name: b, class_name: c}]",
            "clas_name: no such key; did you mean 'class_name'",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "interaction.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_interactions(path)


def test_rows_are_json_and_the_same_for_a_seed() -> None:
    rows = prepare.make_rows(50, seed=3)
    assert rows == json.loads(json.dumps(prepare.make_rows(50, seed=3)))
    assert rows != prepare.make_rows(50, seed=4)
    numbers = {r["extra_info"]["interaction_kwargs"]["number"] for r in rows}
    assert numbers <= set(range(1, user.LARGEST + 1)) and len(numbers) > 10
