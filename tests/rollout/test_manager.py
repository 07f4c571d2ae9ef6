import asyncio
import gc
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from scripted_engine import ScriptedEngine, serving

from minirl.agent_loop import AgentLoopBase, ServerError, SingleTurnAgentLoop, register
from minirl.config import load_config
from minirl.journal import Header, Journal
from minirl.rewards import load_reward_manager, token_rewards
from minirl.rollout.client import AsyncLLMServerManager
from minirl.rollout.manager import AgentLoopManager, TooManyFailuresError, groups_for_training
from minirl.rollout.modes import MODES
from minirl.rollout.server import EngineLostError, ServerClient, ServerService
from minirl.rollout.weight_sync import WeightSync
from minirl.rollout.worker import AgentLoopWorker, LocalWorker
from minirl.testing import ScriptedServer, byte_tokenizer, make_context
from minirl.tools import BaseTool, ToolResponse
from minirl.tools.calculator import CalculatorTool
from minirl.tools.session import ToolSession
from minirl.types import GREEDY, TokenOutput, Trajectory
from minirl.waits import WAITS

TOKENIZER = byte_tokenizer()
SETTINGS = ["data.max_prompt_length=4096", "rollout.response_length=2048", "rollout.n=1"]


@dataclass
class Rollout:
    """A manager over a scripted engine, everything between them real."""

    manager: AgentLoopManager
    engine: ScriptedEngine
    client: ServerClient
    router: AsyncLLMServerManager

    @property
    def requests(self):
        return self.engine.script.requests

    def seeds(self, turn: int = 0) -> dict[str, int]:
        """By prompt, one sample of each."""
        asked = [r for r in self.requests if r.turn == turn]
        return {question(r.prompt_ids): r.sampling_params["seed"] for r in asked}


