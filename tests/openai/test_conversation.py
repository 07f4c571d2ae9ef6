"""Token streams behind OpenAI's own client: what continues one, what begins another, what ends."""

import asyncio
import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from talks import ADD, ASK, TOKENIZER, Talk, call, refused, sampled, talking, text

TWO_CALLS = f"<think>\nhm\n</think>\nI add.\n{call('add', a=1, b='ü')}\n{call('add', a=2)}"


def results(message: Any, *values: str) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    return [
        {"role": "tool", "tool_call_id": c.id, "content": v}
        for c, v in zip(calls, values, strict=True)
    ]


async def test_a_conversation_with_parallel_calls_is_one_stream() -> None:
    async with talking([TWO_CALLS, call("add", a=3), "#### 42"]) as talk:
        messages: list[Any] = [{"role": "system", "content": "Add."}, ASK]
        first = await talk.say(messages, tools=[ADD])
        assert first.content == "<think>\nhm\n</think>\nI add."
        arguments = [json.loads(c.function.arguments) for c in first.tool_calls]
        assert arguments == [{"a": 1, "b": "ü"}, {"a": 2}]
        messages += results(first, "one", "two <|im_end|>")
        second = await talk.say(messages, tools=[ADD])
        assert second.content is None and second.tool_calls[0].function.name == "add"
        messages += results(second, "three")
        completion = await talk.ask(messages, tools=[ADD])
        assert completion.choices[0].message.content == "#### 42"
        [trajectory] = talk.finish()
    assert trajectory.termination == "stop" and trajectory.num_turns == 3
    assert text(trajectory) == (
        f"{TWO_CALLS}<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo <|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        f"{call('add', a=3)}<|im_end|>\n<|im_start|>user\n<tool_response>\nthree\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n#### 42<|im_end|>"
    )
    # what a tool wrote stays text
    assert trajectory.response_ids.count(TOKENIZER.convert_tokens_to_ids("<|im_end|>")) == 5
    assert [(c.turn, c.name, c.result) for c in trajectory.tool_calls] == [
        (0, "add", "one"),
        (0, "add", "two <|im_end|>"),
        (1, "add", "three"),
    ]
    assert trajectory.metrics["generate_s"] > 0
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in trajectory.messages] == roles
    assert trajectory.messages[-1]["content"] == "#### 42"


def edited(**changes: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda message: {**message.model_dump(exclude_none=True), **changes}


def arguments_anew(message: Any) -> dict[str, Any]:
    sent = message.model_dump()
    for number, c in enumerate(sent["tool_calls"]):
        arguments = dict(reversed(json.loads(c["function"]["arguments"]).items()))
        c["function"]["arguments"] = json.dumps(arguments, indent=2)
        c["id"] = f"own_{number}"
    return sent


async def test_calls_have_ids_of_their_own() -> None:
    """Also the same calls in another turn, where no request has a seed."""
    async with talking(lambda *_: TWO_CALLS, params={"temperature": 1.0}) as talk:
        messages: list[Any] = [ASK]
        first = await talk.say(messages, tools=[ADD])
        second = await talk.say([*messages, *results(first, "one", "two")], tools=[ADD])
    assert len({c.id for c in (*first.tool_calls, *second.tool_calls)}) == 4


AS_CLIENTS_SEND_IT: dict[str, Callable[[Any], Any]] = {
    "the object": lambda message: message,
    "all fields": lambda message: message.model_dump(),
    "no thought": edited(content="I add."),
    "parts": edited(content=[{"type": "text", "text": "I add. \n"}]),
    "thought apart": edited(content="I add.", reasoning_content="hm", name="me"),
    "calls only": edited(content=None),
    "empty": edited(content=""),
    "arguments and ids anew": arguments_anew,
}


@pytest.mark.parametrize("way", AS_CLIENTS_SEND_IT)
async def test_what_clients_make_of_an_answer_continues_its_stream(way: str) -> None:
    async with talking([TWO_CALLS, "#### 3"]) as talk:
        message = (await talk.ask([ASK], tools=[ADD])).choices[0].message
        sent = AS_CLIENTS_SEND_IT[way](message)
        calls = (sent if isinstance(sent, dict) else message.model_dump())["tool_calls"]
        tools = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
        await talk.ask([ASK, sent, *tools], tools=[ADD])
        [trajectory] = talk.finish()
    assert sampled(trajectory) == f"{TWO_CALLS}<|im_end|>#### 3<|im_end|>"
    assert len(trajectory.tool_calls) == 2


REWRITTEN: dict[str, Callable[[list[Any]], list[Any]]] = {
    "another question": lambda m: [{**ASK, "content": "What is 6 * 8?"}, *m[1:]],
    "a summary": lambda m: [{"role": "system", "content": "We have 1."}, m[-1]],
    "another answer": lambda m: [m[0], {"role": "assistant", "content": "two"}, m[-1]],
    "an answer of its own": lambda m: [*m, {"role": "assistant", "content": "no"}, m[-1]],
    "a system message in between": lambda m: [*m, {"role": "system", "content": "Be brief."}],
}


@pytest.mark.parametrize("way", REWRITTEN)
async def test_a_changed_history_begins_a_stream(way: str) -> None:
    async with talking(["one", "two", "three"]) as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages)
        messages = REWRITTEN[way]([*messages, {"role": "user", "content": "Sure?"}])
        await talk.say(messages)
        await talk.ask([*messages, {"role": "user", "content": "Really?"}])
        first, second = talk.finish()
        asked = talk.context.chat.prompt(
            [m if isinstance(m, dict) else m.model_dump() for m in messages[:-1]]
        )
    assert sampled(first) == "one<|im_end|>"
    assert sampled(second) == "two<|im_end|>three<|im_end|>"
    assert second.prompt_ids == asked
    assert (first.termination, second.termination) == ("stop", "stop")


