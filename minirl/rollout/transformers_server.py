"""An engine made of the transformers library, in this process: for machines without vLLM."""

import asyncio
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from minirl.config import Config, RolloutConfig, require
from minirl.distributed import compute_in
from minirl.rollout.decoding import Batch, Request, SamplingParams
from minirl.rollout.server import (
    SERVERS,
    AsyncServerBase,
    EngineLostError,
    RequestRefusedError,
    ServerStats,
)
from minirl.rollout.weight_buffer import open_cuda, open_shared, view_tensors
from minirl.types import TokenOutput


def check_transformers(rollout: RolloutConfig) -> None:
    """ConfigError for what this engine cannot do."""
    require(
        rollout.tensor_parallel_size == 1,
        "rollout.tensor_parallel_size",
        rollout.tensor_parallel_size,
        "rollout.name=transformers computes on one device; write 1",
    )
    require(
        not rollout.engine_kwargs,
        "rollout.engine_kwargs",
        rollout.engine_kwargs,
        "rollout.name=transformers takes none; leave it out",
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
        self._waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._arrived, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._awake = True
        self._stats = ServerStats()
        self._slept: dict[str, tuple[torch.Size, Tensor | None]] = {}

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._thread = self.executor or ThreadPoolExecutor(1, "transformers engine")
        if self.executor is None and self.device_ids is None:
            await compute_in(self._thread, self.num_threads)
        self._model = await loop.run_in_executor(self._thread, self._load)
        self._batch = Batch(self._model)
        self._decoding = asyncio.create_task(self._decode())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._decoding.cancel()
        await asyncio.wait([self._decoding])
        if self._thread is not self.executor:
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
        self._requests[request_id] = request
        self._waiting.append(request)
        self._arrived.set()
        try:
            with self._stats.running():
                finish_reason = await request.done
        finally:
            request.aborted = True  # if its caller was cancelled
            del self._requests[request_id]
        output = TokenOutput(
            token_ids=request.token_ids,
            logprobs=request.logprobs,
            finish_reason=finish_reason,
            weight_version=self._stats.weight_version,
        )
        self._stats.count(output)
        return output

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
                while not (joining := self._take()) and not self._batch.requests:
                    self._arrived.clear()
                    self._idle.set()
                    await self._arrived.wait()
                self._idle.clear()
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
        """Waiting requests that the batch has room for; at least one when it is empty. None while
        the weights are away, or are replaced."""
        rollout, taken, longest = self.config.rollout, list[Request](), 0
        if not self._awake:
            return taken
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
        self._awake = False
        for request in self._requests.values():
            request.aborted = True
        await self._idle.wait()  # one that was aborted is in the batch until its next token
        if self.config.rollout.free_cache_engine and not self._slept:
            for name, weight in self._model.named_parameters():
                self._slept[name] = (weight.shape, weight.data.cpu() if level == 1 else None)
                weight.data = torch.empty(0, dtype=weight.dtype, device=self._device)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See AsyncServerBase."""
        if tags is None or "weights" in tags:
            self._take_weights_back()
        if tags is None or "kv_cache" in tags:  # which wakes last
            self._awake = True
            self._arrived.set()

    def _take_weights_back(self) -> None:
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
        self._stats.count_time()
        self._stats.num_waiting = len(self._waiting)
        return self._stats

    async def check_health(self) -> None:
        """See AsyncServerBase."""
        if self._decoding.done():
            raise _lost(self._decoding.exception())


def _lost(cause: BaseException | None) -> EngineLostError:
    return EngineLostError(f"the transformers engine failed ({type(cause).__name__}: {cause})")