class Opener:
    """Opens rollouts in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, count()

    @asynccontextmanager
    async def __call__(
        self, replies: Any, *overrides: str, tools: Any = (), **options: Any
    ) -> AsyncIterator[Rollout]:
        engine = ScriptedEngine(ScriptedServer(TOKENIZER, replies, **options))
        async with serving(engine, self.folder / f"s{next(self.numbers)}") as client:
            router = AsyncLLMServerManager([client], max_sticky_sessions=9999, sticky_imbalance=4)
            context = make_context(engine.script, tools=tools, overrides=[*SETTINGS, *overrides])
            config = context.config
            context.server = pace = MODES.find(config.rollout.mode)(router)
            worker = AgentLoopWorker(
                config.rollout, context, load_reward_manager(config.reward, response_length=99)
            )
            workers = LocalWorker(worker, router, pace)
            manager = AgentLoopManager(config, workers, [client])
            yield Rollout(manager, engine, client, router)


@pytest.fixture
def open_rollout(tmp_path: Path) -> Opener:
    return Opener(tmp_path)


def prompts(number: int, **columns: Any) -> list[dict[str, Any]]:
    return [
        {
            "uid": f"0-{i}",
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "data_source": "calculator",
            "reward_model": {"ground_truth": str(i)},
            **columns,
        }
        for i in range(number)
    ]


def question(prompt_ids: list[int]) -> str:
    """The number of the question, out of the tokens."""
    found = re.search(r"question (\d+)", TOKENIZER.decode(prompt_ids))
    assert found
    return found[1]


def right(request_id: str, turn: int, prompt_ids: list[int]) -> str:
    return f"#### {question(prompt_ids)}"


def text(trajectory: Trajectory) -> str:
    return TOKENIZER.decode(trajectory.response_ids)


def random_delays(seed: int) -> Callable[[str, int], float]:
    numbers = Random(seed)
    return lambda request_id, turn: numbers.random() / 50


async def test_order_of_the_results(open_rollout: Opener) -> None:
    all_are_there = asyncio.Event()

    async def reply(*request: Any) -> str:
        if rollout.engine.most_running == 15:
            all_are_there.set()
        await all_are_there.wait()
        await asyncio.sleep(delay(*request[:2]))
        return right(*request)

    delay = random_delays(0)
    async with open_rollout(reply, "rollout.n=3") as rollout, asyncio.timeout(60):
        trajectories = await rollout.manager.generate_sequences(prompts(5), step=1)
    assert [(t.uid, t.sample_index) for t in trajectories] == [
        (f"0-{i}", k) for i in range(5) for k in range(3)
    ]
    for t in trajectories:
        number = t.uid.removeprefix("0-")
        assert (text(t), t.reward) == (f"#### {number}<|im_end|>", 1.0)
        assert (t.data_source, t.ground_truth, t.termination) == ("calculator", number, "stop")


async def test_the_same_seed_asks_the_same_whatever_the_timing(open_rollout: Opener) -> None:
    def two_turns(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        return CALL if turn == 0 else right(request_id, turn, prompt_ids)

    asked = []
    for timing in (1, 2):
        async with open_rollout(
            two_turns, "rollout.n=2", tools=[CalculatorTool({})], delay_s=random_delays(timing)
        ) as rollout:
            await rollout.manager.generate_sequences(prompts(6, agent_name="tool_agent"), step=3)
            order = [(r.prompt_ids, r.sampling_params["seed"]) for r in rollout.requests]
            asked.append(order)
    assert asked[0] != asked[1]  # another order
    assert sorted(asked[0]) == sorted(asked[1])  # of the same requests
    seeds = [seed for _, seed in asked[0]]
    assert len(set(seeds)) == len(seeds) == 6 * 2 * 2  # prompt, sample and turn have their own


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1"}}\n</tool_call>'


async def test_seeds_depend_on_step_and_run_seed_but_not_in_validation(
    open_rollout: Opener,
) -> None:
    async def seeds(step: int, *overrides: str, validate: bool = False) -> dict[str, int]:
        async with open_rollout(right, *overrides) as rollout:
            await rollout.manager.generate_sequences(prompts(3), step=step, validate=validate)
            return rollout.seeds()

    first = await seeds(1)
    assert await seeds(1) == first
    others = [await seeds(2), await seeds(1, "trainer.seed=1"), await seeds(1, validate=True)]
    for other in others:
        assert other.keys() == first.keys()
        assert not set(other.values()) & set(first.values())
    assert await seeds(9, validate=True) == others[2]  # comparable from step to step


async def test_training_and_validation_sample_differently(open_rollout: Opener) -> None:
    async with open_rollout(
        right, "rollout.n=2", "rollout.temperature=0.7",
        "rollout.val_kwargs={n: 3, temperature: 0.2, top_p: 0.9, top_k: 5}",
    ) as rollout:  # fmt: skip
        assert len(await rollout.manager.generate_sequences(prompts(1), step=1)) == 2
        training = rollout.requests[-1].sampling_params
        validated = await rollout.manager.generate_sequences(prompts(1), step=1, validate=True)
        validation = rollout.requests[-1].sampling_params
    assert [t.sample_index for t in validated] == [0, 1, 2]
    common = {"max_tokens": 2048, "stop_token_ids": [TOKENIZER.eos_token_id]}
    assert training == {"temperature": 0.7, "seed": training["seed"], **common}
    assert validation == {
        **common, "temperature": 0.2, "top_p": 0.9, "top_k": 5, "seed": validation["seed"],
    }  # fmt: skip


async def test_requests_go_without_seeds_when_told_so(open_rollout: Opener) -> None:
    async with open_rollout(right, "rollout.n=2", "rollout.seeded_sampling=false") as rollout:
        await rollout.manager.generate_sequences(prompts(2), step=1)
        await rollout.manager.generate_sequences(prompts(1), step=1, validate=True)
        params = [request.sampling_params for request in rollout.requests]
    assert len(params) > 4 and not any("seed" in given for given in params)


async def test_rows_choose_their_agent_loop(open_rollout: Opener) -> None:
    rows = [*prompts(1), *prompts(1, agent_name="tool_agent")]
    async with open_rollout(lambda *_: CALL, "rollout.max_failure_fraction=1") as rollout:
        single, tools = await rollout.manager.generate_sequences(rows, step=1)
    assert (single.num_turns, single.tool_calls) == (1, [])
    assert tools.num_turns > 1 and tools.tool_calls[0].status == "unknown_tool"


class EchoTool(BaseTool):
    """Says what it was told, slowly, and notes what it holds."""

    schema: ClassVar = {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "Say it again.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }

    def __init__(self, delay_s: Callable[[str], float]) -> None:
        super().__init__({})
        self.delay_s = delay_s
        self.held: dict[str, list[str]] = {}
        self.most_held = 0
        self.num_released = 0

    async def create(self, **kwargs: Any) -> str:
        instance_id = await super().create(**kwargs)
        self.held[instance_id] = []
        self.most_held = max(self.most_held, len(self.held))
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        heard = self.held[instance_id]
        heard.append(parameters["text"])
        await asyncio.sleep(self.delay_s(parameters["text"]))
        return ToolResponse(f"heard {parameters['text']} after {len(heard)}"), 0.25, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.held[instance_id]
        self.num_released += 1


def echo(words: str) -> str:
    arguments = f'{{"name": "echo", "arguments": {{"text": "{words}"}}}}'
    return f"<tool_call>\n{arguments}\n</tool_call>"


async def test_conversations_that_call_tools_at_once_never_mix(open_rollout: Opener) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        number = question(prompt_ids)
        # what is in the context so far belongs to this conversation alone
        assert set(re.findall(r"q(\d+)t", TOKENIZER.decode(prompt_ids))) <= {number}
        return echo(f"q{number}t{turn}") if turn < 3 else f"#### {number}"

    delays = Random(0)
    tool = EchoTool(lambda text: delays.random() / 50)
    async with open_rollout(reply, tools=[tool], delay_s=random_delays(1)) as rollout:
        trajectories = await rollout.manager.generate_sequences(
            prompts(24, agent_name="tool_agent"), step=1
        )
    assert tool.most_held > 2  # they did overlap
    assert tool.held == {} and tool.num_released == 24
    for i, t in enumerate(trajectories):
        assert [c.arguments for c in t.tool_calls] == [f'{{"text": "q{i}t{k}"}}' for k in range(3)]
        assert [c.result for c in t.tool_calls] == [
            f"heard q{i}t{k} after {k + 1}" for k in range(3)
        ]
        assert t.turn_rewards == [0.25, 0.25, 0.25, 0.0] and t.reward == 1.0
        observed = [x for x, mask in zip(t.response_ids, t.response_mask, strict=True) if not mask]
        sampled = [x for x, mask in zip(t.response_ids, t.response_mask, strict=True) if mask]
        assert TOKENIZER.decode(observed).count(f"heard q{i}t") == 3
        expected = [*(echo(f"q{i}t{k}") for k in range(3)), f"#### {i}"]
        assert TOKENIZER.decode(sampled) == "".join(f"{turn}<|im_end|>" for turn in expected)


async def test_cancellation_releases_tools_and_aborts_requests(open_rollout: Opener) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> Any:
        return echo(question(prompt_ids)) if turn == 0 else asyncio.sleep(3600, "never")

    tool = EchoTool(lambda text: 3600.0 if int(text) % 2 else 0.0)
    async with open_rollout(reply, tools=[tool]) as rollout:
        work = asyncio.create_task(
            rollout.manager.generate_sequences(prompts(6, agent_name="tool_agent"), step=1)
        )
        async with asyncio.timeout(120):
            while (await rollout.client.stats()).num_running < 3 or len(tool.held) < 6:
                pass  # three of them come to wait for the engine, three for their tool
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert tool.held == {} and tool.num_released == 6
        await rollout.client.stats()  # behind the aborts on the same socket
        assert len(rollout.engine.aborted) == 3


@register("fails_for")
class FailsFor(AgentLoopBase):
    """Fails for the rows that say so, after a turn; `attempts` counts by row."""

    attempts: ClassVar[dict[str, int]] = {}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        key = f"{row['uid']}/{row['sample_index']}"
        self.attempts[key] = self.attempts.get(key, 0) + 1
        trajectory = await self.start(row["raw_prompt"])
        await self.generate(trajectory, sampling_params)
        if self.attempts[key] <= row["num_failures"].get(str(row["sample_index"]), 0):
            trajectory.reward = 0.0
            raise ZeroDivisionError(f"planted in {row['uid']}")
        return self.finish(trajectory, "stop")


def failing(*num_failures: dict[str, int]) -> list[dict[str, Any]]:
    """One prompt per argument: by sample index, how often it fails."""
    FailsFor.attempts.clear()
    rows = prompts(len(num_failures), agent_name="fails_for")
    return [{**row, "num_failures": n} for row, n in zip(rows, num_failures, strict=True)]


def sizes(
    rows: list[dict[str, Any]], trajectories: list[Trajectory], *, num_wanted: int = 0
) -> dict[str, list[int]]:
    groups = groups_for_training(rows, trajectories, num_wanted=num_wanted)
    assert all(t.reward == 1.0 for group in groups for t in group.trajectories)
    assert all(group.row["uid"] == group.uid for group in groups)
    return {group.uid: [t.sample_index for t in group.trajectories] for group in groups}


async def test_a_failed_trajectory_is_masked_and_never_a_zero(
    open_rollout: Opener, caplog: Any
) -> None:
    rows = failing({"1": 9}, {}, {"0": 9, "1": 9, "2": 9})
    async with open_rollout(right, "rollout.n=3") as rollout:
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    told = "4 of 9 trajectories failed, most often (4 times) by ZeroDivisionError: planted in 0-0"
    assert told in caplog.messages
    failed = trajectories[1]
    assert failed.termination == "error" and "ZeroDivisionError: planted in 0-0" in failed.error
    assert text(failed) == "#### 0<|im_end|>"  # what was sampled until then is kept
    assert sizes(rows, trajectories) == {"0-0": [0, 2], "0-1": [0, 1, 2]}
    assert sizes(rows, trajectories, num_wanted=3) == {"0-1": [0, 1, 2]}
    assert set(FailsFor.attempts.values()) == {1}


async def test_retry_makes_further_attempts_with_other_seeds(open_rollout: Opener) -> None:
    rows = failing({"0": 2}, {"0": 9}, {})
    async with open_rollout(right, "rollout.on_failure=retry", "rollout.max_retries=2") as rollout:
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
        asked = [r.sampling_params["seed"] for r in rollout.requests]
    assert [t.termination for t in trajectories] == ["stop", "error", "stop"]
    assert FailsFor.attempts == {"0-0/0": 3, "0-1/0": 3, "0-2/0": 1}
    assert len(set(asked)) == len(asked) == 7


async def test_raise_ends_the_run_at_the_first_failure(open_rollout: Opener) -> None:
    rows = failing({"0": 1}, *[{}] * 9)
    async with open_rollout(right, "rollout.on_failure=raise") as rollout:
        with pytest.raises(TooManyFailuresError) as caught:
            await rollout.manager.generate_sequences(rows, step=1)
    assert "1 of 10 trajectories failed" in str(caught.value)
    assert "rollout.on_failure=raise" in str(caught.value)
    assert "ZeroDivisionError: planted in 0-0" in str(caught.value)


async def test_too_many_failures_end_the_run_with_the_most_frequent_cause(
    open_rollout: Opener, tmp_path: Path
) -> None:
    def setting(limit: str) -> Any:
        FailsFor.attempts.clear()
        return open_rollout(right, f"rollout.max_failure_fraction={limit}",
                            f"reward.custom_reward_function.path={reward}")  # fmt: skip

    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ground_truth in ('3', '4', '5'):\n"
        "        raise LookupError(f'no answer to {ground_truth}')\n"
        "    return 1.0\n"
    )
    rows = failing({"0": 9}, {"0": 9}, *[{}] * 6)
    async with setting("0.5") as rollout:
        with pytest.raises(TooManyFailuresError) as caught:
            await rollout.manager.generate_sequences(rows, step=1)
    message = str(caught.value)
    assert "5 of 8 trajectories failed" in message and "most often (3 times)" in message
    assert "LookupError: no answer to 3" in message and "reward.py" in message
    async with setting("0.625") as rollout:  # not more than that
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert sizes(rows, trajectories) == {
        "0-2": [0],
        "0-6": [0],
        "0-7": [0],
    }


@pytest.mark.parametrize("mode", list(MODES))
async def test_over_sampling_keeps_the_first_of_each_prompt_and_aborts_the_others(
    open_rollout: Opener, tmp_path: Path, mode: str
) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> Any:
        begun[question(prompt_ids)] += turn == 0
        return echo(question(prompt_ids)) if turn == 0 else f"#### {question(prompt_ids)}"

    def delay_s(words: str) -> float:
        in_tool[words] += 1
        return 3600.0 if mode == "async" and in_tool[words] == 3 else 0.0

    begun, in_tool = Counter[str](), Counter[str]()
    tool, rows = EchoTool(delay_s), prompts(4, agent_name="tool_agent")
    settings = "rollout.n=2", "rollout.over_sample_rate=0.5", f"rollout.mode={mode}"
    header = Header(step=1, weight_version=0, config="", files="", parameters=None, environment={})
    async with open_rollout(reply, *settings, tools=[tool]) as rollout, asyncio.timeout(120):
        journal = Journal.begin(tmp_path / "journal", header)
        trajectories = await rollout.manager.generate_sequences(rows, step=1, journal=journal)
        journal.close()
        assert rollout.manager.metrics["rollout/num_aborted"] == 4
        assert tool.held == {} and tool.num_released == sum(begun.values())
        assert set(begun.values()) == ({2} if mode == "serial" else {3})
        assert [len(kept) for kept in sizes(rows, trajectories).values()] == [2] * 4
        # what was killed and is begun again takes those that trained, and no other
        again = Journal.begin(tmp_path / "journal", header)
        repeated = await rollout.manager.generate_sequences(rows, step=1, journal=again)
        again.close()
        assert sum(begun.values()) == (8 if mode == "serial" else 12)
        assert sizes(rows, repeated) == sizes(rows, trajectories)
        await rollout.manager.generate_sequences(rows, step=1, validate=True)
        assert rollout.manager.metrics["rollout/num_aborted"] == 0


GATE = asyncio.Event()


async def behind_the_gate(*_: Any) -> float:
    """A reward."""
    await GATE.wait()
    return 1.0


async def test_what_is_aborted_at_a_barrier_is_not_sampled(open_rollout: Opener) -> None:
    """Of two prompts the first samples end at once, the others wait for them in the next turn."""

    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> Any:
        if turn:
            return asyncio.sleep(3600, "")
        begun[question(prompt_ids)] += 1
        return "#### 0" if begun[question(prompt_ids)] == 1 else CALL

    begun, rows = Counter[str](), prompts(2, agent_name="tool_agent")
    settings = [
        "rollout={mode: sync, over_sample_rate: 1}",
        "reward.custom_reward_function={path: test_manager, name: behind_the_gate}",
    ]
    async with open_rollout(reply, *settings, tools=[CalculatorTool({})]) as rollout:
        rolling = asyncio.create_task(rollout.manager.generate_sequences(rows, step=1))
        async with asyncio.timeout(120):
            while "2 for the other conversations" not in WAITS.report(0):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            GATE.set()
            assert [t.uid for t in await rolling] == ["0-0", "0-1"]
        await rollout.client.stats()  # behind the aborts
        assert rollout.engine.num_running == len(rollout.engine.aborted)


async def test_a_sample_more_makes_up_for_one_that_failed(open_rollout: Opener) -> None:
    rows = failing({"1": 9}, {"0": 9, "1": 9})
    async with open_rollout(right, "rollout.n=2", "rollout.over_sample_rate=0.1") as rollout:
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert sizes(rows, trajectories) == {"0-0": [0, 2], "0-1": [2]}
    assert sizes(rows, trajectories, num_wanted=2) == {"0-0": [0, 2]}  # on_failure=drop_group
    assert len(trajectories) == 6


async def test_samples_more_are_no_more_than_the_share(open_rollout: Opener) -> None:
    async with open_rollout(right, "rollout.n=100", "rollout.over_sample_rate=0.07") as rollout:
        assert len(rollout.manager._requests(prompts(1), 1, validate=False, greedy=False)) == 107


async def test_a_failure_in_the_journal_does_not_come_too_late(
    open_rollout: Opener, tmp_path: Path
) -> None:
    """The third of three samples failed before the two that are wanted had ended."""
    rows, path = failing({"2": 9}), tmp_path / "journal"
    header = Header(step=1, weight_version=0, config="", files="", parameters=None, environment={})
    for settings in (["rollout.n=3"], ["rollout.n=2", "rollout.over_sample_rate=0.5"]):
        journal = Journal.begin(path, header)
        async with open_rollout(right, *settings) as rollout:
            trajectories = await rollout.manager.generate_sequences(rows, step=1, journal=journal)
        journal.close()
        assert sizes(rows, trajectories) == {"0-0": [0, 1]}
    assert set(FailsFor.attempts.values()) == {1}


@register("clings_to_life")
class ClingsToLife(AgentLoopBase):
    """Goes on when it is cancelled, as careless code may."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        trajectory = await self.start(row["raw_prompt"])
        if row["sample_index"] == 0:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        await self.generate(trajectory, sampling_params)
        return self.finish(trajectory, "stop")


