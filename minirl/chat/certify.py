"""Whether a chat template can be extended turn by turn: the proof, and a readable report."""

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from minirl.chat.builder import (
    MARK,
    ChatBuilder,
    ChatTemplateError,
    Messages,
    Tools,
    dummy_turn,
    has_tool_result,
    tool_message,
    user_message,
)

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool for this test.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}},
    },
}


def certify(chat: ChatBuilder, tools: Tools = None, *, with_results: bool = True) -> None:
    """Raise ChatTemplateError with the reason if conversations cannot be extended turn by turn.

    Rehearses conversations of several turns and compares what `observation` appends with the
    whole rendered anew, as text and as tokens. A template without a tool role passes when
    `tools` is None; `with_results=False` leaves out the results of tools, whatever it has.
    """
    rehearsals = {"user messages": [[user_message(text)] for text in (" And\n", "then?", "why")]}
    if with_results and (tools is not None or chat.knows_tool_role()):
        many = 1 if chat.is_single_call(tools) else 3
        results = [[tool_message(i) for i in range(n)] for n in (1, many, min(many, 2), 1)]
        rehearsals["tool results"] = results
        mixed = [*results[:2], [user_message("so")], results[0]]
        rehearsals["tool results and user messages"] = mixed
    for name, observations in rehearsals.items():
        try:
            _rehearse(chat, observations, tools)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"cannot extend by {name}: {error}") from error


def _rehearse(chat: ChatBuilder, observations: list[Messages], tools: Tools) -> None:
    """Compare appending with rendering the whole, along a conversation with these observations."""
    messages = [user_message("Begin.")]
    for observation in observations:
        starts = [chat.render(messages, tools, generation=g) for g in (False, True)]
        messages = [*messages, dummy_turn(observation), *observation]
        whole = chat.render(messages, tools)
        if not whole.startswith(tuple(starts)):
            change = _difference(starts[0], whole)
            raise ChatTemplateError(f"the text of earlier messages changes as it grows, {change}")
        end = chat.turn_end(has_tool_result(observation), tools)
        cut = chat.end_of_last_turn(whole, end)
        text = chat.observation_text(observation, tools)
        if whole[cut:] != text:
            change = _difference(text, whole[cut:])
            raise ChatTemplateError(f"the text of an observation depends on its place, {change}")
        for message in observation:
            if message["content"].strip() not in text:
                raise ChatTemplateError(
                    f"the template leaves out the content of a {message['role']} message"
                )
        if chat.encode(whole[:cut]) + chat.encode_behind(end.inner, text) != chat.encode(whole):
            raise ChatTemplateError(
                f"the text behind {end.inner!r} gets other tokens when it stands alone: {text!r}"
            )


DATE_FORMATS = "%d %b", "%b %d", "%d %B", "%B %d", "%Y-%m-%d"


def quirks(chat: ChatBuilder, tools: Tools) -> list[str]:
    """What is unusual about a certified template and still works, in plain words."""
    found = []
    prompt = chat.render([user_message(MARK)])
    bare = chat.render([user_message(MARK)], generation=False)
    head = prompt[: prompt.index(MARK)]
    if len(head.split()) > 3:
        found.append(f"it writes a system prompt by itself: {head!r}")
    if any(datetime.now().strftime(form) in head for form in DATE_FORMATS):
        found.append("the prompt holds today's date: a run repeated tomorrow reads other prompts")
    if chat.render([user_message(f" {MARK} ")], generation=False).count(f" {MARK} ") == 0:
        found.append("it trims the content of messages")
    answer = {"role": "assistant", "content": "answer"}
    turn = chat.render([user_message(MARK), answer, user_message("next")])
    opening, written = prompt[len(bare) :], turn[len(bare) : turn.index("answer")]
    if prompt.startswith(bare) and opening != written:
        found.append(
            f"it opens the model's turn with {opening!r}, but writes {written!r} in a history; the "
            "tokens that the model read stay"
        )
    ids = chat.encode(prompt)
    if turn.startswith(prompt) and chat.encode(turn)[: len(ids)] != ids:
        found.append(
            f"rendered whole, the end of {opening!r} would merge with the turn behind it; the "
            "tokens that the model read stay"
        )
    for field, message in _reasoning_messages().items():
        if _is_stripped(chat, message):
            found.append(
                f"it drops the reasoning ({field}) of turns before the last user message; here the "
                "tokens that the model sampled stay"
            )
    return found + (_tool_quirks(chat, tools) if tools else [])


