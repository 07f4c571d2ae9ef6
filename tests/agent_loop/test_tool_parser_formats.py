"""What is particular to each format, besides hermes."""

import pytest
from scripted import run_script
from tool_formats import gpt_oss, gpt_oss_template, llama3_json, qwen3_coder

from minirl.agent_loop import TOOL_PARSERS
from minirl.agent_loop.tool_parser import pythonic
from minirl.tools import function_tool


def parse(name, text, schemas=None):
    return TOOL_PARSERS.find(name)().parse(text, schemas or {})


def read(turn):
    return [(call.name, call.arguments) for call in turn.calls if call.problem is None]


def problems(turn):
    return [call.problem for call in turn.calls]


def problem_in_place(turn):
    """Of the second of three calls, which is malformed, while the others are read."""
    assert [call.name for call in turn.calls][::2] == ["first", "last"]
    assert [call.problem is None for call in turn.calls] == [True, False, True]
    assert turn.calls[1].arguments == {}
    return turn.calls[1].problem


# qwen3_coder

SCHEMAS = {
    "book": {
        "type": "object",
        "$defs": {"Seat": {"type": "object", "properties": {"row": {"type": "integer"}}}},
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 18},
            "price": {"type": "number"},
            "window": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "seat": {"$ref": "#/$defs/Seat"},
            "tags": {"type": "array"},
            "code": {"enum": ["1", "2"]},
            "lost": {"$ref": "#/$defs/missing"},
            "word": {"type": "string", "pattern": r"\p{L}"},  # which is none of Python's
        },
    }
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("name", "42", "42"),
        ("name", "true", "true"),
        ("name", "null", "null"),
        ("name", ' {"a": 1} ', ' {"a": 1} '),
        ("name", "two\nlines\n", "two\nlines\n"),
        ("name", "", ""),
        ("age", "42", 42),
        ("age", "7", 7),  # too young, but that is for the tool to say
        ("age", "many", "many"),
        ("price", "1.5", 1.5),
        ("window", "true", True),
        ("window", "True", True),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "none", "none"),
        ("note", "5", "5"),
        ("seat", '{"row": 3}', {"row": 3}),
        ("tags", '["a", 1]', ["a", 1]),
        ("tags", "['a']", "['a']"),
        ("code", "1", "1"),
        ("lost", "1", 1),
        ("word", "1", "1"),
        ("unknown", "[1]", [1]),
        ("unknown", '"quoted"', '"quoted"'),
        ("unknown", "NaN", "NaN"),
        ("unknown", "1 2", "1 2"),
    ],
)
def test_schemas_give_types_to_bare_text(key, text, value):
    [call] = parse("qwen3_coder", qwen3_coder([("book", {key: text})]), SCHEMAS).calls
    assert call.problem is None
    assert call.arguments == {key: value} and type(call.arguments[key]) is type(value)


async def test_the_loop_gives_the_schemas_of_its_tools():
    @function_tool
    def repeat(word: str, times: int) -> str:
        """Say a word again and again."""
        return word * times

    turn = qwen3_coder([("repeat", {"word": "7", "times": "3"})])
    trajectory, _ = await run_script(
        [turn, "done"], [repeat], ["rollout.multi_turn.format=qwen3_coder"]
    )
    [record] = trajectory.tool_calls
    assert (record.status, record.result) == ("ok", "777")


def test_a_value_may_hold_the_tags_of_its_own_format():
    code = "print('</parameter>', '</tool_call><tool_call>', '</function>')"
    assert read(parse("qwen3_coder", qwen3_coder([("run", {"code": code})]))) == [
        ("run", {"code": code})
    ]


def test_a_forgotten_tool_call_tag_is_forgiven():
    text = qwen3_coder([("a", {"x": 1})]).removeprefix("<tool_call>\n")
    assert read(parse("qwen3_coder", f"So: {text}")) == [("a", {"x": 1})]
    assert parse("qwen3_coder", f"So: {text}").content == "So:"
    assert read(parse("qwen3_coder", text.removesuffix("</tool_call>"))) == [("a", {"x": 1})]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "must begin with <function=NAME>"),
        ('{"name": "a", "arguments": {}}', "must begin with <function=NAME>"),
        ("<function=></function>", "must begin with <function=NAME>"),
        ("<function=a", "must begin with <function=NAME>"),
        ("<function=a>", "must follow <function=NAME>"),
        ("<function=a>x=1</function>", "must follow <function=NAME>"),
        ("<function=a><parameter=x>1</parameter>", "every parameter must be"),
        ("<function=a><parameter=x>1</function>", "every parameter must be"),
        ("<function=a><parameter=>1</parameter></function>", "every parameter must be"),
        (
            "<function=a><parameter=x>1<parameter=y>2</parameter></function>",
            "every parameter must be",
        ),
        (
            "<function=a><parameter=x>1</parameter><parameter=x>2</parameter></function>",
            "'x' is given twice",
        ),
        ("<function=a></function> more", "</tool_call> must follow"),
    ],
)
def test_qwen3_coder_malformed(body, problem):
    first, last = qwen3_coder([("first", {})]), qwen3_coder([("last", {"x": 1})])
    turn = parse("qwen3_coder", f"{first}<tool_call>{body}</tool_call>{last} end")
    assert problem in problem_in_place(turn)
    assert turn.content == "end"


