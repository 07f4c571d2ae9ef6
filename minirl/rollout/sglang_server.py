"""SGLang as an AsyncServerBase: its Engine runs in a process of its own (sglang_engine.py)."""

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch

from minirl.config import Config, ConfigError, require
from minirl.rollout.server import (
    SERVERS,
    AsyncServerBase,
    EngineLostError,
    RequestRefusedError,
    ServerClient,
    ServerStats,
)
from minirl.rollout.sglang_engine import EngineSpec, serve_engine
from minirl.rollout.worker_pool import running_process
from minirl.types import TokenOutput

SUPPORTED = ((0, 5, 22), (0, 5, 23))  # oldest and newest release of SGLang


def check_sglang(config: Config) -> None:
    """ConfigError when SGLang or a GPU is missing, or the config asks for what it cannot do."""
    key = "rollout.name"
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"{key}: sglang is not installed; say `pip install minirl[sglang]`, in an environment "
            "without vLLM, whose torch is another"
        ) from error
    release = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not SUPPORTED[0] <= release <= SUPPORTED[1]:
        raise ConfigError(f"{key}: sglang {found} is installed; minirl is made for 0.5.22, 0.5.23")
    require(
        torch.cuda.is_available() and config.trainer.device != "cpu",
        key,
        "sglang",
        "it runs on GPUs only; write vllm or transformers",
    )
    rollout = config.rollout
    require(
        (rollout.top_p, rollout.top_k, rollout.min_p) == (1.0, -1, 0.0),
        key,
        "sglang",
        "its log-probabilities are those before top_p, top_k and min_p cut the distribution; write "
        "rollout.top_p=1, top_k=-1 and min_p=0, or name=vllm",
    )


@SERVERS.register("sglang")
class SGLangServer(AsyncServerBase):
    """One SGLang engine.

    `rollout.gpu_memory_utilization` is its share of the memory that is free when it starts. Seeds
    have an effect only with `rollout.engine_kwargs.enable_deterministic_inference=true`.
    """

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        try:
            await self._start(self._stack)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        assert self.device_ids is not None  # check_sglang
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minirl-sglang-"))
        spec = EngineSpec(
            config=self.config,
            name=f"SGLang engine ({self.log_file.stem})",
            address=f"ipc://{folder}/engine",
            device_ids=self.device_ids,
            log_file=self.log_file,
            leader_pid=os.getpid(),
        )
        running = running_process(serve_engine, spec)
        process, ended = await stack.enter_async_context(running)
        self.pid: int = process.pid
        self._client = await stack.enter_async_context(
            ServerClient(spec.address, f"SGLang; see {self.log_file}")
        )
        await _first_of(self._client.stats(), ended, self.log_file)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """See AsyncServerBase; `sampling_params` have vLLM's names."""
        room = self.config.max_model_len - len(prompt_ids)
        if room < 1:
            raise RequestRefusedError(
                f"a prompt of {len(prompt_ids)} tokens does not fit into the "
                f"{self.config.max_model_len} tokens of rollout.max_model_len"
            )
        limit = min(sampling_params.get("max_tokens", room), room)
        return await self._client.generate(
            prompt_ids, {**sampling_params, "max_tokens": limit}, request_id
        )

    async def abort(self, request_id: str) -> None:
        """See AsyncServerBase."""
        await self._client.call("abort", request_id=request_id)

    async def sleep(self, level: int = 1) -> None:
        """See AsyncServerBase; at level 1 the weights stay on the device."""
        await self._client.call("sleep", level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See AsyncServerBase."""
        await self._client.call("wake_up", tags=tags)

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """See AsyncServerBase."""
        await self._client.call("init_weight_transfer", init_info=init_info)

    async def start_weight_update(self) -> None:
        """See AsyncServerBase."""
        await self._client.call("start_weight_update")

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """See AsyncServerBase; the fields are those of WeightBuffer.write."""
        await self._client.call("update_weights", update_info=update_info)

    async def finish_weight_update(self, version: int) -> None:
        """See AsyncServerBase."""
        await self._client.call("finish_weight_update", version=version)

    async def stats(self) -> ServerStats:
        """See AsyncServerBase. EngineLostError when its process does not answer."""
        limit = self.config.rollout.engine_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._client.stats()
        except TimeoutError as error:
            raise EngineLostError(
                f"the process of the SGLang engine has not answered for {limit:g} s "
                f"(rollout.engine_timeout_s); see {self.log_file}"
            ) from error

    async def check_health(self) -> None:
        """See AsyncServerBase. SGLang ends the process when one of its own has died."""
        await self.stats()


async def _first_of(answer: Any, ended: asyncio.Event, log_file: Path) -> None:
    """Wait for the first answer of a process, or raise when it ends without one."""
    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(ended.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            reason = _last_line(log_file)
            raise EngineLostError(f"the SGLang engine did not start: {reason}; see {log_file}")
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _last_line(path: Path) -> str:
    return path.read_text(errors="replace").rstrip().rpartition("\n")[2]
