"""Calls as the models' own templates write them, in every format; shared by the parsers' tests."""

import json
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

Call = tuple[str, dict]


def _json(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call]) -> str:
    bodies = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen3_coder(calls: list[Call]) -> str:
    def parameter(key, value):
        text = value if isinstance(value, str) else _json(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(parameter(*item) for item in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def llama3_json(calls: list[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": args}) for name, args in calls)


def llama3_tagged(calls: list[Call]) -> str:
    return "<|python_tag|>" + llama3_json(calls)


def mistral_array(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + _json(
        [{"name": n, "arguments": a, "id": "a1B2c3D4e"} for n, a in calls]
    )


def mistral_bare(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{_json(args)}" for name, args in calls)


def mistral_args(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(args)}" for name, args in calls)


def mistral_call_id(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1B2c3D4e[ARGS]{_json(a)}" for n, a in calls)


def gpt_oss(calls: list[Call]) -> str:
    """As the model samples: the recipient behind the channel, `<|call|>` cut off by the engine."""
    messages = (
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(a)}"
        for n, a in calls
    )
    return "<|call|><|start|>assistant".join(messages)


def gpt_oss_template(calls: list[Call]) -> str:
    """As the template writes a history: the recipient before the channel."""
    return "".join(
        f"<|start|>assistant to=functions.{n}<|channel|>commentary json"
        f"<|message|>{_json(a)}<|call|>"
        for n, a in calls
    )


def pythonic(calls: list[Call]) -> str:
    def call(name, arguments):
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(call(*c) for c in calls)}]"


def pythonic_tagged(calls: list[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


# The first </think> ends a thought wherever it stands.
texts = st.text(max_size=20).filter(lambda text: not re.search(r"</think>|\[/THINK\]", text))
tool_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,9}", fullmatch=True)
identifiers = st.one_of(
    st.from_regex(r"[A-Za-z_]\w{0,7}", fullmatch=True).filter(str.isidentifier),
    st.sampled_from(["größe", "ﬁnd", "名前"]),  # the second is not its own NFKC form
).filter(lambda text: not keyword.iskeyword(text))
bare_keys = st.text(min_size=1, max_size=8).filter(
    lambda text: text == text.strip() and not re.search(r"[<>\n]", text)
)


def _values(strings):
    return st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), strings),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )


def _calls(names, keys, strings=texts):
    return st.tuples(names, st.dictionaries(keys, _values(strings), max_size=3))


_ANY = _calls(texts.filter(bool), texts)
_NAMED = _calls(tool_names, texts)
_PYTHON = _calls(identifiers, identifiers)
_BARE = _calls(tool_names, bare_keys, texts.filter(lambda text: "<" not in text))


@dataclass(frozen=True)
class Format:
    parser: str
    write: Callable[[list[Call]], str]
    opening: str
    """From here on (of a call to `get`) it cannot be anything but a call."""
    before: str = "{}"
    """How the model writes prose in front of its calls; "" where the format has no place for it."""
    calls: st.SearchStrategy = _ANY
    wrapped: str = "<think>{}</think>"
    """How it writes its thoughts."""


_HARMONY = {
    "before": "<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
    "calls": _NAMED,
    "wrapped": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
}

FORMATS = {
    "hermes": Format("hermes", hermes, "<tool_call>"),
    "qwen3_coder": Format("qwen3_coder", qwen3_coder, "<tool_call>", calls=_BARE),
    "llama3_json": Format("llama3_json", llama3_json, '{"name"', before=""),
    "llama3_tagged": Format("llama3_json", llama3_tagged, "<|python_tag|>"),
    "mistral_array": Format("mistral", mistral_array, "[TOOL_CALLS]", wrapped="[THINK]{}[/THINK]"),
    "mistral_bare": Format("mistral", mistral_bare, "[TOOL_CALLS]", calls=_NAMED),
    "mistral_args": Format("mistral", mistral_args, "[TOOL_CALLS]", calls=_NAMED),
    "mistral_call_id": Format("mistral", mistral_call_id, "[TOOL_CALLS]", calls=_NAMED),
    "gpt_oss": Format("gpt-oss", gpt_oss, "<|channel|>commentary to=functions.get", **_HARMONY),
    "pythonic": Format("pythonic", pythonic, "[get(", before="", calls=_PYTHON),
    "pythonic_tagged": Format("pythonic", pythonic_tagged, "<|python_start|>", calls=_PYTHON),
}
