"""The protocol over HTTP: streaming, errors, models, log-probabilities, requests of nobody."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI, OpenAIError
from talks import ADD, ASK, HTTP, TOKENIZER, Talk, call, refused, sampled, talking, text

from minirl.waits import CONVERSATION

CALLS = f"I add.\n{call('add', a=1)}\n{call('add', a=2)}"


async def post(talk: Talk, body: Any, path: str = "", method: str = "POST") -> httpx.Response:
    url = path or f"{talk.access.base_url}/chat/completions"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await HTTP.request(method, url, content=content)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_stream_says_what_the_whole_answer_says(choices: int) -> None:
    async with talking(lambda *_: CALLS) as talk:
        params: dict[str, Any] = {"tools": [ADD], "n": choices, "logprobs": True, "seed": 1}
        whole = await talk.ask([ASK], **params)
        stream = await talk.ask(
            [ASK], **params, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in parts)
    for choice in whole.choices:
        own = [c for chunk in parts for c in chunk.choices if c.index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice.message.content == "I add."
        assert own[0].logprobs.content == choice.logprobs.content
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["tool_calls"]
        made: dict[int, dict[str, str]] = {}
        for delta in (d for c in own for d in c.delta.tool_calls or []):
            one = made.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            one["id"] += delta.id or ""
            one["name"] += delta.function.name or ""
            one["arguments"] += delta.function.arguments or ""
        assert list(made.values()) == [
            {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
            for c in choice.message.tool_calls
        ]


async def test_the_events_of_a_stream() -> None:
    async with talking(["hello"]) as talk:
        body = {"model": "m", "messages": [ASK], "stream": True}
        response = await post(talk, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_the_clients_own_stream_helper_and_the_blocking_client() -> None:
    async with talking([CALLS, "#### 3"]) as talk:

        def talk_blocking() -> str:
            with OpenAI(base_url=talk.access.base_url, api_key="any") as client:
                messages: list[Any] = [ASK]
                given: dict[str, Any] = {"model": "m", "tools": [ADD]}
                with client.chat.completions.stream(messages=messages, **given) as stream:
                    first = stream.get_final_completion().choices[0].message
                assert first.tool_calls
                tools = [
                    {"role": "tool", "tool_call_id": c.id, "content": "3"} for c in first.tool_calls
                ]
                messages += [first, *tools]
                second = client.chat.completions.create(messages=messages, **given)
                return second.choices[0].message.content or ""

        assert await asyncio.to_thread(talk_blocking) == "#### 3"
        [trajectory] = talk.finish()
    assert trajectory.num_turns == 2 and len(trajectory.tool_calls) == 2


async def test_log_probabilities_are_those_that_train() -> None:
    async with talking(["grün"]) as talk:
        completion = await talk.ask([ASK], logprobs=True, top_logprobs=0)
        [trajectory] = talk.finish()
    content = completion.choices[0].logprobs.content
    assert [c.logprob for c in content] == trajectory.response_logprobs[:-1]  # but <|im_end|>
    assert [c.token for c in content][:2] == ["g", "r"] and content[0].bytes == [ord("g")]
    assert content[2].bytes is None  # half of a character


async def test_the_stop_that_is_there_first_cuts() -> None:
    """Not one that begins before it and would be complete behind it, had the engine gone on."""
    async with talking(["xabcdefgh"]) as talk:
        completion = await talk.ask([ASK], stop=["abcdef", "c"])
        assert completion.choices[0].message.content == "xab"
        [trajectory] = talk.finish()
    assert sampled(trajectory) == "xabc"


async def test_usage_and_shape() -> None:
    async with talking(["hello", "hello"]) as talk:
        messages: list[Any] = [ASK]
        await talk.say(messages)
        completion = await talk.ask([*messages, ASK])
        [trajectory] = talk.finish()
    usage = completion.usage
    assert completion.object == "chat.completion" and completion.model == talk.access.model
    assert usage.completion_tokens == len("hello") + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.total_tokens == len(trajectory.token_ids)
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_what_is_malformed_stays_in_the_content() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>'
    async with talking([broken, f"{call('add', a=1)}\n{broken}", CALLS, CALLS]) as talk:
        one, two, three, four = [
            (await talk.ask([ASK], tools=[ADD], **params)).choices[0]
            for params in ({}, {}, {"tool_choice": "none"}, {"parallel_tool_calls": False})
        ]
        talk.finish()
    assert one.finish_reason == "stop" and one.message.content == broken
    assert two.finish_reason == "tool_calls" and len(two.message.tool_calls) == 1
    assert '{"name": "add", "arguments": {' in two.message.content
    assert three.message.tool_calls is None and three.message.content == CALLS
    assert len(four.message.tool_calls) == 1


async def test_calls_are_read_only_where_there_are_tools() -> None:
    async with talking([CALLS]) as talk:
        completion = await talk.ask([ASK])
    assert completion.choices[0].message.content == CALLS


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "robot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "only text"),
    ({"n": 0}, "n", "1 to 128"),
    ({"temperature": -1}, "temperature", "from 0 to 2"),
    ({"top_p": 0}, "top_p", "up to 1"),
    ({"max_tokens": 0}, "max_tokens", "above 0"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "above 0"),
    ({"top_logprobs": 5}, "top_logprobs", "sampled token's only"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    ({"tool_choice": "required"}, "tool_choice", "auto or none"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "null"),
    ({"presence_penalty": 0.5}, "presence_penalty", "samples freely"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "'name' is a required"),
    ({"temprature": 1}, "temprature", "unknown field"),
    ({"seed": "x"}, "seed", "Expected `int"),
]


@pytest.mark.parametrize(("change", "param", "words"), BAD, ids=lambda value: str(value)[:30])
async def test_a_bad_request(change: dict[str, Any], param: str, words: str) -> None:
    async with talking([]) as talk:
        response = await post(talk, {"model": "m", "messages": [ASK], **change})
        assert response.status_code == 400 and talk.script.requests == []
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and words in error["message"]
        assert error["param"].startswith(param)


async def test_what_is_not_a_request() -> None:
    async with talking([]) as talk:
        base = talk.access.base_url
        url = f"{base}/chat/completions"
        told = [
            await post(talk, b'{"model": ', url),
            await post(talk, b"\xff", url),
            await post(talk, {"messages": [ASK]}, url),
            await post(talk, {}, f"{base}/completions"),
            await post(talk, {}, url, "GET"),
        ]
    assert [response.status_code for response in told] == [400, 400, 400, 404, 405]
    assert "missing required field `model`" in told[2].json()["error"]["message"]
    assert all(response.headers["x-should-retry"] == "false" for response in told)
    assert told[0].json()["error"]["code"] == "invalid_json"


async def test_a_template_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with talking(["x"]) as talk:
        template = "{{ raise_exception('no system') }}"
        monkeypatch.setattr(talk.context.chat, "template", template)
        with refused(400, match="no system"):
            await talk.ask([{"role": "user", "content": "Not asked before"}])


async def test_trajectories_and_keys_that_are_not_known() -> None:
    async with talking(["x"]) as talk:
        plain = await talk.context.endpoint.access()
        wrong = talk.access.base_url.replace("/v1", "0/v1")
        for base_url, status, code in (
            (wrong, 404, "trajectory_not_found"),
            (plain.base_url, 401, "invalid_api_key"),
        ):
            client = AsyncOpenAI(base_url=base_url, api_key="any", http_client=HTTP)
            with refused(status, code):
                await client.chat.completions.create(model="m", messages=[ASK])  # type: ignore[list-item]
            with refused(status, code):
                await client.models.list()


async def test_requests_of_nobody_are_sampled_as_they_ask() -> None:
    async with talking(["x", "Grade: 3"]) as talk:
        own = await talk.context.endpoint.access()
        client = AsyncOpenAI(base_url=own.base_url, api_key=own.api_key, http_client=HTTP)
        assert [model.id async for model in client.models.list()] == [own.model]
        ask: dict[str, Any] = {"model": own.model, "messages": [ASK]}
        params = {"temperature": 0.25, "top_p": 0.5, "seed": 4, "max_tokens": 7}
        await client.chat.completions.create(**ask, **params)
        asked = talk.script.requests[0].sampling_params
        assert {key: asked[key] for key in ("temperature", "top_p", "max_tokens")} == {
            key: params[key] for key in ("temperature", "top_p", "max_tokens")
        }
        assert "seed" in asked
        await client.chat.completions.create(**ask)
        longest = talk.context.config.max_model_len - len(talk.script.requests[1].prompt_ids)
        assert talk.script.requests[1].sampling_params["max_tokens"] == longest
        with refused(400, "context_length_exceeded", "rollout.max_model_len"):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 20_000}]
            )
        assert talk.context.config.max_model_len == 8192 + 4096
        with pytest.raises(RuntimeError, match="no request"):  # of the trajectory
            talk.finish()


async def test_requests_of_nobody_wait_under_no_conversations_name() -> None:
    names: list[str] = []

    def reply(*_: Any) -> str:
        names.append(CONVERSATION.get())
        return "x"

    CONVERSATION.set("0-7/1")
    async with talking(reply) as talk:
        await talk.ask([ASK])
        own = await talk.context.endpoint.access()
        client = AsyncOpenAI(base_url=own.base_url, api_key=own.api_key, http_client=HTTP)
        await client.chat.completions.create(model="m", messages=[ASK])  # type: ignore[list-item]
    assert names == ["0-7/1", "no conversation"]


async def test_what_the_engine_refuses_or_breaks_is_told() -> None:
    async def reply(request_id: str, turn: int, prompt_ids: list[int]) -> str:
        raise (ValueError("top_k is odd"), ZeroDivisionError("a bug"))[turn]

    async with talking(reply) as talk:
        with refused(400, match="top_k is odd"):
            await talk.ask([ASK])
        with pytest.raises(OpenAIError, match="ZeroDivisionError: a bug"):
            await talk.ask([ASK])
    assert len(talk.script.requests) == 2  # no retries


async def test_long_conversations_are_rendered_off_the_loop() -> None:
    async with talking(["x", "y"], "data.max_prompt_length=40000") as talk:
        messages: list[Any] = [{"role": "user", "content": "x" * 30_000}]
        await talk.say(messages)
        await talk.ask([*messages, ASK])
        [trajectory] = talk.finish()
    assert text(trajectory).startswith("x<|im_end|>\n<|im_start|>user\n")
    assert len(TOKENIZER.decode(trajectory.prompt_ids)) > 30_000