def _tool_quirks(chat: ChatBuilder, tools: Tools) -> list[str]:
    found = []
    if chat.is_single_call(tools):
        found.append(
            "it has one call per turn; further results of a turn become messages of their own"
        )
    one, two = (chat.observation_text([tool_message(0)] * n, tools) for n in (1, 2))
    end = chat.turn_end(True, tools)
    if not chat.is_single_call(tools) and two.count(end.inner) == one.count(end.inner):
        found.append("several tool results share one block")
    if end.last != end.inner:
        found.append(f"a turn ends with {end.last!r}, in a history with {end.inner!r}")
    return found


def _reasoning_messages() -> dict[str, dict[str, Any]]:
    thought = {"role": "assistant", "content": f"<think>\n{MARK}\n</think>\n\nanswer"}
    return {
        "<think> in the content": thought,
        "reasoning_content": {**thought, "content": "answer", "reasoning_content": MARK},
    }


def _is_stripped(chat: ChatBuilder, turn: dict[str, Any]) -> bool:
    """Whether the reasoning in `turn` is written only as long as that is the last turn."""
    conversation = [user_message("u"), turn]
    last = chat.render(conversation, generation=False)
    return MARK in last and MARK not in chat.render([*conversation, user_message("next")])


def _difference(left: str, right: str) -> str:
    """`from ... to ...`: both texts around the first character that differs."""
    pairs = enumerate(zip(left, right, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    start = max(0, first - 20)
    old, new = (text.replace(MARK, "...")[start : start + 60] for text in (left, right))
    return f"from {old!r} to {new!r}"


def report(chat: ChatBuilder) -> tuple[str, bool]:
    """What a conversation looks like token by token, the quirks, and whether it can be extended."""
    lines = ["stop tokens:", _shown(chat, chat.stop_token_ids), ""]
    verdicts = {"without tools": _verdict(chat, None), "with tools": _verdict(chat, [PROBE_TOOL])}
    user = [user_message("Hi")]
    lines += ["prompt of one user message:", _shown(chat, chat.prompt(user)), ""]
    if verdicts["with tools"] is None:
        results = [{**tool_message(i), "content": f"result {i}"} for i in range(2)]
        lines += ["behind a turn with two calls, their results:"]
        lines += [_shown(chat, chat.observation(results, [PROBE_TOOL])), ""]
    if verdicts["without tools"] is None:
        lines += ["behind a turn, a user message:"]
        lines += [_shown(chat, chat.observation([user_message("Go on")])), ""]
        tools = [PROBE_TOOL] if verdicts["with tools"] is None else None
        lines += [*(f"note: {quirk}" for quirk in quirks(chat, tools)), ""]
    for name, reason in verdicts.items():
        lines.append(f"{name}: " + ("ok" if reason is None else f"REFUSED, {reason}"))
    return "\n".join(lines), all(reason is None for reason in verdicts.values())


def _verdict(chat: ChatBuilder, tools: Tools) -> str | None:
    try:
        certify(chat, tools)
    except ChatTemplateError as error:
        return str(error)
    return None


def _shown(chat: ChatBuilder, ids: list[int]) -> str:
    """`text:id` per token; a new line behind every token that ends with a newline."""
    text = ""
    for i in ids:
        piece = chat.tokenizer.decode([i], skip_special_tokens=False)
        text += f" {piece!r}:{i}" + ("\n" if piece.endswith("\n") else "")
    return "\n".join(f" {line}" for line in text.strip("\n").split("\n"))


def main() -> int:
    """The command; returns its exit status: 0 certified, 1 refused, 2 not a tokenizer folder."""
    parser = argparse.ArgumentParser(prog="python -m minirl.chat", description=__doc__)
    parser.add_argument("model", type=Path, help="folder with a tokenizer")
    parser.add_argument("--chat-template", help="file with a Jinja template to use instead")
    options = parser.parse_args()
    if not options.model.is_dir():
        parser.error(f"{options.model}: no such folder")
    from transformers import AutoTokenizer  # slow to import, and bad usage should be told at once

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(f"{options.model}: holds no tokenizer: {error}")
    try:
        chat = ChatBuilder(tokenizer, chat_template=options.chat_template)
        text, certified = report(chat)
    except ChatTemplateError as error:
        text, certified = f"REFUSED: {error}", False
    print(f"{options.model}: {type(tokenizer).__name__}, {len(tokenizer)} tokens\n{text}")
    return 0 if certified else 1
