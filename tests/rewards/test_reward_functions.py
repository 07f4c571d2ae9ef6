import functools
import threading

import pytest

from minirl.config import ConfigError, CustomRewardConfig, RewardConfig
from minirl.rewards import load_reward_function

ROW = ("calculator", "#### 4", "4", {"index": 7})


def on_thread(data_source, solution_str, ground_truth, extra_info, *, scale=1.0):
    return {"score": scale, "main": threading.current_thread() is threading.main_thread()}


async def on_loop(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": 1, **kwargs, **extra_info}


@functools.wraps(on_loop)
def decorated(*arguments, **kwargs):
    return on_loop(*arguments, **kwargs)


class OnLoop:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return {"score": 2}


an_object = OnLoop()


class Needy:
    """Takes for granted what the environment holds."""

    def __init__(self):
        self.key = {}["NO_SUCH"]


class Mute:
    """Cannot be called."""


def two(solution_str, ground_truth):
    return 1.0


def swapped(solution_str, ground_truth, data_source="", extra_info=None):
    return 1.0


not_a_function = 3


def custom(path, name="compute_score", **kwargs):
    function = CustomRewardConfig(path=str(path), name=name)
    return RewardConfig(custom_reward_function=function, reward_kwargs=kwargs)


@pytest.mark.parametrize("data_source", ["calculator", "openai/gsm8k"])
async def test_by_data_source(data_source):
    score = load_reward_function(RewardConfig(reward_kwargs={"format_score": 0.2}))
    assert await score(data_source, "#### 4", "4", {}) == {"score": 1.0, "pred": "4"}
    assert await score(data_source, "#### 5", "4", {}) == {"score": 0.2, "pred": "5"}
    assert await score(data_source, "four", "4", {}) == {"score": 0.0, "pred": None}


async def test_unknown_data_source_and_option():
    with pytest.raises(ValueError, match="'calculater'; did you mean 'calculator'"):
        await load_reward_function(RewardConfig())("calculater", "", "4", {})
    with pytest.raises(ConfigError, match=r"reward_kwargs.formt_score: .*'format_score'"):
        load_reward_function(RewardConfig(reward_kwargs={"formt_score": 1}))


async def test_functions_of_a_module():
    plain = load_reward_function(custom("test_reward_functions", "on_thread", scale=3.0))
    assert await plain(*ROW) == {"score": 3.0, "main": False}
    coroutine = load_reward_function(custom("test_reward_functions", "on_loop", bonus=2))
    assert await coroutine(*ROW) == {"score": 1, "bonus": 2, "index": 7}


@pytest.mark.parametrize(("name", "score"), [("decorated", 1), ("an_object", 2), ("OnLoop", 2)])
async def test_what_is_async_without_being_an_async_function(name, score):
    result = await load_reward_function(custom("test_reward_functions", name))(*ROW)
    assert result["score"] == score


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def compute_score(:", "line 1: SyntaxError: invalid syntax"),
        ("\nimport no_such_module\n", "line 2: ModuleNotFoundError: No module named 'no_such"),
        ("import os\n\nKEY = os.environ['NO_SUCH']\n", "line 3: KeyError: 'NO_SUCH'"),
        ("import json\n\njson.loads('{no')\n", "line 3: JSONDecodeError: "),
        ("import sys\nsys.exit('set a key first')\n", "line 2: SystemExit: set a key first"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, source, message):
    path = tmp_path / "broken_reward.py"
    path.write_text(source)
    with pytest.raises(
        ConfigError, match=r"function\.path: .*broken_reward.py cannot be"
    ) as caught:
        load_reward_function(custom(path))
    assert message in str(caught.value)


def test_a_module_or_a_class_that_raises(tmp_path, monkeypatch):
    (tmp_path / "raising_reward.py").write_text("def compute_score(): ...\nundefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"function 'raising_reward:.* cannot be .*NameError: "):
        load_reward_function(custom("raising_reward"))
    with pytest.raises(ConfigError, match=r"function: Needy: KeyError: 'NO_SUCH'"):
        load_reward_function(custom("test_reward_functions", "Needy"))


async def test_function_of_a_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1):\n"
        "    return weight * float(solution_str == ground_truth)\n"
    )
    score = load_reward_function(custom(path, weight=5))
    assert await score("x", "a", "a", {}) == 5.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (custom("/nowhere/reward.py"), r"custom_reward_function.path: got '/nowhere/reward.py'"),
        (custom("nowhere.reward"), "no module 'nowhere'"),
        (custom("test_reward_functions", "on_lop"), "did you mean 'on_loop'"),
        (custom(__file__, "on_lop"), "custom_reward_function.name: .*did you mean 'on_loop'"),
        (custom("test_reward_functions", "not_a_function"), "is not a function"),
        (custom("test_reward_functions", "two"), "function.name: it cannot .*too many positional"),
        (custom("test_reward_functions", "swapped"), "its solution_str would get data_source; wr"),
        (custom("test_reward_functions", "Mute"), "it cannot be called with .*not a callable"),
        (custom("test_reward_functions", "on_thread", scal=1), "reward_kwargs.scal: .*'scale'"),
        (custom("test_reward_functions", "on_thread", extra_info=1), "reward_kwargs.extra_info"),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        load_reward_function(config)
