"""The engine and the machine, sampled while a rollout runs: what trajectories do not carry."""

import asyncio
import time
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Self

import psutil
import torch

from benchmarks.measure import spent_s
from minirl.rollout.server import ServerClient

INTERVAL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Sample:
    """At one moment; what counts up does so from the start of the process or the engine."""

    at: float
    """time.perf_counter()."""
    num_running: int
    """Requests that the engine's scheduler decodes."""
    num_waiting: int
    """Requests that wait for room in it."""
    busy_s: float
    num_steps: int
    driver_cpu_s: float
    """CPU time of this process: agent loops, chat, transport."""
    engine_cpu_s: float
    """CPU time of the engine's processes."""
    gpu_utilization: float | None
    """Share of the time in which a kernel ran, as NVML has it; None without a GPU."""
    gpu_power_w: float | None


class Sampler:
    """Samples every INTERVAL_S inside `async with`, and once at its begin and end."""

    def __init__(self, client: ServerClient, device: "Device") -> None:
        self._client, self._device = client, device
        self._process = psutil.Process()
        self._engine = self._process.children(recursive=True)
        self.samples: list[Sample] = []

    async def __aenter__(self) -> Self:
        await self._take()
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sampling.cancel()
        await asyncio.wait([self._sampling])
        if kind is None:
            if not self._sampling.cancelled():
                self._sampling.result()  # raises what ended it
            await self._take()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._take()

    async def _take(self) -> None:
        stats = await self._client.stats()
        self.samples.append(
            Sample(
                at=time.perf_counter(),
                num_running=stats.num_running - stats.num_waiting,
                num_waiting=stats.num_waiting,
                busy_s=stats.busy_s,
                num_steps=stats.num_steps,
                driver_cpu_s=spent_s(self._process),
                engine_cpu_s=sum(map(spent_s, self._engine)),
                **self._device.read(),
            )
        )

    def summary(self, max_num_seqs: int) -> dict[str, Any]:
        """Over the time sampled."""
        first, last = self.samples[0], self.samples[-1]
        seconds = last.at - first.at
        values = {
            "engine_busy_fraction": (last.busy_s - first.busy_s) / seconds,
            "running_mean": mean(s.num_running for s in self.samples),
            "running_share": mean(s.num_running for s in self.samples) / max_num_seqs,
            "waiting_mean": mean(s.num_waiting for s in self.samples),
            "steps_per_s": (last.num_steps - first.num_steps) / seconds,
            "driver_cores": (last.driver_cpu_s - first.driver_cpu_s) / seconds,
            "engine_cores": (last.engine_cpu_s - first.engine_cpu_s) / seconds,
        }
        for name in ("gpu_utilization", "gpu_power_w"):
            if read := [v for s in self.samples if (v := getattr(s, name)) is not None]:
                values[name] = mean(read)
        return values

    def rows(self, start: float) -> list[dict[str, Any]]:
        """Every sample, its time since `start`."""
        return [asdict(s) | {"at": s.at - start} for s in self.samples]


class Device:
    """The first CUDA device by NVML; reads None where there is none."""

    def __init__(self) -> None:
        self._handle: Any = None
        if torch.cuda.is_available():
            from vllm.third_party import pynvml  # nvidia-ml-py need not be installed

            self._nvml = pynvml
            pynvml.nvmlInit()
            # NVML counts the machine's devices, CUDA those that CUDA_VISIBLE_DEVICES leaves
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> dict[str, float | None]:
        """Utilization as a share, power in watts."""
        if self._handle is None:
            return {"gpu_utilization": None, "gpu_power_w": None}
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        power_mw = self._nvml.nvmlDeviceGetPowerUsage(self._handle)
        return {"gpu_utilization": rates.gpu / 100, "gpu_power_w": power_mw / 1000}
