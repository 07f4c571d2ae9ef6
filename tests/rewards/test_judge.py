"""The judge, over the policy's own endpoint and somebody else's."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAIError

from minirl.config import ConfigError, CustomRewardConfig, RewardConfig, load_config
from minirl.openai.endpoint import POLICY
from minirl.rewards import load_reward_function, load_reward_manager
from minirl.rollout.worker import AgentLoopWorker, SampleRequest
from minirl.testing import ScriptedServer, byte_tokenizer, make_context

TOKENIZER = byte_tokenizer()
EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent" / "judge.yaml"
OPTIONS = {
    "base_url": "policy",
    "prompt": "{extra_info[question]}? {solution_str}. Right: {ground_truth}",
    "pattern": r"Grade: (\d+)",
}
SOLVED = ("calculator", "It is 4", "4", {"question": "2 + 2"})


def reward(**options: Any) -> RewardConfig:
    function = CustomRewardConfig(path="minirl.rewards.judge", name="Judge")
    return RewardConfig(custom_reward_function=function, reward_kwargs={**OPTIONS, **options})


@pytest.fixture
async def script() -> AsyncIterator[ScriptedServer]:
    """The policy, served as `policy` to whatever the test calls."""
    script = ScriptedServer(TOKENIZER, lambda *_: "Grade: 1, no: Grade: 7")
    context = make_context(script)
    token = POLICY.set(context.endpoint)
    yield script
    POLICY.reset(token)
    await context.endpoint.aclose()


async def test_the_last_grade_counts(script: ScriptedServer) -> None:
    sampling = {"temperature": 0.25, "max_tokens": 30}
    score = load_reward_function(reward(scale=0.1, sampling=sampling))
    assert await score(*SOLVED) == pytest.approx(0.7)
    [request] = script.requests
    assert "user\n2 + 2? It is 4. Right: 4<|im_end|>" in TOKENIZER.decode(request.prompt_ids)
    assert request.sampling_params["temperature"] == 0.25


async def test_a_judge_elsewhere(script: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    own = await POLICY.get().access()  # stands for it
    monkeypatch.setenv("JUDGE_KEY", own.api_key)
    there = {"base_url": own.base_url, "model": "judge", "api_key_env": "JUDGE_KEY"}
    assert await load_reward_function(reward(**there))(*SOLVED) == 7
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with pytest.raises(OpenAIError, match="401 - wrong api_key"):
        await load_reward_function(reward(**there))(*SOLVED)


async def test_no_grade_is_a_failure(script: ScriptedServer) -> None:
    script.replies = ["I cannot say."]
    with pytest.raises(ValueError, match=r"gave no 'Grade: .*I cannot say"):
        await load_reward_function(reward())(*SOLVED)


@pytest.mark.parametrize("replies", [["#### 4", "Yes. Grade: 1"], ["#### 4", "Who knows."]])
async def test_the_example_over_a_whole_trajectory(replies: list[str]) -> None:
    config = load_config([str(EXAMPLE), "model.path=scripted"])
    turns = iter(replies)
    script = ScriptedServer(TOKENIZER, lambda *_: next(turns))  # the judge is another conversation
    context = make_context(script, overrides=[str(EXAMPLE), "data.max_prompt_length=2048"])
    manager = load_reward_manager(config.reward, response_length=99)
    worker = AgentLoopWorker(context.config.rollout, context, manager)
    row = {"uid": "0-0", "prompt": [{"role": "user", "content": "2 + 2"}], "data_source": "x"}
    row["reward_model"] = {"ground_truth": "4"}
    [trajectory] = await worker.run(
        SampleRequest(row=row, sample_index=0, seed=1, sampling_params={"temperature": 1.0})
    )
    await worker.aclose()
    graded = "Grade" in replies[1]
    assert (trajectory.reward, trajectory.num_turns) == (1.0 if graded else None, 1)
    assert trajectory.termination == ("stop" if graded else "error")  # no made-up zero


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pattern": "Grade"}, "pattern: got 'Grade'; its first group must be the grade"),
        ({"pattern": "("}, "pattern: .*not a regular expression"),
        ({"prompt": "{solution}"}, "prompt: no field 'solution'; did you mean 'solution_str'"),
        ({"prompt": "Grade this."}, "prompt: it does not show"),
        ({"prompt": "{solution_str} {"}, "prompt: .*write {{ and }} for braces"),
        ({"base_url": "http://x/v1"}, "model: missing"),
        ({"base_url": "http://x/v1", "model": "m", "api_key_env": "NO_KEY"}, "NO_KEY is not set"),
        ({"max_concurrency": 0}, "max_concurrency: got 0; no request could be made"),
        ({"modell": "m"}, "modell: .*did you mean 'model'"),
    ],
)
def test_options_are_checked_at_start(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.reward_kwargs.*{problem}"):
        load_reward_function(reward(**options))


def test_a_missing_option_and_a_manager_that_cannot() -> None:
    config = reward()
    del config.reward_kwargs["prompt"]
    with pytest.raises(ConfigError, match=r"reward_kwargs: .*'prompt'"):
        load_reward_function(config)
    function = CustomRewardConfig(path="minirl.rewards.judge", name="Judge")
    prime = RewardConfig(
        custom_reward_function=function, reward_kwargs=OPTIONS, reward_manager="prime"
    )
    with pytest.raises(ConfigError, match=r"reward_manager: got 'prime'; .*write naive or dapo"):
        load_reward_manager(prime, response_length=9)


async def test_a_batch_is_no_solution(script: ScriptedServer) -> None:
    with pytest.raises(TypeError, match="reward_manager naive or dapo"):
        await load_reward_function(reward())(["x"], ["It is 4"], ["4"], [{}])  # type: ignore