async def test_over_sampling_does_not_take_what_would_not_be_aborted(open_rollout: Opener) -> None:
    rows = prompts(2, agent_name="clings_to_life")
    async with open_rollout(right, "rollout.over_sample_rate=1") as rollout, asyncio.timeout(120):
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.sample_index for t in trajectories] == [1, 1]
    assert rollout.manager.metrics["rollout/num_aborted"] == 2


@register("cleans_up_badly")
class CleansUpBadly(AgentLoopBase):
    """Fails when it is cancelled, as one whose connection is gone may."""

    begun: ClassVar[list[int]]

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        self.begun.append(row["sample_index"])
        trajectory = await self.start(row["raw_prompt"])
        if row["sample_index"] == 0:
            try:
                await asyncio.sleep(3600 if self.begun.count(0) == 1 else 0)
            finally:
                raise ConnectionError("gone")
        await self.generate(trajectory, sampling_params)
        return self.finish(trajectory, "stop")


async def test_what_fails_as_it_is_aborted_is_not_tried_again(open_rollout: Opener) -> None:
    CleansUpBadly.begun = []
    settings = "rollout.over_sample_rate=1", "rollout.on_failure=retry", "rollout.max_retries=3"
    async with open_rollout(right, *settings) as rollout, asyncio.timeout(120):
        rows = prompts(1, agent_name="cleans_up_badly")
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.sample_index for t in trajectories] == [1]
    assert CleansUpBadly.begun == [0, 1]


