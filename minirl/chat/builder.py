"""Messages to tokens, turn by turn: what the model sampled is never decoded and encoded again.

    prompt_ids = chat.prompt(messages)   # <|im_start|>user Hi<|im_end|> <|im_start|>assistant
    A0 = sampled from prompt_ids         # <tool_call>...</tool_call><|im_end|>
    O0 = chat.observation(results)       # <|im_start|>user <tool_response>... <|im_start|>assistant
    A1 = sampled from prompt_ids+A0+O0   # 42<|im_end|>

An observation is rendered behind a dummy conversation of one user message and one assistant turn;
what the template writes behind the token that ends that turn is the text to append. This is right
for templates that only ever append. `certify` (in certify.py) proves that for a template before a
run, and `python -m minirl.chat MODEL` does so by hand.

Text in an observation that reads like a control token (a web page with `<|im_end|>` in it) stays
text: it becomes ordinary tokens that decode to the same characters, so neither a tool nor a
simulated user can end its turn or speak as somebody else. `prompt` encodes it as Hugging Face does,
as the control token: the dataset is trusted, and a system prompt may well show a `<tool_call>`.
"""

import contextlib
import copy
import json
import pickle
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import filterfalse, groupby
from pathlib import Path
from typing import Any

# Both survive what templates do to text (trim, tojson), and no tool can guess them.
MARK = "mark" + secrets.token_hex(8)
SPLIT = "split" + secrets.token_hex(8)
LONGEST_KEPT = 4096  # bytes of an observation that is rendered once for all that are equal
DUMMY_ARGUMENTS = json.dumps({"value": MARK})

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class ChatTemplateError(ValueError):
    """A chat template that cannot do what is asked of it; the message says why."""


@dataclass(frozen=True)
class TurnEnd:
    """The token that closes an assistant turn, as text."""

    last: str
    """Where the turn is the last message: the model samples it, the engine stops at it."""
    inner: str
    """Where messages follow. The same token in nearly every template."""


