"""On well-formed calls, the parsers read what vLLM's own read (its gpt-oss reads only tokens)."""

import json

import pytest
from tokenizers import Tokenizer, models
from tool_formats import FORMATS
from transformers import PreTrainedTokenizerFast

from minirl.agent_loop import TOOL_PARSERS

pytestmark = pytest.mark.engine  # importing vLLM takes as long as starting it

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array"},
                "number": {"type": "integer"},
                "share": {"type": "number"},
                "fast": {"type": "boolean"},
                "deep": {"type": "object"},
                "note": {"type": ["string", "null"]},
            },
        },
    },
}
CALLS = [
    ("get", {"city": "Zürich\nHB", "number": 8, "share": 0.5}),
    ("get", {"days": [1, "2"], "fast": True, "deep": {"a": {"b": "]}"}}, "note": None}),
]


def tokenizer_with(special):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", additional_special_tokens=special
    )


# mistral_call_id: vLLM takes [CALL_ID] for a part of the name
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"gpt_oss", "mistral_call_id"}))
@pytest.mark.parametrize("calls", [CALLS[:1], CALLS], ids=["one", "two"])
def test_vllm_reads_the_same(name, calls):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    form = FORMATS[name]
    special = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]
    special += ["[TOOL_CALLS]"] + ["[ARGS]"] * (name in ("mistral_args", "mistral_bare"))
    request = ChatCompletionRequest(messages=[], model="m", tools=[TOOL])
    parser_class = ToolParserManager.get_tool_parser(form.parser)
    text = form.write(calls)
    # vLLM's qwen3_coder begins in a thought, its pythonic knows no marks around the list
    theirs_text = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    theirs = parser_class(tokenizer_with(special), request.tools).extract_tool_calls(
        ("</think>" if name == "qwen3_coder" else "") + theirs_text, request
    )
    schemas = {"get": TOOL["function"]["parameters"]}
    ours = TOOL_PARSERS.find(form.parser)().parse(text, schemas)
    assert [(c.name, c.arguments, c.problem) for c in ours.calls] == [
        (c.function.name, json.loads(c.function.arguments), None) for c in theirs.tool_calls
    ]
    assert [(c.name, c.arguments) for c in ours.calls] == calls