@register("begins_or_ends")
class BeginsOrEnds(AgentLoopBase):
    """Asks for one turn; with `at_once` the first sample asks for none."""

    num_begun: ClassVar[int]

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        BeginsOrEnds.num_begun += 1
        trajectory = await self.start(row["raw_prompt"])
        if not row.get("at_once") or row["sample_index"]:
            await self.generate(trajectory, sampling_params)
        return self.finish(trajectory, "stop")


async def test_requests_go_out_before_all_conversations_have_begun(open_rollout: Opener) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        begun.append(BeginsOrEnds.num_begun)
        return "#### 0"

    BeginsOrEnds.num_begun, begun = 0, list[int]()
    async with open_rollout(reply) as rollout:
        rows = prompts(400, agent_name="begins_or_ends")
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.uid for t in trajectories] == [row["uid"] for row in rows]
    assert min(begun) < 200 and max(begun) == 400


@pytest.mark.parametrize("mode", list(MODES))
async def test_a_race_that_is_over_before_the_last_has_begun(
    open_rollout: Opener, mode: str
) -> None:
    BeginsOrEnds.num_begun, settings = 0, ["rollout.over_sample_rate=99", f"rollout.mode={mode}"]
    never = lambda request_id, turn: 3600.0
    async with open_rollout(right, *settings, delay_s=never) as rollout, asyncio.timeout(120):
        rows = prompts(1, agent_name="begins_or_ends", at_once=True)
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.sample_index for t in trajectories] == [0]
    assert rollout.manager.metrics["rollout/num_aborted"] == 99


