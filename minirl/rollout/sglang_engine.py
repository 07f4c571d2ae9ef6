"""SGLang's Engine, alone in a process; sglang_server.py starts it and passes calls on.

Alone, because it takes SIGTERM and SIGQUIT for itself, changes the environment and the way in which
multiprocessing starts processes, and kills every child of its process when it ends, whosever it is.
Written against SGLang 0.5.22 and 0.5.23.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from minirl.config import Config
from minirl.rollout import sglang_weights
from minirl.rollout.processes import end_with, main_module_stays_here, visible_devices
from minirl.rollout.server import RequestRefusedError, ServerService, ServerStats
from minirl.rollout.worker_process import CLOSE_S, print_to
from minirl.types import TokenOutput

IDLE_S = 60.0
"""For requests that were aborted to be gone; then the engine is not put to sleep."""
SPARE_TOKENS = 8
"""SGLang keeps up to six tokens of its context length to itself."""
NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""Of sampling parameters: vLLM's to SGLang's, where they differ."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What the process is told."""

    config: Config
    name: str
    address: str
    """Where it is to be reached."""
    device_ids: list[int]
    """Among the CUDA devices that the leader sees."""
    log_file: Path
    leader_pid: int


def serve_engine(spec: EngineSpec) -> None:
    """Serve until SIGTERM, or until the leader is gone."""
    print_to(spec.log_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the leader says when to end
    end_with(spec.leader_pid, CLOSE_S)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.device_ids)
    # The spare tokens may exceed what the model's config.json allows; no request uses them.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # torchrun's, for its ranks: schedulers would wait in vain for its agent to let them meet.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    uvloop.run(_serve(spec))


async def _serve(spec: EngineSpec) -> None:
    from sglang.srt.entrypoints.engine import Engine

    with main_module_stays_here():
        engine = Engine(**engine_arguments(spec.config))
    try:
        stop = asyncio.Event()
        engine.tokenizer_manager.auto_create_handle_loop()  # takes SIGTERM, to drain for long
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        service = ServerService(HostedEngine(engine, spec.config), spec.address)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(service.serve())
            await stop.wait()
            serving.cancel()
    finally:
        engine.shutdown()


def engine_arguments(config: Config) -> dict[str, Any]:
    """SGLang's ServerArgs by name, rollout.engine_kwargs last."""
    rollout, model = config.rollout, config.model
    return {
        "model_path": model.path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "context_length": config.max_model_len + SPARE_TOKENS,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "tp_size": rollout.tensor_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "enable_memory_saver": rollout.free_cache_engine,
        "disable_cuda_graph": rollout.enforce_eager,
        "random_seed": config.trainer.seed,
        "custom_weight_loader": [sglang_weights.LOADER],
        "watchdog_timeout": rollout.engine_timeout_s,
        "log_level": "info",
    } | rollout.engine_kwargs


def to_sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """vLLM's sampling parameters by SGLang's names."""
    return {NAMES.get(name, name): value for name, value in params.items()}


def to_token_output(answer: dict[str, Any], weight_version: int) -> TokenOutput:
    """What `Engine.async_generate` returned for a request with log-probabilities.

    A request that was aborted before it ran has no figures.
    """
    meta = answer["meta_info"]
    return TokenOutput(
        token_ids=list(answer["output_ids"]),
        logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
        finish_reason=meta["finish_reason"]["type"],
        num_cached_tokens=meta.get("cached_tokens", 0),
        num_preempted=meta.get("num_retractions", 0),
        weight_version=weight_version,
    )


class HostedEngine:
    """The methods of AsyncServerBase that are served, on SGLang's Engine."""

    def __init__(self, engine: Any, config: Config) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._can_sleep = config.rollout.free_cache_engine
        self._asleep: set[str] = set()
        self._stats = ServerStats()
        self._last_message = 0.0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """See AsyncServerBase."""
        stats = self._stats
        try:
            with stats.running():
                answer = await self._engine.async_generate(
                    input_ids=prompt_ids,
                    sampling_params=to_sampling_params(sampling_params),
                    return_logprob=True,
                    rid=_rid(request_id),
                )
        except (TypeError, ValueError) as error:
            raise RequestRefusedError(str(error)) from error
        output = to_token_output(answer, stats.weight_version)
        stats.count(output)
        return output

    async def abort(self, request_id: str) -> None:
        """See AsyncServerBase."""
        self._manager.abort_request(rid=_rid(request_id))

    async def sleep(self, level: int = 1) -> None:
        """See AsyncServerBase; what still runs is waited for. At level 1 the weights stay on the
        device: SGLang copies them to the host at every sleep, or never, by an argument of its
        start."""
        tags = ({"kv_cache", "weights"} if level > 1 else {"kv_cache"}) - self._asleep
        if self._can_sleep and tags:
            from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

            await self._flush_cache()  # in an engine that is not idle the release would fail
            request = ReleaseMemoryOccupationReqInput(tags=sorted(tags))
            await self._manager.release_memory_occupation(request)
            self._asleep |= tags

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See AsyncServerBase."""
        waking = self._asleep if tags is None else self._asleep & set(tags)
        if waking:
            from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

            request = ResumeMemoryOccupationReqInput(tags=sorted(waking))
            await self._manager.resume_memory_occupation(request)
            self._asleep = self._asleep - waking

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """See AsyncServerBase; the schedulers map the buffer with the first bucket."""
        self._init_info = init_info

    async def start_weight_update(self) -> None:
        """See AsyncServerBase."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput()))

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """See AsyncServerBase; the fields are those of WeightBuffer.write."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=sglang_weights.payloads(self._init_info, update_info),
            load_format=sglang_weights.LOADER,
            flush_cache=False,  # once, at the end
        )
        _check(await self._manager.update_weights_from_tensor(request))

    async def finish_weight_update(self, version: int) -> None:
        """See AsyncServerBase."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _check(await self._manager.end_weight_update(EndWeightUpdateReqInput()))
        await self._flush_cache()
        self._stats.weight_version = version

    async def stats(self) -> ServerStats:
        """See AsyncServerBase. A message of a scheduler counts as a step: one comes at least every
        50 tokens of a request."""
        self._stats.count_time()
        if self._manager.last_receive_tstamp != self._last_message:
            self._last_message = self._manager.last_receive_tstamp
            self._stats.num_steps += 1
        loads = await self._manager.get_loads()
        self._stats.num_waiting = sum(load.num_waiting_reqs for load in loads)
        return self._stats

    async def _flush_cache(self) -> None:
        """Forget all keys and values, once nothing runs any more."""
        answer = await self._manager.flush_cache(timeout_s=IDLE_S)
        _check((answer.success, answer.message))


def _check(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RuntimeError(f"SGLang refused: {message}")


def _rid(request_id: str) -> str:
    """SGLang aborts every request whose id begins like the one named: none may begin another."""
    return f"{request_id};"
