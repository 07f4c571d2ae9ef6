"""Random conversations over every template: what holds for all of them."""

import asyncio
from functools import cache
from typing import Any

import pytest
from chat_fixtures import TOOLS, awkward, builder, grow, tokenizer_for, tool, turn, user
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.agent_loop import AgentLoopBase, run_agent_loop
from minirl.chat import ChatBuilder
from minirl.testing import ScriptedServer, byte_tokenizer, make_context
from minirl.types import TokenOutput, Trajectory

NAMES = ["hermes", "qwen25", "qwen3", "llama31", "bytes"]
SETTINGS = settings(max_examples=40)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | awkward,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(awkward, json_values, min_size=1, max_size=3)
said = st.text("abc é漢🙂.\n", max_size=12).map(lambda text: f"so{text}.")
thought = st.text("xyz é\n", min_size=1, max_size=12).map(
    lambda text: f"<think>\nw{text}w\n</think>"
)


@cache
def chat_of(name: str) -> ChatBuilder:
    return ChatBuilder(byte_tokenizer()) if name == "bytes" else builder(name)


def control_tokens(chat: ChatBuilder) -> dict[str, int]:
    """Those that the tokenizer or the template has a use for."""
    special, template = chat.tokenizer.all_special_tokens, str(chat.template)
    added = chat.tokenizer.get_added_vocab()
    return {text: i for text, i in added.items() if text in special or text in template}


def observations(name: str, contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict]]:
    """Tool results, a user message, or both; Llama's template has one call per turn."""
    results = st.lists(contents.map(tool), min_size=1, max_size=1 if name == "llama31" else 3)
    users = contents.map(lambda text: [user(text)])
    return st.one_of(results, users, st.tuples(results, users).map(lambda two: two[0] + two[1]))


def render_whole(name: str, messages: list[dict]) -> list[int]:
    """By Hugging Face's own path."""
    tokenizer = byte_tokenizer() if name == "bytes" else tokenizer_for(name)
    encoded = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)
    return encoded["input_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_appended_is_the_difference_of_whole_renderings(name: str) -> None:
    chat = chat_of(name)
    step = st.tuples(said, observations(name, awkward), arguments)

    @SETTINGS
    @given(
        system=st.none() | awkward, question=awkward, steps=st.lists(step, min_size=1, max_size=4)
    )
    def grows(system: str | None, question: str, steps: list[Any]) -> None:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append(user(question))
        ids = chat.prompt(messages, TOOLS)
        assert ids == render_whole(name, messages)
        for number, (text, observation, wanted) in enumerate(steps):
            messages += [turn(text, observation, number, wanted), *observation]
            whole, appended = render_whole(name, messages), chat.observation(observation, TOOLS)
            assert whole[: len(ids)] == ids
            assert whole[len(whole) - len(appended) :] == appended
            sampled = whole[len(ids) : len(whole) - len(appended)]
            assert [i for i in sampled if i in chat.stop_token_ids] == sampled[-1:]
            ids = ids + sampled + appended

    grows()


@pytest.mark.parametrize("name", ["hermes", "qwen25", "qwen3"])
def test_thoughts_between_tool_calls(name: str) -> None:
    """Of a whole reasoning turn by turn: templates drop thoughts only before a user message."""
    chat = chat_of(name)
    results = st.lists(awkward.map(tool), min_size=1, max_size=3)
    step = st.tuples(thought, said, results, arguments)

    @SETTINGS
    @given(steps=st.lists(step, min_size=1, max_size=3))
    def grows(steps: list[Any]) -> None:
        turns = [
            (turn(f"{thinks}\n\n{text}", seen, number, wanted), seen)
            for number, (thinks, text, seen, wanted) in enumerate(steps)
        ]
        pairs = grow(chat, name, [user("Think.")], turns, TOOLS)
        assert all(grown == rendered for grown, rendered in pairs)

    grows()


@pytest.mark.parametrize("name", NAMES)
def test_no_content_becomes_a_control_token(name: str) -> None:
    """And none is changed: the text that the model reads is what the template writes."""
    chat = chat_of(name)
    control = control_tokens(chat)
    pieces = [
        *control,
        *(text[:-2] for text in control),
        *(text[2:] for text in control),
        "<|",
        ">",
    ]
    hostile = st.lists(awkward | st.sampled_from(pieces), max_size=5).map("".join)

    @SETTINGS
    @given(observation=observations(name, hostile))
    def stays_text(observation: list[dict]) -> None:
        harmless = [{**message, "content": "x"} for message in observation]
        appended = chat.observation(observation, TOOLS)
        expected = [i for i in chat.observation(harmless, TOOLS) if i in control.values()]
        assert [i for i in appended if i in control.values()] == expected
        assert chat.tokenizer.decode(appended) == chat.observation_text(observation, TOOLS)

    stays_text()


class Talk(AgentLoopBase):
    """As many turns as there are observations, and one more."""

    observations: list[list[dict]]

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        trajectory = await self.start(row["raw_prompt"], TOOLS)
        for observation in row["observations"]:
            await self.generate(trajectory, sampling_params)
            await self.append_observation(trajectory, observation, TOOLS)
        await self.generate(trajectory, sampling_params)
        return self.finish(trajectory, "stop")


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sampled_is_never_tokenized_again(name: str) -> None:
    """Any tokens: halves of characters, control tokens, merges that no tokenizer would make."""
    chat = chat_of(name)
    overrides = ["data.max_prompt_length=8192", "rollout.response_length=8192"]
    server = ScriptedServer(chat.tokenizer, [])
    context = make_context(server, overrides=overrides)
    context.chat = chat
    tokens = st.lists(st.integers(0, len(chat.tokenizer) - 1), max_size=20)
    step = st.tuples(tokens, observations(name, awkward))

    @SETTINGS
    @given(steps=st.lists(step, min_size=1, max_size=3), last=tokens)
    def are_kept(steps: list[Any], last: list[int]) -> None:
        end = chat.stop_token_ids[0]
        turns = [[*ids, end] for ids in (*(ids for ids, _ in steps), last)]
        replies = [
            TokenOutput(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop")
            for ids in turns
        ]
        context.server = engine = ScriptedServer(chat.tokenizer, replies)
        row = {"raw_prompt": [user("Hi")], "observations": [seen for _, seen in steps]}
        [trajectory] = asyncio.run(run_agent_loop(Talk(context), {}, row))
        expected = list(turns[0])
        for (_, seen), ids in zip(steps, turns[1:], strict=True):
            expected += chat.observation(seen, TOOLS)
            assert engine.requests.pop(1).prompt_ids == trajectory.prompt_ids + expected
            expected += ids
        assert (trajectory.error, trajectory.response_ids) == (None, expected)

    are_kept()
