import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.agent_loop import TOOL_PARSERS

PARSER = TOOL_PARSERS.find("hermes")()


def hermes(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def test_content_and_calls():
    text = f"First {hermes('a', {'x': 1})} then {hermes('b', {})} done."
    turn = PARSER.parse(text)
    assert turn.content == "First  then  done."
    assert [(c.name, c.arguments, c.problem) for c in turn.calls] == [
        ("a", {"x": 1}, None),
        ("b", {}, None),
    ]
    assert turn.calls[0].text == '{"x": 1}'


def test_tags_inside_of_arguments_are_text():
    code = "print('</tool_call><tool_call>')"
    [call] = PARSER.parse(hermes("python", {"code": code})).calls
    assert call.arguments == {"code": code}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{oops}", "not valid JSON (Expecting property name"),
        ("", "not valid JSON (Expecting value)"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', 'needs "name"'),
        ('{"name": 3, "arguments": {}}', 'needs "name"'),
        ('{"name": "a"}', 'needs "arguments"'),
        ('{"name": "a", "arguments": "{}"}', 'needs "arguments"'),
        ('{"name": "\\ud800", "arguments": 5}', 'needs "arguments"'),
        ('{"name": "a", "arguments": {}} trailing', "</tool_call> must follow"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a JSON value"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "that JSON has not"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "that JSON has not"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}", "nested deeper"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 9999 + "]" * 9999 + "}}", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": ' + "1" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_malformed_calls_keep_their_place(body, problem):
    text = f"{hermes('first', {})}<tool_call>{body}</tool_call>{hermes('last', {})}end"
    turn = PARSER.parse(text)
    assert [c.name for c in turn.calls][::2] == ["first", "last"]
    assert problem in turn.calls[1].problem
    assert turn.calls[1].arguments == {}
    (turn.calls[1].name + turn.calls[1].text).encode()  # a lone surrogate would raise
    assert turn.content == "end"


def test_a_call_that_is_never_closed_is_malformed():
    unclosed = hermes("a", {}).removesuffix("</tool_call>")
    [call] = PARSER.parse(unclosed).calls
    assert "</tool_call> must follow" in call.problem
    first, second = PARSER.parse(unclosed + hermes("b", {})).calls
    assert first.problem is not None
    assert (second.name, second.problem) == ("b", None)


def test_thoughts_are_not_called():
    thought = f"<think>I could say {hermes('a', {})}"
    assert PARSER.parse(thought).calls == []
    assert PARSER.parse(thought).content == thought
    [call] = PARSER.parse(f"{thought}</think>{hermes('b', {})}").calls
    assert call.name == "b"
    [call] = PARSER.parse(f"I could.</think>{hermes('b', {'x': '</think>'})}").calls
    assert call.arguments == {"x": "</think>"}


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"arguments"', ",", '"a"', "\\u"]
)
texts = st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=30).map("".join)


@settings(max_examples=60)
@given(texts)
def test_any_text_is_parsed_and_nothing_is_called_that_it_does_not_hold(text):
    turn = PARSER.parse(text)
    assert len(turn.calls) <= text.count("<tool_call>")
    for call in turn.calls:
        assert call.problem or json.dumps(call.name)[1:-1] in text or call.name in text
    if "<tool_call>" not in text:
        assert turn.content == text.strip() and turn.calls == []


names = st.text(min_size=1, max_size=7)  # too short for </think>, which ends a thought anywhere
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.text(max_size=7)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
calls = st.tuples(names, st.dictionaries(st.text(max_size=7), values, max_size=3))
prose = st.text(max_size=20).filter(lambda t: "<" not in t)


@settings(max_examples=40)
@given(st.lists(st.tuples(prose, calls), max_size=4), prose)
def test_what_was_written_is_read(parts, end):
    text = "".join(before + hermes(*call) for before, call in parts) + end
    turn = PARSER.parse(text)
    assert [(c.name, c.arguments, c.problem) for c in turn.calls] == [
        (name, arguments, None) for _, (name, arguments) in parts
    ]
    assert turn.content == ("".join(before for before, _ in parts) + end).strip()