# llama3_json


def test_llama_needs_the_tag_inside_of_prose():
    call = llama3_json([("a", {"x": 1})])
    prose = f"To call it, write {call} in your answer."
    assert parse("llama3_json", prose).calls == []
    assert parse("llama3_json", prose).content == prose
    assert read(parse("llama3_json", prose.replace("{", "<|python_tag|>{", 1))) == [("a", {"x": 1})]
    assert read(parse("llama3_json", f"<think>Hm.</think>\n\n{call}")) == [("a", {"x": 1})]


def test_an_answer_in_json_is_no_call():
    for answer in ('{"answer": 42}', '{"names": ["a"]}', "{}", "{not json}", '[{"name": "a"}]'):
        turn = parse("llama3_json", answer)
        assert (turn.content, turn.calls) == (answer, [])


def test_llama_spellings():
    for text in (
        '{"type": "function", "name": "a", "parameters": {"x": 1}}',
        '{"name": "a", "arguments": {"x": 1}}',
        '{\n  "parameters": {"x": 1},\n  "name": "a"\n}<|eom_id|>',
        '<|python_tag|> {"name": "a", "parameters": {"x": 1}}\n',
    ):
        turn = parse("llama3_json", text)
        assert (read(turn), turn.content) == ([("a", {"x": 1})], "")
    for separator in ("; ", ";\n", "\n", "<|python_tag|>", ";<|python_tag|>"):
        text = llama3_json([("a", {})]) + separator + llama3_json([("b", {})]) + "\nDone."
        turn = parse("llama3_json", text)
        assert (read(turn), turn.content) == ([("a", {}), ("b", {})], "Done.")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "a", "parameters": {"x": }}', "not valid JSON"),
        ("{'name': 'a', 'parameters': {}}", "not valid JSON"),
        ('{"name": "a", "parameters": {}', "not valid JSON"),
        ('{"name": "a"}', 'needs "parameters"'),
        ('{"name": "a", "parameters": "{}"}', 'needs "parameters"'),
        ('{"parameters": {}}', 'needs "name"'),
    ],
)
def test_llama_malformed(body, problem):
    first, last = llama3_json([("first", {})]), llama3_json([("last", {})])
    assert problem in problem_in_place(parse("llama3_json", f"{first}; {body}; {last}"))


def test_python_behind_the_tag_is_malformed():
    [call] = parse("llama3_json", '<|python_tag|>brave_search.call(query="x")').calls
    assert "not valid JSON" in call.problem and call.text == 'brave_search.call(query="x")'


# mistral


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "must be followed by the name"),
        ("get", "not valid JSON"),
        ("get[ARGS]", "not valid JSON"),
        ("get[ARGS]{oops}", "not valid JSON"),
        ("get[ARGS][1]", 'needs "arguments"'),
        ("[]", "is empty"),
        ("[{}]", 'needs "name"'),
        ("[3]", "must be a JSON object"),
        ('[{"name": "a", "arguments": {}}', "not valid JSON"),
        ('{"name": "a"}', 'needs "arguments"'),
    ],
)
def test_mistral_malformed(body, problem):
    last = "[TOOL_CALLS]last{}" if body else "! [TOOL_CALLS]last{}"
    assert problem in problem_in_place(
        parse("mistral", f"[TOOL_CALLS]first{{}}[TOOL_CALLS]{body}{last}")
    )


def test_mistral_spellings():
    turn = parse("mistral", '[TOOL_CALLS]a[ARGS]{"x": 1}b[ARGS]{} Done.')
    assert (read(turn), turn.content) == ([("a", {"x": 1}), ("b", {})], "Done.")
    assert read(parse("mistral", 'a[ARGS]{"x": 1}')) == [("a", {"x": 1})]
    assert read(parse("mistral", "[TOOL_CALLS][TOOL_CALLS] a{}")) == [("a", {})]
    assert read(parse("mistral", '[TOOL_CALLS]{"name": "a", "arguments": {}}')) == [("a", {})]


def test_one_bad_entry_of_a_list_does_not_spoil_the_others():
    turn = parse(
        "mistral",
        '[TOOL_CALLS][{"name": "first", "arguments": {}}, {"name": "b"}, '
        '{"name": "last", "arguments": {}}]',
    )
    assert 'needs "arguments"' in problem_in_place(turn)


# gpt-oss


def test_harmony_channels():
    turn = parse(
        "gpt-oss",
        "<|channel|>analysis<|message|>Perhaps to=functions.no {}<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        f"<|start|>assistant{gpt_oss([('get', {'x': '<|end|>'})])}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
    )
    assert read(turn) == [("get", {"x": "<|end|>"})]
    assert turn.content == "Let me look.\nIt is 4."


