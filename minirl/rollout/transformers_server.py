"""An engine made of the transformers library, in this process: for machines without vLLM.

Continuous batching over a left-padded cache of keys and values: before every token, new requests
are prefilled and join the batch, and those that have ended leave it.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from minirl.config import Config, RolloutConfig, require
from minirl.rollout.server import (
    SERVERS,
    AsyncServerBase,
    EngineLostError,
    RequestRefusedError,
    ServerStats,
)
from minirl.rollout.weight_buffer import open_cuda, open_shared, view_tensors
from minirl.types import FinishReason, TokenOutput


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

    def append(self, token_id: int, logprob: float) -> None:
        """Take in what was sampled."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

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
            request.append(token_id, logprob)
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


def check_transformers(rollout: RolloutConfig) -> None:
    """ConfigError for what this engine cannot do."""
    require(
        rollout.tensor_parallel_size == 1,
        "rollout.tensor_parallel_size",
        rollout.tensor_parallel_size,
        "rollout.name=transformers computes on one device; write 1",
    )


@SERVERS.register("transformers")
class TransformersServer(AsyncServerBase):
    """One engine in this process, on one device.

    `rollout.max_num_seqs` bounds the batch, `rollout.max_num_batched_tokens` the prompt tokens that
    join it at once. There is no prefix cache.
    """

    in_process = True

    def __init__(self, config: Config, **placement: Any) -> None:
        super().__init__(config, **placement)
        self._device = torch.device(
            "cpu" if self.device_ids is None else f"cuda:{self.device_ids[0]}"
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers engine")
        self._waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._arrived = asyncio.Event()
        self._stats = ServerStats()
        self._slept: dict[str, tuple[torch.Size, Tensor | None]] = {}

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._thread, self._load)
        self._batch = Batch(self._model)
        self._decoding = asyncio.create_task(self._decode())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._decoding.cancel()
        await asyncio.wait([self._decoding])
        self._thread.shutdown()

    def _load(self) -> PreTrainedModel:
        settings = self.config.model
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings.path,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )
        return model.to(self._device).eval().requires_grad_(False)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """See AsyncServerBase."""
        request = self._make_request(prompt_ids, sampling_params)
        await self.check_health()
        if not self._requests:
            self._busy_since = time.perf_counter()
        self._requests[request_id] = request
        self._waiting.append(request)
        self._arrived.set()
        try:
            finish_reason = await request.done
        finally:
            request.aborted = True  # if its caller was cancelled
            del self._requests[request_id]
            if not self._requests:
                self._stats.busy_s += time.perf_counter() - self._busy_since
        self._stats.num_requests += 1
        self._stats.prompt_tokens += len(prompt_ids)
        self._stats.generated_tokens += len(request.token_ids)
        return TokenOutput(
            token_ids=request.token_ids,
            logprobs=request.logprobs,
            finish_reason=finish_reason,
            weight_version=self._stats.weight_version,
        )

    def _make_request(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Request:
        try:
            params = SamplingParams(**sampling_params)
        except TypeError as error:
            raise RequestRefusedError(f"sampling parameters: {error}") from error
        room = self.config.max_model_len - len(prompt_ids)
        if not prompt_ids or params.max_tokens < 1 or room < 1:
            raise RequestRefusedError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={params.max_tokens} do not "
                f"fit into the {self.config.max_model_len} tokens of rollout.max_model_len"
            )
        params.max_tokens = min(params.max_tokens, room)
        return Request(
            prompt_ids=prompt_ids,
            params=params,
            done=asyncio.get_running_loop().create_future(),
            numbers=random.Random(params.seed),
        )

    async def _decode(self) -> None:
        """Decode whatever there is, until cancelled; an error loses the engine."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._batch.requests and not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                joining = self._take()
                ended = await loop.run_in_executor(self._thread, self._batch.step, joining)
                self._stats.num_steps += 1
                for request in ended:
                    if not request.done.done():
                        request.done.set_result(request.finish_reason or "abort")
        except Exception as error:
            for request in self._requests.values():
                if not request.done.done():
                    request.done.set_exception(_lost(error))
            raise

    def _take(self) -> list[Request]:
        """Waiting requests that the batch has room for; at least one when it is empty."""
        rollout, taken, longest = self.config.rollout, list[Request](), 0
        while self._waiting and len(self._batch.requests) + len(taken) < rollout.max_num_seqs:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if taken and longest * (len(taken) + 1) > rollout.max_num_batched_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def abort(self, request_id: str) -> None:
        """See AsyncServerBase; takes effect with the next token."""
        if request := self._requests.get(request_id):
            request.aborted = True

    async def sleep(self, level: int = 1) -> None:
        """See AsyncServerBase. Keys and values are there only while requests run."""
        if self.config.rollout.free_cache_engine and not self._slept:
            for name, weight in self._model.named_parameters():
                self._slept[name] = (weight.shape, weight.data.cpu() if level == 1 else None)
                weight.data = torch.empty(0, dtype=weight.dtype, device=self._device)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See AsyncServerBase."""
        if tags is not None and "weights" not in tags:
            return
        weights = dict(self._model.named_parameters())
        for name, (shape, kept) in self._slept.items():
            weight = weights[name]
            weight.data = torch.empty(shape, dtype=weight.dtype, device=self._device)
            if kept is not None:
                weight.data.copy_(kept)
        self._slept = {}

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """See AsyncServerBase."""
        num_bytes = init_info["num_bytes"]
        if init_info["path"] is not None:
            self._flat = open_shared(init_info["path"], num_bytes)
        else:
            self._flat = open_cuda(init_info["ipc_handles"][0], num_bytes, self._device)

    async def start_weight_update(self) -> None:
        """See AsyncServerBase."""

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """See AsyncServerBase; the fields are those of WeightBuffer.write."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._copy, update_info)

    def _copy(self, update_info: dict[str, Any]) -> None:
        weights = self._model.state_dict(keep_vars=True)
        for name, tensor in view_tensors(self._flat, update_info):
            weights[name].data.copy_(tensor)

    async def finish_weight_update(self, version: int) -> None:
        """See AsyncServerBase."""
        self._stats.weight_version = version

    async def stats(self) -> ServerStats:
        """See AsyncServerBase."""
        self._stats.num_running = len(self._requests)
        self._stats.num_waiting = len(self._waiting)
        return self._stats

    async def check_health(self) -> None:
        """See AsyncServerBase."""
        if self._decoding.done():
            raise _lost(self._decoding.exception())


def _lost(cause: BaseException | None) -> EngineLostError:
    return EngineLostError(f"the transformers engine failed ({type(cause).__name__}: {cause})")
