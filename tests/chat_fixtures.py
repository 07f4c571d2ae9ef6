"""Tokenizers and templates for the tests of minirl.chat, and conversations grown turn by turn."""

from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minirl.chat import ChatBuilder

TEMPLATES = Path(__file__).parent / "templates"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_WORDS = r"'s| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SENTENCES = [
    "the quick brown fox jumps over the lazy dog, and 12 + 30 = 42\n\n",
    'user\nassistant\nsystem\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n',
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds. “Exactly.”",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
MINIMAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer_for(name: str, **overrides) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of the template's family, words cut as Llama's."""
    special = overrides.get("special", LLAMA if name == "llama31" else CHATML)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(overrides.get("words", WORDS)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[-1]
    )
    tokenizer.add_tokens([] if name == "llama31" else MARKUP)
    tokenizer.chat_template = overrides.get("template") or (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


@cache
def builder(name: str, **kwargs) -> ChatBuilder:
    return ChatBuilder(tokenizer_for(name), template_kwargs=kwargs)


def with_template(template: str) -> ChatBuilder:
    return ChatBuilder(tokenizer_for("hermes"), chat_template=template)


def whole(name: str, messages: list[dict], tools=None, generation=True, **kwargs) -> list[int]:
    """The conversation by Hugging Face's own path."""
    encoded = tokenizer_for(name).apply_chat_template(
        messages, tools=tools, add_generation_prompt=generation, **kwargs
    )
    return encoded["input_ids"]


def turn(content: str, observation: list[dict], number: int, arguments: Any = None) -> dict:
    """An assistant turn that calls for the observation."""
    results = [m for m in observation if m["role"] == "tool"]
    message = {"role": "assistant", "content": content}
    if results:
        message["tool_calls"] = [
            {"id": f"call{number}{i:04d}", "type": "function", "function": call}
            for i, call in enumerate(
                [{"name": "add", "arguments": arguments or {"a": number}}] * len(results)
            )
        ]
    return message


def tool(content: str) -> dict:
    return {"role": "tool", "name": "add", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


Step = tuple[dict, list[dict]]
"""An assistant turn, and what is observed behind it."""


def grow(
    chat: ChatBuilder, name: str, start: list[dict], steps: list[Step], tools: Any, **kwargs: Any
) -> list[tuple[list[int], list[int]]]:
    """Per step, the tokens grown turn by turn, and those of the whole rendered anew.

    The model samples what the template writes for the turn, up to the one token that ends it.
    """
    messages, ids = list(start), chat.prompt(start, tools)
    pairs = [(ids, whole(name, start, tools, **kwargs))]
    for spoken, observation in steps:
        messages += [spoken, *observation]
        rendered = whole(name, messages, tools, **kwargs)
        appended = chat.observation(observation, tools)
        sampled = rendered[len(ids) : -len(appended)]
        assert [i for i in sampled if i in chat.stop_token_ids] == sampled[-1:]
        ids = ids + sampled + appended
        pairs.append((ids, rendered))
    return pairs


awkward = st.one_of(
    st.sampled_from(
        ["", " ", "\n", " 42 ", "\n\n42\n\n", "\t\r\n x", "é漢字🙂", "\u200b", "<|", "|>"]
    ),
    st.sampled_from(
        ["im_end", "< |im_end| >", "{{ x }}", "{% if %}", '{"a": "\\n"}', "\\u00e9", "user\n"]
    ),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=20),
)
