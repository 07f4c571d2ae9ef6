"""For tests of agent loops, tools and rewards: a scripted engine, a tiny tokenizer, a tiny model.

server = ScriptedServer(byte_tokenizer(), ["<tool_call>...</tool_call>", "#### 4"])
context = make_context(server, tools=[CalculatorTool({})])
[trajectory] = await run_agent_loop(MyAgentLoop(context), {}, {"raw_prompt": [...]})
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minirl.agent_loop.base import AgentLoopContext
from minirl.chat import ChatBuilder
from minirl.config import load_config
from minirl.openai.endpoint import PolicyEndpoint
from minirl.tools.base import BaseTool
from minirl.types import TokenOutput

Reply = str | TokenOutput
ReplyFunction = Callable[[str, int, list[int]], Reply | Awaitable[Reply]]

CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes, ChatML's control tokens and Qwen's tool tags: 263 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    path: str | Path,
    *,
    tied: bool = False,
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    max_length: int = 4096,
    tokenizer: Any = None,
    seed: int = 0,
    reward_model: Literal["sequence", "token"] | None = None,
) -> Path:
    """Write a random float32 Qwen3 and its tokenizer (`byte_tokenizer()`) to a folder; return it.

    The defaults are what vLLM's CPU build can serve: 0.15 M parameters. `tied` shares the input and
    output embeddings, as Qwen 2.5 and 3 below 4B do. `reward_model` makes it a classifier of
    sequences or tokens with one label.
    """
    import transformers  # seconds, and most tests need no model

    tokenizer = tokenizer or byte_tokenizer()
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size: got {vocab_size}; the tokenizer needs {len(tokenizer)}")
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    if reward_model:
        config.num_labels = 1
    classes: dict[str | None, Any] = {
        None: transformers.Qwen3ForCausalLM,
        "sequence": transformers.Qwen3ForSequenceClassification,
        "token": transformers.Qwen3ForTokenClassification,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = classes[reward_model](config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRequest:
    """What a ScriptedServer was asked."""

    request_id: str
    turn: int
    """0, 1, ... per request_id."""
    prompt_ids: list[int]
    sampling_params: dict[str, Any]


class ScriptedServer:
    """An engine that samples what the script says; implements `minirl.agent_loop.Server`.

    `replies` holds the text of each turn, or is a function (async or not) of (request_id, turn,
    prompt_ids). A text is tokenized and followed by the end-of-turn token; with more than
    `max_tokens` tokens it is cut and finishes as `length`. A TokenOutput is handed on as it is.
    `delay_s` is the time of a reply in seconds, or a function of (request_id, turn). Every request
    is kept in `requests`, in the order of arrival.
    """

    def __init__(
        self,
        tokenizer: Any,
        replies: Sequence[Reply] | ReplyFunction,
        *,
        delay_s: float | Callable[[str, int], float] = 0.0,
        weight_version: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.replies = replies
        self.delay_s = delay_s
        self.weight_version = weight_version
        self.requests: list[ScriptedRequest] = []
        self._turns: Counter[str] = Counter()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """The script's next turn of this conversation; LookupError when it has no further one."""
        turn = self._turns[request_id]
        self._turns[request_id] += 1
        self.requests.append(
            ScriptedRequest(
                request_id=request_id,
                turn=turn,
                prompt_ids=list(prompt_ids),
                sampling_params=dict(sampling_params),
            )
        )
        delay = self.delay_s(request_id, turn) if callable(self.delay_s) else self.delay_s
        await asyncio.sleep(delay)
        reply = await self._reply(request_id, turn, prompt_ids)
        return self._sample(reply, sampling_params) if isinstance(reply, str) else reply

    @staticmethod
    def logprob(token_id: int) -> float:
        """The log-probability given to a scripted token: one of its own, so that mix-ups show."""
        return -(token_id + 1) / 1024

    async def _reply(self, request_id: str, turn: int, prompt_ids: list[int]) -> Reply:
        if callable(self.replies):
            reply = self.replies(request_id, turn, list(prompt_ids))
            return await reply if inspect.isawaitable(reply) else reply
        if turn >= len(self.replies):
            raise LookupError(
                f"the script has {len(self.replies)} turns, turn {turn} was asked for"
            )
        return self.replies[turn]

    def _sample(self, text: str, sampling_params: dict[str, Any]) -> TokenOutput:
        stop = sampling_params.get("stop_token_ids") or [self.tokenizer.eos_token_id]
        sampled = [*self.tokenizer.encode(text, add_special_tokens=False), stop[0]]
        limit = sampling_params.get("max_tokens")
        cut = sampled if limit is None else sampled[:limit]
        return TokenOutput(
            token_ids=cut,
            logprobs=[self.logprob(token_id) for token_id in cut],
            finish_reason="stop" if len(cut) == len(sampled) else "length",
            weight_version=self.weight_version,
        )


def make_context(
    server: ScriptedServer, *, tools: Sequence[BaseTool] = (), overrides: Sequence[str] = ()
) -> AgentLoopContext:
    """What agent loops need to run on a scripted server; `overrides` are `key=value` settings."""
    context = AgentLoopContext(
        server=server,
        tokenizer=server.tokenizer,
        chat=ChatBuilder(server.tokenizer),
        tools={tool.name: tool for tool in tools},
        config=load_config(["model.path=scripted", *overrides]),
    )
    context.endpoint = PolicyEndpoint(context)
    return context