async def test_a_timeout_is_no_zero_either(open_rollout: Opener) -> None:
    rows = prompts(2)
    delay = lambda request_id, turn: 0.0 if len(rollout.requests) == 1 else 3600.0
    settings = "rollout.trajectory_timeout_s=2", "rollout.max_failure_fraction=0.1"
    async with open_rollout(right, *settings, delay_s=delay) as rollout:
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.termination for t in trajectories] == ["stop", "timeout"]  # and that is no failure
    assert sizes(rows, trajectories) == {"0-0": [0]}
    assert sizes(rows, trajectories, num_wanted=1) == {"0-0": [0]}


@register("rewrites_history")
class RewritesHistory(AgentLoopBase):
    """Two stretches of one conversation."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Trajectory]:
        stretches = []
        for messages in ([{"role": "user", "content": "question 99"}], row["raw_prompt"]):
            trajectory = await self.start(messages)
            await self.generate(trajectory, sampling_params)
            stretches.append(self.finish(trajectory, "stop"))
        return stretches


async def test_stretches_of_one_conversation_share_its_reward(open_rollout: Opener) -> None:
    rows = prompts(2, agent_name="rewrites_history")
    async with open_rollout(right, "rollout.n=2") as rollout:
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
        seeds = {r.sampling_params["seed"] for r in rollout.requests}
    assert [text(t) for t in trajectories[:4]] == ["#### 99<|im_end|>", "#### 0<|im_end|>"] * 2
    assert [t.reward for t in trajectories] == [1.0] * 8
    assert len(seeds) == 8
    assert sizes(rows, trajectories) == {
        "0-0": [0, 0, 1, 1], "0-1": [0, 0, 1, 1],
    }  # fmt: skip


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "0":
        raise LookupError("planted")
    return {"score": len(solution_str), "acc": 1.0, "pred": "x"}
"""


async def test_a_reward_and_its_failure_are_those_of_every_stretch(
    open_rollout: Opener, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = prompts(2, agent_name="rewrites_history") + prompts(3)[2:]
    settings = [
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "rollout.max_failure_fraction=0.34",  # one of three conversations, two of five stretches
    ]
    async with open_rollout(right, *settings) as rollout:
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.termination for t in trajectories] == ["error", "error", "stop", "stop", "stop"]
    assert all("LookupError: planted" in (t.error or "") for t in trajectories[:2])
    score = len("#### 1")
    assert [(t.reward, t.answer, t.reward_breakdown) for t in trajectories[2:4]] == [
        (score, "x", {"acc": 1.0})
    ] * 2
    groups = groups_for_training(rows, trajectories)
    assert [group.uid for group in groups] == ["0-1", "0-2"]


