"""Continuous batching over a model of the transformers library.

Keys and values are padded on the left. Before every token new requests are prefilled and join the
batch, and those that have ended leave it.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

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


class Batch:
    """The requests that are decoded together, and their keys and values.

    keys and values of a layer: [B, heads, L, head_dim]; `mask` [B, L] is 0 on the left, where a
    row has fewer than L tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.requests: list[Request] = []
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def step(self, joining: list[Request]) -> list[Request]:
        """Give every request its next token, those that join their first; returns what ended."""
        if self.requests:
            tokens = [[request.token_ids[-1]] for request in self.requests]
            self._mask = pad(self._mask, (0, 1), value=1)
            self._cache = self._forward(self.requests, tokens, self._mask, self._cache)
        if joining:
            longest = max(len(request.prompt_ids) for request in joining)
            lengths = torch.tensor([len(r.prompt_ids) for r in joining])
            mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
            tokens = [[0] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in joining]
            mask = mask.to(self.model.device)
            self._merge(joining, self._forward(joining, tokens, mask, []), mask)
        ended = [request for request in self.requests if request.finish_reason]
        if ended:
            self._keep([i for i, request in enumerate(self.requests) if not request.finish_reason])
        return ended

    def _forward(
        self,
        requests: list[Request],
        tokens: list[list[int]],
        mask: Tensor,
        cache: list[tuple[Tensor, Tensor]],
    ) -> list[tuple[Tensor, Tensor]]:
        """Sample a token behind `tokens` for each request; returns the keys and values so far."""
        input_ids = torch.tensor(tokens, device=self.model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=DynamicCache(cache) if cache else DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        token_ids, logprobs = sample(output.logits[:, -1].float(), requests)
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
        return [(layer.keys, layer.values) for layer in output.past_key_values.layers]

    def _merge(
        self, joining: list[Request], cache: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> None:
        """Put them below the others, the shorter ones padded on the left."""
        length = max(mask.shape[1], self._mask.shape[1])
        ours, theirs = length - self._mask.shape[1], length - mask.shape[1]
        if self.requests:
            self._cache = [
                (
                    torch.cat([pad(keys, (0, 0, ours, 0)), pad(new_keys, (0, 0, theirs, 0))]),
                    torch.cat([pad(values, (0, 0, ours, 0)), pad(new_values, (0, 0, theirs, 0))]),
                )
                for (keys, values), (new_keys, new_values) in zip(self._cache, cache, strict=True)
            ]
            self._mask = torch.cat([pad(self._mask, (ours, 0)), pad(mask, (theirs, 0))])
        else:
            self._cache, self._mask = cache, mask
        self.requests = self.requests + joining

    def _keep(self, rows: list[int]) -> None:
        """Drop the other rows, and the columns on the left that no row needs any more."""
        self.requests = [self.requests[i] for i in rows]
        if not rows:
            self._cache, self._mask = [], self._mask[:0, :0]
            return
        index = torch.tensor(rows, device=self._mask.device)
        self._mask = self._mask[index]
        start = int(self._mask.any(0).int().argmax())
        self._mask = self._mask[:, start:]
        self._cache = [(k[index, :, start:], v[index, :, start:]) for k, v in self._cache]


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