def test_harmony_spellings():
    for text in (
        gpt_oss_template([("a", {"x": 1})]),
        gpt_oss_template([("a", {"x": 1})]).removeprefix("<|start|>assistant"),
        '<|channel|>commentary to=functions.a<|constrain|>json<|message|>{"x": 1}<|end|>',
        '<|channel|>commentary to=functions.a <|message|> {"x": 1}\n',
        '<|channel|>commentary to=a code<|message|>{"x": 1}<|start|>assistant',
        '<|channel|>analysis<|message|>Hm<|channel|>commentary to=functions.a<|message|>{"x": 1}',
    ):
        assert read(parse("gpt-oss", text)) == [("a", {"x": 1})], text
    calls = [("a", {"x": 1}), ("b", {"y": [None]})]
    assert read(parse("gpt-oss", gpt_oss_template(calls))) == calls


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("<|channel|>analysis to=functions.a<|message|>{}", "commentary channel"),
        ("<|channel|>final to=functions.a<|message|>{}", "commentary channel"),
        (" to=functions.a<|message|>{}", "commentary channel"),
        ("<|channel|>commentary to=functions.a <|message|>", "not valid JSON"),
        ("<|channel|>commentary to=python code<|message|>print(1)", "not valid JSON"),
        ("<|channel|>commentary to=functions.a<|message|>[]", 'needs "arguments"'),
        ("<|channel|>commentary to=functions.a<|message|>{} {}", "nothing may follow"),
        ("<|channel|>commentary to=functions.<|message|>{}", 'needs "name"'),
        ('<|channel|>commentary to=functions.a json{"x": 1}', "<|message|> and a JSON object"),
    ],
)
def test_harmony_malformed(message, problem):
    first, last = gpt_oss_template([("first", {})]), gpt_oss_template([("last", {})])
    turn = parse("gpt-oss", f"{first}<|start|>assistant{message}<|call|>{last}")
    assert problem in problem_in_place(turn)


# pythonic


def test_pythonic_literals():
    text = (
        '[a.b(x=-1.5, y=True, z=null, s="it\'s ]", t=(1, [2]), d={"k": false}),\n'
        "  c(code='''\nif x:\n    print(\"\\d\")\n''', p=\"one \" 'two')] Done."
    )
    turn = parse("pythonic", text)
    assert turn.content == "Done."
    assert read(turn) == [
        (
            "a.b",
            {
                **{"x": -1.5, "y": True, "z": None, "s": "it's ]"},
                **{"t": [1, [2]], "d": {"k": False}},
            },
        ),
        ("c", {"code": '\nif x:\n    print("\\d")\n', "p": "one two"}),
    ]


def test_pythonic_needs_the_tag_inside_of_prose():
    for prose in ("Call [f(x=1)] now.", "[1] says so, [f(x)] too", "[link](to)", "[see (1)]"):
        turn = parse("pythonic", prose)
        assert (turn.content, turn.calls) == (prose, [])
    turn = parse("pythonic", "Now <|python_start|>[f(x=1)]<|python_end|> or [g()]")
    assert (read(turn), turn.content) == ([("f", {"x": 1})], "Now  or [g()]")


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("f(1)", "with its name"),
        ("f(**{'x': 1})", "with its name"),
        ("f(x=open('/etc/passwd'))", "must be a number"),
        ("f(x=1 + 1)", "must be a number"),
        ("f(x=f'{1}')", "must be a number"),
        ("f(x=b'1')", "must be a number"),
        ("f(x=name)", "must be a number"),
        ("f(x={1: 2})", "keys of a dict"),
        ("f(x={**y})", "keys of a dict"),
        ("f(x=1e999)", "that JSON has not"),
        ("f(x='\\ud800')", "that JSON has not"),
        ("3", "must be a call"),
        ("f()()", "must be a call"),
        ("(lambda: 0)()", "must be a call"),
    ],
)
def test_pythonic_malformed(call, problem):
    assert problem in problem_in_place(parse("pythonic", f"[first(), {call}, last()]"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[f(x=1]", "not closed"),
        ("[f(x='1)]", "unterminated string"),
        ("[f(x=)]", "not valid Python"),
        ("[f(x=1, x=2)]", "twice"),
        ("[f(class=1)]", "not valid Python"),
        ("[f(x='\n')]", "not valid Python"),
        ("[f(x=1) for y in z]", "must be a list"),
        ("[f(x=" + "-" * 9999 + "1)]", "not valid Python"),
        ("<|python_start|>[]", "must be a list"),
        ("<|python_start|>f(x=1)", "must be a list"),
        ("<|python_start|>", "must be a list"),
    ],
)
def test_pythonic_lists_that_cannot_be_read(text, problem):
    [call] = parse("pythonic", text).calls
    assert problem in call.problem


def test_a_pythonic_list_that_is_not_closed_is_looked_at_up_to_its_end_only(monkeypatch):
    looked_at = []

    class Watched:
        def finditer(self, text, start):
            return (looked_at.append(token[0]) or token for token in tokens.finditer(text, start))

    tokens = pythonic._TOKEN
    monkeypatch.setattr(pythonic, "_TOKEN", Watched())
    turn = parse("pythonic", "[f(x=1<|python_end|>" * 100)
    assert len(turn.calls) == 100
    assert len(looked_at) == 300  # two brackets and the end, of each
