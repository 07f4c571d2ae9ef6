"""What holds for every tool parser."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_formats import FORMATS

from minirl.agent_loop import TOOL_PARSERS

every_parser = pytest.mark.parametrize("parser", list(TOOL_PARSERS))
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
GET = [("get", {"city": "Zürich", "days": [1, 2], "deep": {"a": {"b": None}}})]


def parse(name, text, schemas=None):
    return TOOL_PARSERS.find(name)().parse(text, schemas or {})


def read(turn):
    return [(call.name, call.arguments, call.problem) for call in turn.calls]


def schemas_of(calls):
    """Schemas that only say of what type each argument of the first call to a tool is."""
    types = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
    return {
        name: {
            "type": "object",
            "properties": {k: {"type": types.get(type(v), "null")} for k, v in arguments.items()},
        }
        for name, arguments in reversed(calls)
    }


def test_every_parser_has_a_format_here():
    assert {form.parser for form in FORMATS.values()} == set(TOOL_PARSERS)


MARKS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<parameter=x>",
        "</parameter>",
        "</function>",
    ),
    *(
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[f(",
        "x=",
        ")]",
        "; ",
        "'''",
        '"""',
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f[ARGS]", "<|channel|>commentary to=functions.f"),
    *("<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>assistant", "final", " to=f "),
    *('{"name": "f", "parameters": {', '{"name": "f", "arguments": {', "{", "}", "}}", "[", "]"),
    *('"', "'", "\\", "\\u", ":", ",", "-", "1", "1e999", "\ud800", "\0", "ﬁ", "\r", "\n"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
]
any_text = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=6)), max_size=25).map(
    "".join
)


@every_parser
@settings(max_examples=150)
@given(text=any_text)
def test_any_text_is_parsed_and_nothing_is_called_that_it_does_not_hold(parser, text):
    turn = parse(parser, text)
    position = 0
    for char in turn.content if parser != "gpt-oss" else ():  # which joins messages by a newline
        position = text.index(char, position) + 1
    for call in turn.calls:
        assert call.problem is None or call.arguments == {}
        if call.problem is None:
            assert call.name in text or json.dumps(call.name)[1:-1] in text
            assert "\\" in text or all(key in text for key in call.arguments)
            assert json.loads(call.text) == call.arguments


@every_parser
@given(text=st.text(st.characters(exclude_characters="<[{")))
def test_prose_is_content(parser, text):
    assert parse(parser, text).content == text.strip()
    assert parse(parser, text).calls == []


prose = st.text("abc é. ,:)!'\n", max_size=12)


@every_format
@settings(max_examples=40)
@given(data=st.data())
def test_what_was_written_is_read(form, data):
    calls = data.draw(st.lists(form.calls, min_size=1, max_size=3, unique_by=lambda call: call[0]))
    before = data.draw(prose)
    text = form.before.format(before) + form.write(calls)
    turn = parse(form.parser, text, schemas_of(calls))
    assert read(turn) == [(name, arguments, None) for name, arguments in calls]
    assert turn.content == (before.strip() if form.before else "")


@every_format
def test_every_beginning_of_a_call_is_reported(form):
    text = form.write(GET).removesuffix("<|python_end|>")
    for end in range(len(form.opening), len(text)):
        [call] = parse(form.parser, text[:end]).calls
        assert call.problem, text[:end]
        assert call.arguments == {} and call.text in text
    assert read(parse(form.parser, text)) == [("get", GET[0][1], None)]


@every_format
def test_thoughts_are_not_called(form):
    thought = form.wrapped.format(f"I could say {form.write([('no', {})])}")
    if form.parser != "gpt-oss":  # there a thought cannot hold the marks of a call
        assert parse(form.parser, thought).calls == []
        assert parse(form.parser, thought.partition("no")[0]).calls == []
        assert read(parse(form.parser, thought + form.write(GET))) == [("get", GET[0][1], None)]
    turn = parse(form.parser, form.wrapped.format('get(city="Bern")') + form.write(GET))
    assert read(turn) == [("get", GET[0][1], None)]


@every_format
def test_marks_inside_of_arguments_are_text(form):
    others = " ".join(other.write([("no", {})]) for other in FORMATS.values())
    if form.parser == "qwen3_coder":  # its values are not escaped
        others = others.replace("<parameter=", "").replace("</parameter>", " </parameter> ")
        others = others.replace("<function=", "").replace("</function>", "")
    call = ("write", {"path": "a b", "code": f'if x:\n\tprint("{others}")\n'})
    turn = parse(form.parser, form.write([call, call]))
    assert read(turn) == [(*call, None)] * 2


@every_parser
def test_arguments_that_are_no_json_are_malformed(parser):
    for form in (f for f in FORMATS.values() if f.parser == parser):
        [call] = parse(
            parser, form.write([("get", {"x": [[]] * 2})]).replace("[]", "[" * 40 + "]" * 40)
        ).calls
        assert "nested deeper" in call.problem
        text = form.write([("get", {"x": [7, "y"]})])
        [call] = parse(parser, text.replace("7", "1e999"), {"get": {"type": "object"}}).calls
        assert call.arguments == {} if parser != "qwen3_coder" else {"x": '[1e999, "y"]'}