@pytest.mark.parametrize("tool_reward", ["turn", "outcome", "log"])
def test_tools_give_the_greedy_rollout_what_they_give_the_others(tool_reward: Any) -> None:
    def ended(index: int) -> Trajectory:
        trajectory = Trajectory(prompt_ids=[0], uid="0-0", sample_index=index, reward=1.0)
        for reward in (0.5, 0.0):
            output = TokenOutput(token_ids=[1], logprobs=[-1.0], finish_reason="stop")
            trajectory.append_sampled(output)
            trajectory.turn_rewards[-1] = reward
        return trajectory

    both = [ended(0), ended(GREEDY)]
    [group] = groups_for_training(prompts(1), both, needs_greedy=True, tool_reward=tool_reward)
    assert group.greedy_reward == sum(token_rewards(group.trajectories[0], tool_reward))


CANCELLED_REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "0":
        grading = asyncio.ensure_future(asyncio.sleep(3600))
        grading.cancel()
        await grading
    return 1.0
"""

PANICKING_REWARD = """
class Panic(BaseException): pass
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "0":
        raise Panic("index out of bounds")
    return 1.0
"""


@pytest.mark.parametrize(
    ("reward", "words"),
    [(CANCELLED_REWARD, "CancelledError"), (PANICKING_REWARD, "Panic: index out of bounds")],
)
async def test_a_reward_that_cancels_itself_or_crashes_a_library_has_failed(
    open_rollout: Opener, tmp_path: Path, reward: str, words: str
) -> None:
    (tmp_path / "reward.py").write_text(reward)
    setting = f"reward.custom_reward_function.path={tmp_path}/reward.py"
    async with open_rollout(right, setting) as rollout:
        trajectories = await rollout.manager.generate_sequences(prompts(2), step=1)
    assert [(t.termination, t.reward) for t in trajectories] == [("error", None), ("stop", 1.0)]
    assert words in (trajectories[0].error or "")


@register("overflows")
class Overflows(AgentLoopBase):
    """Its second stretch has no room for an answer."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Trajectory]:
        first = await self.start(row["raw_prompt"])
        await self.generate(first, sampling_params)
        self.finish(first, "stop")
        await self.start([{"role": "user", "content": "x" * 5000}])
        return self.trajectories


async def test_a_conversation_that_ends_without_an_answer_is_scored_all_the_same(
    open_rollout: Opener,
) -> None:
    async with open_rollout(right) as rollout:
        rows = prompts(1, agent_name="overflows")
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.termination for t in trajectories] == ["stop", "prompt_too_long"]
    assert [t.reward for t in trajectories] == [0.0, 0.0]  # of an empty answer


async def test_a_rollout_without_a_sampled_token_is_told(open_rollout: Opener, caplog: Any) -> None:
    told = "no token was sampled: 3 of 3 trajectories ended by prompt_too_long"
    async with open_rollout(right, "data.max_prompt_length=5") as rollout:
        await rollout.manager.generate_sequences(prompts(3), step=1)
    assert told in caplog.messages


async def test_a_dead_engine_ends_the_rollout(open_rollout: Opener) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> Any:
        if question(prompt_ids) == "3":
            raise EngineLostError("the engine died")
        return asyncio.sleep(3600, "never")

    async with open_rollout(reply, "rollout.on_failure=retry") as rollout:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(120):
                await rollout.manager.generate_sequences(prompts(6), step=1)
    [error] = caught.value.exceptions
    assert isinstance(error, EngineLostError) and str(error) == "engine 0: the engine died"


async def test_what_a_rollout_measures(open_rollout: Opener) -> None:
    async with open_rollout(right, delay_s=0.01) as rollout:
        await rollout.manager.generate_sequences(prompts(4), step=1)
        first = dict(rollout.manager.metrics)
        await rollout.manager.generate_sequences(prompts(2), step=2)
        await rollout.manager.sleep(level=2)
    assert first["rollout/requests/server_0"] == 4
    assert rollout.manager.metrics["rollout/requests/server_0"] == 2  # of this rollout alone
    assert first["rollout/tokens_per_s"] > 0
    assert first["rollout/prefix_cache_hit_rate"] == first["rollout/num_moves"] == 0
    assert first["rollout/loop_lag_max_s"] >= 0
    assert rollout.engine.calls == [("sleep", 2)]


