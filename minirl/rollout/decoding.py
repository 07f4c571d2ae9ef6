"""Continuous batching over a model of the transformers library.

Keys and values are padded on the left. Before every token new requests are prefilled and join the
batch, and those that have ended leave it.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from minirl.types import FinishReason


@dataclass(kw_only=True)
class SamplingParams:
    """How a request is sampled; names and meaning are vLLM's."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """Accepted for vLLM's sake: only `stop_token_ids` end a request here."""


@dataclass(eq=False)
class Request:
    """One request, waiting or in the batch."""

    prompt_ids: list[int]
    params: SamplingParams
    done: "asyncio.Future[FinishReason]"
    """Its finish reason, once it has ended."""
    numbers: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it goes on."""
        if self.aborted:
            return "abort"
        if self.token_ids and self.token_ids[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.params.max_tokens else None


class _Layer(DynamicLayer):
    """Keys and values of a layer [B, heads, L, head_dim]; the last column is not written yet."""

    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write that column, where transformers' own layer would copy all of them."""
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """The columns before it."""
        return int(self.keys.shape[-2]) - 1


class Batch:
    """The requests that are decoded together, and their keys and values.

    Of every layer there are buffers of both [rows, heads, columns, head_dim]: request i has row i,
    from the column `_starts[i]` to `_end`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.requests: list[Request] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._starts: list[int] = []
        self._end = 0

    @torch.inference_mode()
    def step(self, joining: list[Request]) -> list[Request]:
        """Give every request its next token, those that join their first; returns what ended."""
        if self.requests:
            self._decode()
        if joining:
            self._join(joining)
        ended = [request for request in self.requests if request.finish_reason]
        if ended:
            self._drop_ended()
        return ended

    def _decode(self) -> None:
        """A token for each of those that are in the batch, whose keys and values take a column."""
        self._make_room(len(self.requests), 0)
        self._end += 1
        first = min(self._starts)
        window = slice(len(self.requests)), slice(None), slice(first, self._end)
        layers: list[Any] = [_Layer(keys[window], values[window]) for keys, values in self._buffers]
        tokens = [[request.token_ids[-1]] for request in self.requests]
        padding = [start - first for start in self._starts]
        self._forward(self.requests, tokens, padding, self._end - first, Cache(layers=layers))

    def _forward(
        self,
        requests: list[Request],
        tokens: list[list[int]],
        padding: list[int],
        length: int,
        cache: Cache,
    ) -> None:
        """Sample a token behind `tokens` for each request; `cache` has what is before them, in all
        `length` columns, of which the first `padding` of a row are not its own."""
        input_ids = torch.tensor(tokens, device=self.model.device)
        columns = torch.arange(length, device=self.model.device)
        positions = columns - torch.tensor(padding, device=self.model.device)[:, None]
        output = self.model(
            input_ids=input_ids,
            attention_mask=(positions >= 0).long(),
            position_ids=positions[:, -input_ids.shape[1] :].clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        token_ids, logprobs = sample(output.logits[:, -1].float(), requests)
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)

    def _join(self, joining: list[Request]) -> None:
        """Prefill them, and put what that gives into the rows below the others."""
        longest = max(len(request.prompt_ids) for request in joining)
        padding = [longest - len(request.prompt_ids) for request in joining]
        tokens = [[0] * n + r.prompt_ids for n, r in zip(padding, joining, strict=True)]
        cache = DynamicCache()
        self._forward(joining, tokens, padding, longest, cache)
        prefilled: list[Any] = cache.layers
        if not self._buffers:
            self._buffers = [(x.keys[:0, :, :0], x.values[:0, :, :0]) for x in prefilled]
        first = len(self.requests)
        self.requests += joining
        self._make_room(len(self.requests), longest)
        self._starts += [self._end - longest + n for n in padding]
        for both, layer in zip(self._buffers, prefilled, strict=True):
            for buffer, new in zip(both, (layer.keys, layer.values), strict=True):
                buffer[first : len(self.requests), :, self._end - longest : self._end] = new

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        """Have that many rows, and columns before `_end`, and one behind it; larger buffers get
        room for half as much again, so that copying into them is rare."""
        rows, _, columns, _ = self._buffers[0][0].shape
        if num_rows <= rows and num_columns <= self._end < columns:
            return
        start = min(self._starts, default=self._end)
        used = self._end - start
        end = max(used, num_columns)
        left = max(r.params.max_tokens - len(r.token_ids) for r in self.requests)
        num_columns = end + max(1, min(left, end // 2))
        num_rows = max(num_rows, rows * 3 // 2 if num_rows > rows else 0)

        def larger(buffer: Tensor) -> Tensor:
            new = buffer.new_zeros(num_rows, buffer.shape[1], num_columns, buffer.shape[3])
            kept = buffer[: len(self._starts), :, start : self._end]
            new[: len(self._starts), :, end - used : end] = kept
            return new

        for i, (keys, values) in enumerate(self._buffers):  # never all of them twice
            self._buffers[i] = larger(keys), larger(values)
        self._starts = [s + end - self._end for s in self._starts]
        self._end = end

    def _drop_ended(self) -> None:
        """The last rows that stay take the places of those that have ended."""
        staying = [i for i, request in enumerate(self.requests) if not request.finish_reason]
        count = len(staying)
        if not count:
            self.requests, self._buffers, self._starts, self._end = [], [], [], 0
            return
        free = sorted(set(range(count)) - set(staying))
        moving = [i for i in staying if i >= count]
        if moving:
            window = slice(min(self._starts), self._end)
            for buffer in chain.from_iterable(self._buffers):
                buffer[free, :, window] = buffer[moving, :, window]
            for to, origin in zip(free, moving, strict=True):
                self.requests[to], self._starts[to] = self.requests[origin], self._starts[origin]
        del self.requests[count:], self._starts[count:]


def sample(logits: Tensor, requests: list[Request]) -> tuple[list[int], list[float]]:
    """A token for each row of `logits` [B, V], and its log-probability as sampled.

    That is after temperature, top_k, top_p and min_p. Each request draws from its own generator, so
    what it samples does not depend on its neighbours. Temperature 0 takes the best token.
    """
    params = [request.params for request in requests]
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    heat = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
    logprobs = torch.log_softmax(logits / heat[:, None], -1)
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        logprobs = torch.log_softmax(_truncate(logprobs, params), -1)
    # The inverse of the distribution function at one uniform number per request.
    cumulated = logprobs.double().exp().cumsum(-1)
    uniform = torch.tensor([request.numbers.random() for request in requests], dtype=torch.float64)
    target = uniform.to(logits.device) * cumulated[:, -1]
    drawn = torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]
    chosen = torch.where(greedy, logprobs.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return chosen.tolist(), logprobs.gather(-1, chosen[:, None])[:, 0].tolist()


def _truncate(logprobs: Tensor, params: list[SamplingParams]) -> Tensor:
    """-inf on what top_k, min_p and top_p leave out; the best token always stays."""
    vocabulary = logprobs.shape[-1]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocabulary for p in params])
    top_p = torch.tensor([p.top_p for p in params])
    min_p = torch.tensor([p.min_p for p in params])
    top_k, top_p, min_p = (t.to(logprobs.device)[:, None] for t in (top_k, top_p, min_p))
    ranked, order = logprobs.sort(-1, descending=True)
    rank = torch.arange(vocabulary, device=logprobs.device)
    ranked = ranked.masked_fill(rank >= top_k, -torch.inf)
    ranked = ranked.masked_fill(ranked < ranked[:, :1] + min_p.log(), -torch.inf)
    probs = torch.softmax(ranked, -1)
    before = probs.cumsum(-1) - probs
    ranked = ranked.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
    return torch.empty_like(logprobs).scatter_(-1, order, ranked)