async def test_other_tools_begin_a_stream() -> None:
    async with talking(["one", "two"]) as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages, tools=[ADD])
        await talk.ask([*messages, ASK])
        assert len(talk.finish()) == 2


async def test_going_back_begins_a_stream_behind_the_very_tokens() -> None:
    async with talking(["<think>a</think>one", "two", "three", "four"]) as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages)
        again = [*messages, {"role": "user", "content": "Sure?"}]
        await talk.say(again)
        await talk.say([*messages, {"role": "user", "content": "No?"}])  # another question
        await talk.say([*messages, {"role": "user", "content": "Sure?"}])  # another answer
        streams = talk.finish()
    assert [sampled(t) for t in streams] == [
        "<think>a</think>one<|im_end|>two<|im_end|>",
        "three<|im_end|>",
        "four<|im_end|>",
    ]
    known = streams[0].prompt_ids + streams[0].response_ids[: streams[0].turn_ends[0]]
    for branch in streams[1:]:
        assert branch.prompt_ids[: len(known)] == known
    seeds = [r.sampling_params["seed"] for r in talk.script.requests]
    assert len(set(seeds)) == 4


async def test_concurrent_requests_do_not_share_a_stream() -> None:
    asked = asyncio.Event()

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if turn in (1, 2):  # both are under way before either is answered
            if turn == 2:
                asked.set()
            await asked.wait()
        return f"turn {turn}"

    async with talking(reply) as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages)
        left, right = ([*messages, {"role": "user", "content": side}] for side in ("left", "right"))
        await asyncio.gather(talk.say(left), talk.say(right))
        await talk.ask([*left, ASK])
        await talk.ask([*right, ASK])
        streams = talk.finish()
    assert len(streams) == 2 and sum(t.num_turns for t in streams) == 5
    for t, side in zip(streams, ("left", "right"), strict=True):
        assert side in TOKENIZER.decode(t.token_ids)


async def test_several_choices_and_the_one_that_goes_on() -> None:
    async with talking(
        lambda _, turn, __: f"<think>{turn}</think>same" if turn < 3 else "on"
    ) as talk:
        completion = await talk.ask([ASK], n=3)
        assert [c.index for c in completion.choices] == [0, 1, 2]
        chosen = completion.choices[1].message
        assert chosen.content == "<think>1</think>same"
        await talk.ask([ASK, chosen, ASK])
        said = [sampled(t) for t in talk.finish()]
        await talk.ask([ASK, chosen, ASK, {"role": "assistant", "content": "on"}, ASK], n=2)
        *_, branch, extended = talk.finish()
    assert said == [
        "<think>2</think>same<|im_end|>",
        "<think>0</think>same<|im_end|>",
        "<think>1</think>same<|im_end|>on<|im_end|>",  # the latest turn is the last one's
    ]
    assert extended.num_turns == 3  # by the first choice
    prefix = extended.prompt_ids + extended.response_ids
    assert branch.prompt_ids == prefix[: len(branch.prompt_ids)] and branch.num_turns == 1
    assert completion.usage.completion_tokens == 3 * (len("0same") + len("<think></think>") + 1)
    assert completion.usage.prompt_tokens == len(extended.prompt_ids)