class Diary:
    """What began and ended, in order: generating (g) and the calculator (t)."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def reply(self, request_id: str, turn: int, prompt_ids: list[int]) -> str:
        """As many calls as the number of the question says, then the answer."""
        self.lines.append(f"g{turn} begins")
        number = int(question(prompt_ids))
        await asyncio.sleep(0.001 * (number + 1))
        self.lines.append(f"g{turn} ends")
        return CALL if turn < number else f"#### {number}"

    def tool(self) -> BaseTool:
        lines = self.lines

        class Calculator(CalculatorTool):
            async def execute(self, *args: Any, **kwargs: Any) -> Any:
                lines.append("t begins")
                await asyncio.sleep(0.002)
                lines.append("t ends")
                return await super().execute(*args, **kwargs)

        return Calculator({})


async def run_mode(open_rollout: Opener, mode: str) -> tuple[list[str], list[str]]:
    diary = Diary()
    async with open_rollout(diary.reply, f"rollout.mode={mode}", tools=[diary.tool()]) as rollout:
        rows = prompts(4, agent_name="tool_agent")
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.reward for t in trajectories] == [1, 1, 1, 1]
    return diary.lines, [text(t) for t in trajectories]


async def test_every_mode_gives_the_same_trajectories(open_rollout: Opener) -> None:
    (_, first), *others = [await run_mode(open_rollout, mode) for mode in MODES]
    assert [texts for _, texts in others] == [first] * (len(list(MODES)) - 1)


async def test_sync_has_a_barrier_before_and_after_every_turn(open_rollout: Opener) -> None:
    lines, _ = await run_mode(open_rollout, "sync")
    phases = [phase for phase, _ in groupby(line.split()[0] for line in lines)]
    assert phases == ["g0", "t", "g1", "t", "g2", "t", "g3"]


class Name(str):
    """Of a conversation; notes how often any is looked at."""

    num_looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        Name.num_looks += 1
        return super().__hash__()


async def test_a_barrier_does_not_count_all_who_wait_at_each_that_comes() -> None:
    async def generate(*_: Any, **__: Any) -> None: ...

    barrier: Any = MODES.find("sync")(SimpleNamespace(generate=generate))
    barrier.begin(100)
    turns = (barrier.generate(Name(i), prompt_ids=[], sampling_params={}) for i in range(100))
    async with asyncio.timeout(120):
        await asyncio.gather(*turns)
    assert 100 <= Name.num_looks < 1000


async def test_serial_runs_one_conversation_after_another(open_rollout: Opener) -> None:
    lines, _ = await run_mode(open_rollout, "serial")
    expected = []
    for number in range(4):
        for turn in range(number + 1):
            expected += [f"g{turn} begins", f"g{turn} ends"]
            expected += ["t begins", "t ends"] if turn < number else []
    assert lines == expected


async def test_async_waits_for_nobody(open_rollout: Opener) -> None:
    """The first turn of one conversation ends after another one has called its tool."""
    called = asyncio.Event()

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        number = question(prompt_ids)
        if number == "0":
            await called.wait()
        return CALL if number == "1" and turn == 0 else f"#### {number}"

    class Calculator(CalculatorTool):
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            called.set()
            return await super().execute(*args, **kwargs)

    async with open_rollout(reply, tools=[Calculator({})]) as rollout:
        rows = prompts(2, agent_name="tool_agent")
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.num_turns for t in trajectories] == [1, 2]


@pytest.mark.parametrize("mode", ["sync", "serial"])
async def test_a_failing_or_hanging_conversation_holds_nobody_up(
    open_rollout: Opener, mode: str
) -> None:
    settings = f"rollout.mode={mode}", "rollout.trajectory_timeout_s=2"
    async with open_rollout(right, *settings) as rollout:
        rows = prompts(4)
        rows[1]["agent_name"], rows[2]["agent_name"] = "hangs_between_turns", "raises_at_once"
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.termination for t in trajectories] == ["stop", "timeout", "error", "stop"]


@register("hangs_between_turns")
class HangsBetweenTurns(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        trajectory = await self.start(row["raw_prompt"])
        await self.generate(trajectory, sampling_params)
        await asyncio.sleep(3600)
        return trajectory


@register("raises_at_once")
class RaisesAtOnce(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        raise LookupError("at once")


async def test_a_rollout_that_stands_still_says_who_waits_for_what(
    open_rollout: Opener, caplog: Any
) -> None:
    """One conversation hangs in a tool and one in the engine; the third ends."""
    hang = asyncio.Event()

    class Slow(CalculatorTool):
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            await hang.wait()
            return await super().execute(*args, **kwargs)

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if question(prompt_ids) == "1":
            await hang.wait()
        return CALL if turn == 0 and question(prompt_ids) == "0" else "#### 0"

    async def watch() -> str:
        while True:
            for record in caplog.records:
                if "engine 0" in record.getMessage() and "calculator" in record.getMessage():
                    hang.set()
                    return record.getMessage()
            await asyncio.sleep(0.02)

    async with open_rollout(reply, tools=[Slow({})]) as rollout:
        rows = prompts(3, agent_name="tool_agent")
        watching = asyncio.create_task(watch())
        with WAITS.explained(0.1):
            await rollout.manager.generate_sequences(rows, step=1)
        message = await watching
    assert "1 for tool 'calculator': 0-0/0 (" in message
    assert "1 for generation on engine 0: 0-1/0 (" in message
    assert "0-2/0" not in message


@register("cannot_be_made")
class CannotBeMade(SingleTurnAgentLoop):
    def __init__(self, context: Any) -> None:
        raise LookupError("not today")


@register("has_no_run")
class HasNoRun(AgentLoopBase): ...


async def test_an_agent_loop_that_cannot_be_made_is_its_trajectorys_failure(
    open_rollout: Opener,
) -> None:
    async with open_rollout(right) as rollout:
        rows = prompts(6)
        rows[1]["agent_name"], rows[2]["agent_name"] = "cannot_be_made", "has_no_run"
        trajectories = await rollout.manager.generate_sequences(rows, step=1)
    assert [t.termination for t in trajectories] == ["stop", "error", "error", *["stop"] * 3]
    assert "not today" in (trajectories[1].error or "") and trajectories[1].uid == "0-1"
    assert re.search("abstract class HasNoRun .*run", trajectories[2].error or "")


async def test_at_a_barrier_each_conversation_waits_under_its_own_name(
    open_rollout: Opener,
) -> None:
    reports = []

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if rollout.engine.most_running < 3:
            await asyncio.sleep(0)
        reports.append(WAITS.report(0))
        return right(request_id, turn, prompt_ids)

    async with open_rollout(reply, "rollout.mode=sync") as rollout:
        await rollout.manager.generate_sequences(prompts(3), step=1)
    seconds = r" \(\d+ s\)"
    expected = "3 for generation on engine 0: 0-0/0, 0-1/0, 0-2/0"
    assert expected in [re.sub(seconds, "", report) for report in reports]


JUDGED = """reward:
  custom_reward_function: {path: minirl.rewards.judge, name: Judge}
  reward_kwargs: {base_url: policy, prompt: "{solution_str}", pattern: '(\\d+)', max_concurrency: 1}
