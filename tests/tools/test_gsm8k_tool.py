from pathlib import Path

import pytest

from minirl.tools import load_tools
from minirl.tools.gsm8k import Gsm8kTool

RECIPE = Path(__file__).parents[2] / "examples" / "gsm8k_tool"


async def submit(tool, *answers, truth="18"):
    """The texts and rewards of some calls, and the reward of all of them."""
    instance = await tool.create(ground_truth=truth)
    calls = [await tool.execute(instance, {"answer": answer}) for answer in answers]
    total = await tool.calc_reward(instance)
    await tool.release(instance)
    return [response.text for response, _, _ in calls], [reward for _, reward, _ in calls], total


@pytest.mark.parametrize(
    ("answers", "rewards", "total"),
    [
        (["18"], [0.0], 1.0),
        (["17"], [-0.05], 0.0),
        (["17", "18"], [-0.05, 0.0], 1.0),
        (["18", "18"], [0.0, -0.05], 1.0),
        (["18", "17", "18"], [0.0, -0.05, -0.05], 1.0),  # going back and forth earns nothing
        (["#### 18"], [0.0], 1.0),
        (["$18.00"], [0.0], 1.0),
        (["so 3 * 6 = 18 apples"], [0.0], 1.0),
        (["eighteen"], [-0.05], 0.0),
        ([""], [-0.05], 0.0),
    ],
)
async def test_rewards(answers, rewards, total):
    _, got, got_total = await submit(Gsm8kTool({}), *answers)
    assert (got, got_total) == (rewards, total)


async def test_what_the_model_is_told():
    texts, _, _ = await submit(Gsm8kTool({}), "17", "18")
    assert texts == [
        "Current parsed answer='17' reward=0.0",
        "Current parsed answer='18' reward=1.0",
    ]


async def test_conversations_are_apart_and_forgotten():
    tool = Gsm8kTool({})
    first, second = await tool.create(ground_truth="1"), await tool.create("mine", ground_truth=2)
    await tool.execute(first, {"answer": "1"})
    assert second == "mine"
    assert (await tool.calc_reward(first), await tool.calc_reward(second)) == (1.0, 0.0)
    await tool.release(first)
    await tool.release(second)
    assert not tool._submissions


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"no extra_info\.tools_kwargs\.calc_gsm8k_reward\.create_kwargs\.ground_truth"),
        ({"ground_truth": "x"}, "got 'x'; expected a number"),
    ],
)
async def test_a_row_without_a_ground_truth(kwargs, message):
    tool = Gsm8kTool({})
    with pytest.raises(ValueError, match=message):
        await tool.create(**kwargs)
    assert not tool._submissions


def test_the_schema_of_the_recipe_and_the_one_without_a_file_ask_for_the_same():
    [shipped] = load_tools(RECIPE / "tools.yaml").values()
    assert isinstance(shipped, Gsm8kTool) and shipped.name == Gsm8kTool({}).name
    for tool in (shipped, Gsm8kTool({})):
        assert "'answer' is a required property" in tool.find_problem({})
        assert tool.find_problem({"answer": "4"}) is None
