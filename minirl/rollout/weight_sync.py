"""The trainer's weights into this group's engine, and the proof that they are there."""

import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from minirl.config import Config
from minirl.distributed import Dist
from minirl.rollout.server import AsyncServerBase, engine_answers
from minirl.rollout.weight_buffer import WeightBuffer, cuda_handle

Bucket = list[tuple[str, Tensor]]
OnTrainer = Callable[..., Awaitable[Any]]
"""`await on_trainer(function, *arguments)` runs it in the thread of the collectives."""


PROBE_PROMPT = 65
"""Tokens before the probe, where the engine holds as many: they fill blocks of its cache."""


class Weights(Protocol):
    """The trainer's weights, a bucket of full tensors at a time; every rank iterates."""

    num_bytes: int
    """Of a buffer that holds any bucket, each tensor at a multiple of ALIGNMENT."""

    def __iter__(self) -> Iterator[Bucket]: ...


class SyncError(RuntimeError):
    """The engine does not compute what the trainer computes."""


class WeightSync:
    """Every rank makes one and calls it with the others; only a group's leader has a `server`."""

    def __init__(
        self,
        config: Config,
        world: Dist,
        server: AsyncServerBase | None,
        on_trainer: OnTrainer,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._world = world
        self._server = server
        self._on_trainer = on_trainer
        self._vocab_size = vocab_size
        self._buffer: WeightBuffer | None = None
        self.version = 0
        self.seconds: dict[str, float] = {}
        """Of the last sync: to wake the engine, gather, copy into the buffer, load, resume."""

    async def __call__(self, weights: Weights, version: int) -> None:
        """Send the buckets of `weights` and make them count as `version`."""
        server = self._server
        self.seconds = {}
        buffer = self._buffer or await self._open(weights.num_bytes)
        with self._timed("wake"):
            await self._on_trainer(self._world.release_memory)
            if server:
                async with self._engine("to wake for its weights"):
                    await server.wake_up(["weights"])
                    await server.start_weight_update()
        buckets = iter(weights)
        # The gather of the next bucket needs every rank, so none overwrites what is being loaded.
        while (bucket := await self._gather(buckets)) is not None:
            await self._load(buffer, bucket)
        with self._timed("resume"):
            # what the buckets took, and what is offloaded
            await self._on_trainer(self._world.release_memory)
            if server:
                async with self._engine("to begin with its new weights"):
                    await server.finish_weight_update(version)
                    await server.wake_up(["kv_cache"])
        self.version = version

    async def _gather(self, buckets: Iterator[Bucket]) -> Bucket | None:
        """The next bucket, or None behind the last."""
        with self._timed("gather"):
            return await self._on_trainer(next, buckets, None)

    async def _load(self, buffer: WeightBuffer, bucket: Bucket) -> None:
        with self._timed("copy"):
            info = await self._on_trainer(buffer.write, bucket)
            if buffer.bytes.is_cuda and self._world.tensor_parallel_size > 1:
                await self._on_trainer(self._world.barrier)  # each worker reads another rank's
        if self._server:
            with self._timed("load"):
                async with self._engine("to load a bucket of weights"):
                    await self._server.update_weights(info)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    async def check(self, score: Callable[[list[int]], Sequence[float]], seed: int) -> float:
        """Mean |difference| of log-probabilities on a probe that the engine samples now.

        The probe's prompt is always the same, so that an engine whose prefix cache outlived the
        sync gives itself away, and it is sampled as training samples are. `score(token_ids)` gives
        the trainer's log-probability of each token; every rank calls it.

        Raises:
            SyncError: the difference is above `rollout.sync_check.max_logprob_diff`.
        """
        check = self._config.rollout.sync_check
        assert check is not None
        length = check.probe_length
        numbers = random.Random(0)
        size = min(PROBE_PROMPT, self._config.max_model_len - length)
        prompt = [numbers.randrange(self._vocab_size) for _ in range(size)]
        sampled, ours = await self._sample(prompt, length, seed)
        theirs = (await self._on_trainer(score, prompt + sampled))[len(prompt) :]
        if self._server is None:
            return 0.0
        difference = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / length
        if not difference <= check.max_logprob_diff:  # nan counts as different
            raise SyncError(
                f"weight sync {self.version}: engine {self._world.group} and trainer differ by "
                f"{difference:.3g} in the mean log-probability of a probe, more than "
                f"rollout.sync_check.max_logprob_diff={check.max_logprob_diff:g}"
            )
        return difference

    def _engine(self, what: str) -> AbstractAsyncContextManager[None]:
        timeout_s = self._config.rollout.engine_timeout_s
        return engine_answers(f"engine {self._world.group} {what}", timeout_s)

    async def close(self) -> None:
        """Give the buffer back."""
        if self._buffer is not None:
            self._buffer.close()

    async def _open(self, num_bytes: int) -> WeightBuffer:
        """Make the buffer and let the engine's workers map it.

        On a CPU all of them map the leader's; on a GPU each maps that of the rank on its device.
        """
        buffer = self._buffer = WeightBuffer(num_bytes, self._world.device)
        init_info: dict[str, Any] = {"num_bytes": num_bytes, "path": buffer.path}
        if buffer.bytes.is_cuda:
            handles = await self._on_trainer(self._world.gather, cuda_handle(buffer.bytes))
            first, size = self._world.leader, self._world.tensor_parallel_size
            init_info["ipc_handles"] = handles[first : first + size]
        if self._server:
            async with self._engine("to map the buffer of its weights"):
                await self._server.init_weight_transfer(init_info)
        return buffer

    async def _sample(
        self, prompt: list[int], length: int, seed: int
    ) -> tuple[list[int], list[float]]:
        """The engine's continuation of the probe and its log-probabilities; a stand-in of the same
        length on ranks without an engine, which only help to compute the trainer's."""
        if self._server is None:
            return [0] * length, []
        params = {
            "temperature": self._config.rollout.temperature,
            "max_tokens": length,
            "ignore_eos": True,
            "seed": seed,
        }
        async with self._engine("to sample the probe"):
            output = await self._server.generate(prompt, params, f"probe-{self.version}-{seed}")
        return output.token_ids, output.logprobs