"""


async def test_a_judge_does_not_wait_for_conversations_that_wait_for_it(
    open_rollout: Opener, tmp_path: Path
) -> None:
    """Three are scored, by one request at a time, while no turn begins."""
    judged = tmp_path / "judged.yaml"
    judged.write_text(JUDGED)
    reply = lambda *_: "#### 4"
    async with open_rollout(reply, "rollout.mode=sync", str(judged)) as rollout:
        async with asyncio.timeout(120):
            trajectories = await rollout.manager.generate_sequences(prompts(3), step=1)
    assert [t.reward for t in trajectories] == [4.0] * 3


async def test_an_engine_that_does_not_go_to_sleep_is_lost(
    open_rollout: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "sleep", lambda self, level: asyncio.sleep(3600))
    async with open_rollout(right, "rollout.engine_timeout_s=0.2") as rollout:
        with pytest.raises(EngineLostError, match=r"for the engines to sleep for more than 0.2 s"):
            await rollout.manager.sleep(level=2)


async def test_an_engine_that_does_not_wake_up_is_lost(
    open_rollout: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "wake_up", lambda self: asyncio.sleep(3600))
    async with open_rollout(right, "rollout.engine_timeout_s=0.2") as rollout:
        with pytest.raises(EngineLostError, match=r"engines to wake up for more than 0.2 s"):
            async with asyncio.timeout(120):
                await rollout.manager.wake_up()


async def test_an_engine_that_does_not_begin_a_weight_sync_is_lost(
    open_rollout: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_trainer(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    hangs = lambda self, init_info: asyncio.sleep(3600)
    monkeypatch.setattr(ScriptedEngine, "init_weight_transfer", hangs)
    config = load_config(["model.path=none", "rollout.engine_timeout_s=0.2"])
    world: Any = SimpleNamespace(device=torch.device("cpu"), group=0)
    weights: Any = SimpleNamespace(num_bytes=64)
    async with open_rollout(right) as rollout:
        sync = WeightSync(config, world, rollout.engine, on_trainer, vocab_size=1)
        with pytest.raises(EngineLostError, match=r"engine 0 to map the buffer .* than 0.2 s"):
            async with asyncio.timeout(120):
                await sync(weights, 1)
        await sync.close()


async def test_a_trajectory_knows_when_and_where_everything_happened(open_rollout: Opener) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        return "#### 0" if turn else CALL

    async with open_rollout(reply, tools=[CalculatorTool({})]) as rollout:
        rows = prompts(1, agent_name="tool_agent")
        [trajectory] = await rollout.manager.generate_sequences(rows, step=1)
    first, second = trajectory.turns
    [call] = trajectory.tool_calls
    assert call.start is not None
    names = [reward.name for reward in trajectory.rewards]
    assert names == ["tool/calculator", "outcome"] and trajectory.rewards[1].value == 1.0
    times = [
        trajectory.start, first.start, first.end, call.start, call.start + call.seconds,
        second.start, second.end,
        *[time for reward in trajectory.rewards for time in (reward.start, reward.end)],
        trajectory.end,
    ]  # fmt: skip
    assert times == sorted(times, key=float)
    assert [turn.server for turn in trajectory.turns] == [0, 0]


@pytest.mark.parametrize("num_failing", [0, 5])
async def test_nothing_of_a_rollout_is_left(open_rollout: Opener, num_failing: int) -> None:
    def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if turn < 2:
            return CALL
        if int(question(prompt_ids)) < num_failing:
            raise ZeroDivisionError("of the script")
        return "#### 2"

    async def roll_out(rollout: Rollout) -> None:
        rows = prompts(20, agent_name="tool_agent")
        if num_failing:
            with pytest.raises(ExceptionGroup) as caught:
                await rollout.manager.generate_sequences(rows, step=1)
            assert caught.group_contains(ServerError, match="of the script")
        else:
            trajectories = await rollout.manager.generate_sequences(rows, step=1)
            assert [t.num_turns for t in trajectories] == [3] * 60
            assert not rollout.router._sessions and not rollout.router._homes

    async with open_rollout(reply, "rollout.n=3", tools=[CalculatorTool({})]) as rollout:
        await roll_out(rollout)
        while (await rollout.client.stats()).num_running:  # what was aborted
            pass
        [service] = living(ServerService, AgentLoopBase, ToolSession, Trajectory)
        assert WAITS.report(0.0) == "" and rollout.client._pending == {}
        assert service._running == {} and set(rollout.router._load.values()) == {0}


def living(*kinds: type) -> list[Any]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), kinds)]