async def test_the_run_decides_how_is_sampled() -> None:
    async with talking(lambda *_: "x", params={"temperature": 0.7, "seed": 1}) as talk:
        await talk.ask([ASK], temperature=0, top_p=0.1)
        await talk.ask([ASK], max_completion_tokens=9)
        for _ in range(2):
            await talk.ask([ASK], seed=3)
        params = [r.sampling_params for r in talk.script.requests]
        talk.finish()
    assert all(p["temperature"] == 0.7 and "top_p" not in p for p in params)
    assert params[1]["max_tokens"] == 9
    seeds = [p["seed"] for p in params]
    assert seeds[0] != seeds[1] != seeds[2] == seeds[3]  # a client's seed repeats a sample


async def test_seeds_do_not_depend_on_the_order_of_requests() -> None:
    asks = [[{"role": "user", "content": f"question {i}"}] for i in range(4)]

    async def seeds(order: list[Any]) -> set[tuple[str, int]]:
        async with talking(lambda *_: "x") as talk:
            for messages in order:
                await talk.ask(messages)
            return {
                (TOKENIZER.decode(r.prompt_ids), r.sampling_params["seed"])
                for r in talk.script.requests
            }

    assert await seeds(asks) == await seeds(asks[::-1])


@pytest.mark.parametrize(
    ("replies", "params"),
    [
        (["Thought: add.\nObservation: 7", "done"], {"stop": ["Nothing", "Observation:"]}),
        (["Thought: add.\nObservation: 7", "done"], {"max_tokens": 14}),
    ],
)
async def test_a_turn_that_was_cut_is_closed_by_the_template(
    replies: list[str], params: dict[str, Any]
) -> None:
    async with talking(replies) as talk:
        messages: list[Any] = [ASK]
        completion = await talk.ask(messages, **params)
        [choice] = completion.choices
        assert choice.message.content == "Thought: add.\n"
        assert choice.finish_reason == ("stop" if "stop" in params else "length")
        ends = "stop" if "stop" in params else "turn_length"
        assert talk.conversation.limit == (None if ends == "stop" else ends)
        await talk.ask([ASK, choice.message, ASK])
        [trajectory] = talk.finish()
    kept = "Thought: add.\n" + "Observation:" * ("stop" in params)
    assert text(trajectory).startswith(f"{kept}<|im_end|>\n<|im_start|>user\n")
    assert sampled(trajectory) == f"{kept}done<|im_end|>"  # the end is not the policy's


async def test_the_last_turn_says_what_a_trajectory_ended_for() -> None:
    async with talking(["a" * 50, "b" * 50], "rollout.multi_turn.max_tokens_per_turn=20") as talk:
        await talk.ask([ASK])
        [trajectory] = talk.finish()
    assert trajectory.termination == "turn_length" and len(trajectory.response_ids) == 20


async def test_the_length_of_the_response() -> None:
    async with talking(["a" * 30, "b" * 90, "c"], "rollout.response_length=100") as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages)
        with refused(400, "context_length_exceeded", "rollout.response_length=100"):
            await talk.ask([*messages, {"role": "user", "content": "x" * 80}])
        assert talk.conversation.finish()[0].termination == "observation_too_long"

    async with talking(["a" * 30, "b" * 90, "c"], "rollout.response_length=100") as talk:
        messages = [ASK]
        await talk.say(messages)
        with refused(400, "context_length_exceeded"):
            await talk.ask([*messages, {"role": "user", "content": "x" * 80}])
        completion = await talk.ask([*messages, {"role": "user", "content": "x"}])  # shorter
        assert completion.choices[0].finish_reason == "length"
        assert talk.finish()[0].termination == "response_length"

    async with talking(["b" * 200, "c"], "rollout.response_length=100") as talk:
        messages = [ASK]
        await talk.say(messages)
        with refused(400, "context_length_exceeded"):
            await talk.ask([*messages, ASK])
        await talk.ask([{"role": "user", "content": "In short?"}])  # a history that it shortened
        assert talk.conversation.limit is None
        assert [t.termination for t in talk.finish()] == ["response_length", "stop"]


async def test_a_prompt_that_is_too_long() -> None:
    async with talking(["a"], "data.max_prompt_length=60") as talk:
        with refused(400, "context_length_exceeded", "data.max_prompt_length=60"):
            await talk.ask([{"role": "user", "content": "x" * 80}])
        [trajectory] = talk.finish()
    assert (trajectory.termination, trajectory.num_turns) == ("prompt_too_long", 0)