class ChatBuilder:
    """Renders and encodes conversations of one tokenizer and chat template; thread-safe.

    `chat_template` is Jinja text, a file that holds it, or None for the tokenizer's own;
    `template_kwargs` are variables for it (`{"enable_thinking": False}`). The engine has to stop at
    `stop_token_ids`: those that the template ends an assistant turn with, and the tokenizer's eos.

    Raises ChatTemplateError when there is no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        # A copy: whoever pads with the original switches its padding while a thread here encodes.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._encode, self._decode = _codec(self.tokenizer)
        # The samples of a group begin with the same prompt, one after another, and much of what
        # they ask their tools, and are told, is the same.
        self._prompt = lru_cache(maxsize=16)(self._pickled_prompt)
        self._observation = lru_cache(maxsize=1024)(self._pickled_observation)
        self.template = _load_template(chat_template, tokenizer.chat_template)
        self.template_kwargs = dict(template_kwargs or {})
        added = {text: i for text, i in self.tokenizer.get_added_vocab().items() if text.strip()}
        self._added_ids = added
        self._added = _any_of(added)
        special = set(self.tokenizer.all_special_tokens)
        special |= {t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special}
        # One that is neither special nor known to the template is text (Gemma's `<table>`).
        self._controls = _any_of(t for t in added if t in special or t in str(self.template))
        self._turn_ends: dict[tuple[bool, bool], TurnEnd] = {}
        self._single_call: dict[bool, bool] = {}
        self._reads_tools: dict[frozenset[str], bool] = {}
        self.stop_token_ids = self._find_stop_token_ids()

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Tokens of the conversation, then those that make the model begin its turn."""
        return list(self._prompt(pickle.dumps((messages, tools))))

    def _pickled_prompt(self, pickled: bytes) -> list[int]:
        return self.encode(self.render(*pickle.loads(pickled)))

    def observation(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Tokens to append after a sampled turn that ended with its end-of-turn token.

        `messages` are all tool results of the turn at once, in the order of the calls, or user
        messages, or both. A tool message has `content`, and `name` and `tool_call_id` where the
        template writes them. The tokens begin with what the template puts behind the end-of-turn
        token and end with the generation prompt. Control tokens in the contents stay text.
        """
        if not messages or any(m["role"] == "assistant" for m in messages):
            raise ChatTemplateError(f"observation: got {messages!r}; give tool or user messages")
        pickled = pickle.dumps((messages, self._needed(messages, tools)))
        if len(pickled) > LONGEST_KEPT:
            return self._pickled_observation(pickled)
        return list(self._observation(pickled))

    def _pickled_observation(self, pickled: bytes) -> list[int]:
        messages, tools = pickle.loads(pickled)
        safe = [self._defuse_message(m) for m in messages]
        return self.encode_behind(*self._render_behind_turn(safe, tools))

    def conversation(self, messages: Messages, num_trusted: int) -> list[int]:
        """Tokens of a whole conversation, without a generation prompt.

        Control tokens in the messages from index `num_trusted` on stay text, as in `observation`.
        """
        safe = messages[:num_trusted] + [self._defuse_message(m) for m in messages[num_trusted:]]
        text = self.render(safe, generation=False)
        return [i for piece in text.split(SPLIT) for i in self.encode(piece)]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of a sampled turn for a tool parser: only the end-of-turn tokens are left out."""
        return self._decode(list(filterfalse(self.stop_token_ids.__contains__, token_ids)))

    def render(self, messages: Messages, tools: Tools = None, *, generation: bool = True) -> str:
        """The template's text for a conversation, with or without the generation prompt.

        Call arguments given as JSON text are shown to the template as objects, and as text only if
        it fails on objects (DeepSeek V3.1 joins them as text).
        """
        if any(m.get("tool_calls") for m in messages):
            with contextlib.suppress(ChatTemplateError):
                return self._render(
                    [_with_parsed_arguments(m) for m in messages], tools, generation
                )
        return self._render(messages, tools, generation)

    def _render(self, messages: Messages, tools: Tools, generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template if isinstance(self.template, str) else None,
                add_generation_prompt=generation,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:  # a template is a program of the user's: it may raise anything
            roles = ", ".join(m["role"] for m in messages)
            problem = f"the template fails on messages ({roles}): {type(error).__name__}: {error}"
            raise ChatTemplateError(problem) from error

    def encode(self, text: str) -> list[int]:
        """Tokens of rendered text; the template itself writes a BOS where the model wants one."""
        return self._encode(text)

    def knows_tool_role(self, tools: Tools = None) -> bool:
        """Whether the template accepts a tool call followed by its result."""
        return self._takes([tool_message(0)], tools)

    def _takes(self, results: Messages, tools: Tools) -> bool:
        try:
            self.render([user_message("u"), dummy_turn(results), *results], tools)
        except ChatTemplateError:
            return False
        return True

    def observation_text(self, messages: Messages, tools: Tools) -> str:
        return self._render_behind_turn(messages, self._needed(messages, tools))[1]

    def _needed(self, messages: Messages, tools: Tools) -> Tools:
        """None where the template writes an observation alike without the schemas, which are much
        of the work to render. Mistral's has them before the last user message."""
        roles = frozenset(m["role"] for m in messages)
        if tools is not None and roles not in self._reads_tools:
            self._reads_tools[roles] = self._find_whether_tools_matter(roles, tools)
        return tools if tools is not None and self._reads_tools[roles] else None

    def _find_whether_tools_matter(self, roles: Iterable[str], tools: Tools) -> bool:
        probe = [{**tool_message(0), "role": role} for role in sorted(roles)]
        with_tools = self._render_behind_turn(probe, tools)
        try:
            return self._render_behind_turn(probe, None) != with_tools
        except ChatTemplateError:
            return True

    def _render_behind_turn(self, messages: Messages, tools: Tools) -> tuple[str, str]:
        """What ends the turn before, and the text behind it."""
        turn = dummy_turn(messages)
        if len(turn.get("tool_calls", [])) > 1 and self.is_single_call(tools):
            turn["tool_calls"] = turn["tool_calls"][:1]
        text = self.render([user_message("u"), turn, *messages], tools)
        end = self.turn_end("tool_calls" in turn, tools)
        return end.inner, text[self.end_of_last_turn(text, end) :]

    def end_of_last_turn(self, text: str, end: TurnEnd) -> int:
        """Index just behind the token that ends the last dummy turn in `text`."""
        return text.index(end.inner, text.rindex(MARK)) + len(end.inner)

    def encode_behind(self, end: str, text: str) -> list[int]:
        """Tokens of `text` where it follows the token `end`, which may swallow white space."""
        first, *rest = (end + text).split(SPLIT)
        ids = self.encode(first)
        if ids[0] != self._added_ids[end]:
            raise ChatTemplateError(f"{end!r} merges with the text behind it into {ids[:3]}")
        return ids[1:] + [i for piece in rest for i in self.encode(piece)]

    def _defuse_message(self, message: dict[str, Any]) -> dict[str, Any]:
        return {k: v if k == "role" else self._defuse(v) for k, v in message.items()}

    def _defuse(self, value: Any) -> Any:
        """`value` with a SPLIT inside everything that reads as a control token."""
        if isinstance(value, str):
            return self._controls.sub(lambda m: m[0][0] + SPLIT + m[0][1:], value)
        if isinstance(value, list):
            return [self._defuse(v) for v in value]
        if isinstance(value, dict):
            return {k: self._defuse(v) for k, v in value.items()}
        return value

    def turn_end(self, has_calls: bool, tools: Tools) -> TurnEnd:
        """How the template ends a turn with or without calls; found once per kind."""
        key = has_calls, tools is not None
        if key not in self._turn_ends:
            self._turn_ends[key] = self._find_turn_end(has_calls, tools)
        return self._turn_ends[key]

    def _find_turn_end(self, has_calls: bool, tools: Tools) -> TurnEnd:
        after = [tool_message(0)] if has_calls else [user_message("v")]
        turn = [user_message("u"), dummy_turn(after)]
        last = self._behind_mark(self.render(turn, tools, generation=False), "an assistant turn")
        found = self._added.findall(last)
        if not found:
            raise ChatTemplateError(
                f"an assistant turn ends with {last!r}, and no part of that is a special token of "
                "the tokenizer, so it would merge with what follows; add that token as special"
            )
        whole = self.render([*turn, *after], tools)
        inner = self._behind_mark(whole, "an assistant turn that is not the last")
        if has_calls:  # the calls may be closed by special tokens of their own
            plain = self.turn_end(False, tools)
            end = plain if plain.last in found else TurnEnd(last=found[-1], inner=found[-1])
        else:  # gpt-oss: <|return|>, which becomes <|end|> in a history
            following = [found[0]] if found[0] in inner else self._added.findall(inner)
            end = TurnEnd(last=found[0], inner="".join(following[:1]))
        if not end.inner or end.inner not in inner:
            raise ChatTemplateError(f"a turn ends with {end.last!r} only where it is the last")
        return end

    def _behind_mark(self, text: str, place: str) -> str:
        if MARK not in text:
            raise ChatTemplateError(f"the template leaves out the content of {place}")
        return text[text.rindex(MARK) + len(MARK) :]

    def _find_stop_token_ids(self) -> list[int]:
        found = [self.tokenizer.eos_token_id]
        for has_calls in (True, False):
            try:
                found.insert(0, self._added_ids[self.turn_end(has_calls, None).last])
            except ChatTemplateError:
                continue  # eos is enough for a single turn; `certify` says why there are no more
        return list(dict.fromkeys(i for i in found if i is not None))

    def is_single_call(self, tools: Tools) -> bool:
        """Whether the template refuses an assistant turn with two calls (Llama 3.1's does).

        The results of such a turn are then rendered behind a turn with one call.
        """
        key = tools is not None
        if key not in self._single_call:
            takes_two = self._takes([tool_message(0), tool_message(1)], tools)
            self._single_call[key] = not takes_two and self.knows_tool_role(tools)
        return self._single_call[key]


def _load_template(given: str | None, own: str | dict[str, str] | None) -> str | dict[str, str]:
    if given is None:
        if not own:
            raise ChatTemplateError(
                "the tokenizer has no chat template; name a file with one (model.chat_template)"
            )
        return own
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"chat template {given!r}: neither Jinja text nor a file to read: {error}"
        raise ChatTemplateError(problem) from error


def _codec(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """A tokenizer's `encode` and `decode`, both with just the special tokens that are in the text.

    Straight to tokenizers' Rust where that is all that transformers would do: a third of the time.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    methods = type(tokenizer).encode, type(tokenizer).decode
    own = any(m.__module__ != "transformers.tokenization_utils_base" for m in methods)
    if own or not hasattr(backend, "encode_batch_fast"):
        keep_all = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return (
            partial(tokenizer.encode, add_special_tokens=False),
            partial(tokenizer.decode, **keep_all),
        )
    tokenizer.encode("")  # sets the backend's padding, truncation and special tokens
    return (
        lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids,
        partial(backend.decode, skip_special_tokens=False),
    )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Of those that begin alike the longest. They share a group, or each `<` of a text would be
    compared with a thousand of them (Mistral's `<SPECIAL_20>` ...)."""
    groups = groupby(sorted(texts, reverse=True), key=lambda text: text[:2])
    return re.compile("|".join(f"(?:{'|'.join(map(re.escape, g))})" for _, g in groups) or r"(?!)")


def user_message(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool_message(index: int) -> dict[str, Any]:
    call_id = f"call{index:05d}"
    return {"role": "tool", "name": "tool", "tool_call_id": call_id, "content": f" {index}: x\n"}


def has_tool_result(messages: Messages) -> bool:
    return any(m["role"] == "tool" for m in messages)


def dummy_turn(observation: Messages) -> dict[str, Any]:
    """An assistant turn that calls for this observation; the last that one reads in it is MARK."""
    calls = [
        {
            "id": m.get("tool_call_id") or f"call{i:05d}",
            "type": "function",
            "function": {"name": m.get("name") or "tool", "arguments": DUMMY_ARGUMENTS},
        }
        for i, m in enumerate(m for m in observation if m["role"] == "tool")
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": MARK}
    return {**turn, "tool_calls": calls} if calls else turn


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with call arguments as objects and not as JSON text."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    try:
        return {**call, "arguments": json.loads(call.get("arguments"))}  # type: ignore[arg-type]
    except (TypeError, json.JSONDecodeError):
        return call  # what the model wrote malformed stays as it is
