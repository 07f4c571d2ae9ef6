import pytest

from minirl.chat import ChatBuilder
from minirl.config import ConfigError, CPOConfig
from minirl.hints import hinted_prompts, load_hint, with_hint
from minirl.testing import byte_tokenizer
from minirl.tools.calculator import CalculatorTool
from minirl.types import Group, ToolCallRecord, Trajectory

QUESTION = [{"role": "user", "content": "6 * 7?"}]
ROW = {"uid": "0-3", "prompt": QUESTION, "reward_model": {"ground_truth": "42"}}


def answered(reward, **fields):
    return Trajectory(prompt_ids=[], reward=reward, **({"termination": "stop"} | fields))


async def test_default_hint_is_the_answer_and_each_remark_once():
    failed = ToolCallRecord(
        turn=0, name="calculator", arguments="", result="error: 6 *", status="error"
    )
    trajectories = [
        answered(1.0, answer="42"),
        answered(0.9, answer="42", reward_breakdown={"score": 1.0, "overlong_reward": -0.1}),
        answered(0.0, answer="41"),
        answered(0.0, answer="41"),
        answered(0.0, termination="response_length"),
        answered(0.0, tool_calls=[failed]),
        answered(None, termination="error"),
    ]
    assert await load_hint(CPOConfig())(ROW, trajectories) == (
        "Hint: the correct answer is 42. The answer 41 is wrong. An earlier attempt was cut off "
        "before it had answered: be brief. In an earlier attempt the call of calculator failed: "
        "error: 6 *"
    )


async def test_a_row_without_a_ground_truth_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.cpo\.hint_fn: .* row 0-9, which has no"):
        await load_hint(CPOConfig())({"uid": "0-9", "prompt": QUESTION}, [])


def plain_hint(row, trajectories):
    return f"{len(trajectories)} tried"


async def a_judge(row, trajectory):
    return f"reward {trajectory.reward}"


def a_decorated_judge(row, trajectory):
    return a_judge(row, trajectory)


async def test_functions_of_the_user_plain_or_async():
    hint = load_hint(CPOConfig(hint_fn=f"{__name__}:plain_hint"))
    assert await hint(ROW, [answered(0.0)]) == "1 tried"
    hint = load_hint(CPOConfig(judge_fn=f"{__name__}:a_judge"))
    assert await hint(ROW, [answered(0.25)]) == "Hint: the correct answer is 42. reward 0.25"
    hint = load_hint(CPOConfig(judge_fn=f"{__name__}:a_decorated_judge"))
    assert await hint(ROW, [answered(0.25)]) == "Hint: the correct answer is 42. reward 0.25"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CPOConfig(hint_fn="ground_trut"), r"cpo\.hint_fn: .*did you mean 'ground_truth'"),
        (CPOConfig(judge_fn="nowhere:judge"), r"cpo\.judge_fn: judge 'nowhere:judge': no module"),
    ],
)
def test_unknown_names(config, message):
    with pytest.raises(ConfigError, match=message):
        load_hint(config)


def test_the_hint_goes_to_the_last_message_of_the_user():
    messages = [*QUESTION, {"role": "assistant", "content": "?"}, {"role": "user", "content": "!"}]
    hinted = with_hint([*messages, {"role": "assistant", "content": "prefix"}], "Hint.")
    assert [m["content"] for m in hinted] == ["6 * 7?", "?", "!\n\nHint.", "prefix"]
    assert messages[2]["content"] == "!"
    parts = with_hint([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "b")
    assert [part["text"] for part in parts[0]["content"]] == ["a", "b"]


@pytest.mark.parametrize("with_tools", [False, True])
async def test_prompts_are_rendered_as_the_agent_loop_did(with_tools):
    chat, tools = ChatBuilder(byte_tokenizer()), {"calculator": CalculatorTool({})}
    schemas = [tools["calculator"].tool_schema] if with_tools else None
    trajectory = answered(0.0, answer="41")
    trajectory.prompt_ids = chat.prompt(QUESTION, schemas)
    group = Group(uid="0-3", row=ROW, trajectories=[trajectory])
    [[prompt]] = await hinted_prompts([group], load_hint(CPOConfig()), chat, tools)
    hint = "Hint: the correct answer is 42. The answer 41 is wrong."
    assert prompt == chat.prompt([{"role": "user", "content": f"6 * 7?\n\n{hint}"}], schemas)
    trajectory.prompt_ids = trajectory.prompt_ids[1:]
    with pytest.raises(ValueError, match=r"the prompt of row 0-3 cannot be rendered again"):
        await hinted_prompts([group], load_hint(CPOConfig()), chat, tools)