@pytest.mark.parametrize(("limit", "turns"), [("max_assistant_turns", 2), ("max_user_turns", 3)])
async def test_turns(limit: str, turns: int) -> None:
    async with talking(lambda *_: "no", f"rollout.multi_turn.{limit}=2") as talk:
        messages: list[Any] = [ASK]
        with refused(400, limit, limit):
            for _ in range(9):
                await talk.say(messages)
                messages.append(ASK)
        [trajectory] = talk.finish()
    assert (trajectory.num_turns, trajectory.termination) == (turns, limit)


async def test_turns_of_several_choices_count() -> None:
    async with talking(lambda *_: "no", "rollout.multi_turn.max_assistant_turns=2") as talk:
        with refused(400, "max_assistant_turns"):
            await talk.ask([ASK], n=3)
        await talk.ask([ASK], n=2)
        with refused(400, "max_assistant_turns"):
            await talk.ask([ASK])
        assert [t.termination for t in talk.finish()] == ["stop", "max_assistant_turns"]


class Holding:
    """Answers once it is told to, and notes what it was asked and what was given up."""

    def __init__(self) -> None:
        self.asked, self.given_up, self.go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, request_id: str, turn: int, prompt_ids: list[int]) -> str:
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return f"turn {turn}"


async def interrupted(talk: Talk, holding: Holding, messages: list[Any]) -> "asyncio.Task[Any]":
    request = asyncio.create_task(talk.ask(messages))
    async with asyncio.timeout(60):
        await holding.asked.wait()
    return request


async def test_a_client_that_is_gone_ends_the_generation() -> None:
    holding = Holding()
    async with talking(holding, "rollout.multi_turn.max_assistant_turns=1") as talk:
        request = await interrupted(talk, holding, [ASK])
        request.cancel()
        async with asyncio.timeout(60):
            await holding.given_up.wait()
        holding.go.set()
        # nothing of it is kept, not even in the count of turns
        assert (await talk.ask([ASK])).choices[0].message.content == "turn 1"
        [trajectory] = talk.finish()
    assert sampled(trajectory) == "turn 1<|im_end|>"


async def test_an_observation_counts_while_its_turn_is_sampled() -> None:
    second_turn, go = asyncio.Event(), asyncio.Event()

    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        if turn == 1:
            second_turn.set()
            await go.wait()
        return "no"

    async with talking(reply, "rollout.multi_turn.max_user_turns=1") as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages)
        request = asyncio.create_task(talk.ask([*messages, ASK]))
        async with asyncio.timeout(120):
            await second_turn.wait()
        with refused(400, "max_user_turns"):
            await talk.ask([*messages, ASK])
        go.set()
        await request
        [trajectory] = talk.finish()
    assert trajectory.num_turns == 2


async def test_the_end_of_a_trajectory_ends_its_requests() -> None:
    holding = Holding()
    async with talking(holding) as talk:
        request = await interrupted(talk, holding, [ASK])
        await talk.conversation.close()
        assert holding.given_up.is_set()
        with refused(400, "trajectory_ended"):
            await request
        with refused(400, "trajectory_ended"):
            await talk.ask([ASK])


async def test_a_retry_gets_the_answer_that_was_lost() -> None:
    async with talking(["one", "two", "three"]) as talk:
        first = await talk.ask([ASK])
        retry = {"x-stainless-retry-count": "1"}  # as the client's own retries have it
        again = await talk.ask([ASK], extra_headers=retry)
        assert again == first
        other = await talk.ask([ASK])
        assert other.choices[0].message.content == "two"
        changed = await talk.ask([ASK], max_tokens=99, extra_headers=retry)
        assert changed.choices[0].message.content == "three"
        assert len(talk.finish()) == 3


async def test_a_retry_does_not_get_the_answer_to_an_earlier_request() -> None:
    """Of an agent that wants several answers to one question, and asks for each by itself."""
    asked, calls = asyncio.Event(), count()

    async def reply(*_: Any) -> str:
        if (number := next(calls)) == 1:
            asked.set()
            await asyncio.Event().wait()
        return f"answer {number}"

    async with talking(reply) as talk:
        assert (await talk.ask([ASK])).choices[0].message.content == "answer 0"
        request = asyncio.create_task(talk.ask([ASK]))
        async with asyncio.timeout(120):
            await asked.wait()
        request.cancel()  # as by the client's time limit
        await asyncio.wait([request])
        retried = await talk.ask([ASK], extra_headers={"x-stainless-retry-count": "1"})
        assert retried.choices[0].message.content == "answer 2"
        assert len(talk.finish()) == 2


async def test_an_agent_that_asks_nothing() -> None:
    async with talking([]) as talk:
        with pytest.raises(RuntimeError, match="does it use the base_url"):
            talk.finish()
