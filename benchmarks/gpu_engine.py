"""The parts of gpu_session that run an engine: sync, decode and decode_eager.

A Qwen3 of 0.6B's published shape, made from its config with random weights; nothing is downloaded.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, write_random

ROOT = Path(__file__).parents[1]
QWEN3_06B = SHAPES["qwen3-0.6b"]
TINY = QWEN3_06B | {
    "vocab_size": 331,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TIMED_CALLS = {"init_weight_transfer", "start_weight_update", "update_weights"}
TIMED_CALLS |= {"finish_weight_update", "sleep", "wake_up"}
SHARPNESS = 4.0  # factor on the final norm: random weights alone give all tokens one probability


@dataclass(frozen=True)
class Job:
    """What a part is told."""

    out: Path
    dry_run: bool
    results: Path
    """Where the part writes what it has so far, as JSON."""

    def write(self, results: dict[str, Any]) -> None:
        """Replace what was written before."""
        partial = self.results.with_suffix(".partial")
        partial.write_text(json.dumps(results))
        partial.rename(self.results)


def sync(job: Job) -> None:
    """Agreement, weight sync, sleep and wake."""
    asyncio.run(_sync(job))


async def _sync(job: Job) -> None:
    results: dict[str, Any] = {"rounds": []}
    async with _engine(job, eager=True, trainer=True) as parts:
        results["start"] = parts.seconds
        results["num_parameters"] = sum(p.numel() for p in parts.policy.model.parameters())
        results["sent_gb"] = results["num_parameters"] * parts.policy.weights.dtype.itemsize / 2**30
        for number in range(2 if job.dry_run else 6):
            results["rounds"].append(await _round(parts, number))
            job.write(results)


async def _round(parts: "Parts", number: int) -> dict[str, Any]:
    """Sync, sample, compare, sleep, train; the seconds of each and the free memory between."""
    from minirl.credit import correct_mismatch

    watch = parts.watch
    watch.seconds.clear()
    with watch("sync"):
        await parts.sync(parts.policy.weights, number + 1)
    found: dict[str, Any] = {"probe_diff": await parts.sync.check(parts.policy.score, number)}
    with watch("sample"):
        batch = await _sample(parts, 64)
    with watch("compute_logprobs"):
        batch.old_logprobs = await parts.on_trainer(parts.policy.compute_logprobs, batch)
    sampled = batch.response_mask > 0
    difference = (batch.old_logprobs - batch.rollout_logprobs)[sampled].abs()
    found |= {
        "logprob_diff_mean": difference.mean().item(),
        "logprob_diff_p99": difference.quantile(0.99).item(),
        "logprob_diff_max": difference.max().item(),
        "logprob_mean": batch.rollout_logprobs[sampled].mean().item(),
        "num_sampled": int(sampled.sum()),
    }
    found |= correct_mismatch(batch, None)
    found["free_awake_gb"] = await _free_gb(parts)
    await parts.server.sleep(2)
    found["free_asleep_gb"] = await _free_gb(parts)
    generator = torch.Generator().manual_seed(number)
    batch.advantages = torch.randn(batch.num_tokens, generator=generator) * batch.response_mask
    with watch("update"):
        await parts.on_trainer(parts.policy.update, batch)
    if torch.cuda.is_available():
        found["trainer_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        await parts.on_trainer(torch.cuda.empty_cache)
    return found | {"seconds": dict(watch.seconds)}


async def _free_gb(parts: "Parts") -> float | None:
    if not torch.cuda.is_available():
        return None
    await parts.on_trainer(torch.cuda.empty_cache)
    return torch.cuda.mem_get_info()[0] / 2**30


async def _sample(parts: "Parts", number: int) -> Any:
    from minirl.trainer import packing
    from minirl.types import Trajectory

    length = 16 if parts.dry_run else 256
    generator = torch.Generator().manual_seed(0)
    size = (number, length)
    prompts = torch.randint(parts.policy.vocab_size, size, generator=generator).tolist()
    trajectories = [Trajectory(prompt_ids=prompt) for prompt in prompts]
    outputs = await _generate(parts.server, prompts, length)
    for trajectory, output in zip(trajectories, outputs, strict=True):
        trajectory.append_sampled(output)
    rewards = [[0.0] * len(t.response_ids) for t in trajectories]
    return packing.pack(trajectories, rewards, list(range(number)))


async def _generate(
    server: Any, prompts: list[list[int]], length: int, *, seeded: bool = True
) -> list[Any]:
    """`seeded` as rollout.seeded_sampling: a seed per request, or one draw for all of a step."""
    params = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
    seeds = [{"seed": i} if seeded else {} for i in range(len(prompts))]
    return await asyncio.gather(
        *(
            server.generate(prompt, params | seed, f"{time.monotonic_ns()}-{i}")
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
    )


def decode(job: Job) -> None:
    """Throughput with CUDA graphs."""
    asyncio.run(_decode(job, eager=False))


def decode_eager(job: Job) -> None:
    """Throughput without."""
    asyncio.run(_decode(job, eager=True))


async def _decode(job: Job, *, eager: bool) -> None:
    length, counts = (16, (1, 4)) if job.dry_run else (256, (1, 8, 32, 128, 256))
    results: dict[str, Any] = {"response_length": length, "runs": []}
    async with _engine(job, eager=eager, trainer=False) as parts:
        results["start"] = parts.seconds
        vocab_size = _shape(job.dry_run)["vocab_size"]
        for seeded in (True, False):  # warms kernels up
            await _generate(parts.server, [[1] * length] * 2, length, seeded=seeded)
        generator = torch.Generator().manual_seed(0)
        for number, seeded in itertools.product(counts, (True, False)):
            # of its own, so that no prefix cache helps
            prompts = torch.randint(vocab_size, (number, length), generator=generator).tolist()
            began = time.perf_counter()
            await _generate(parts.server, prompts, length, seeded=seeded)
            seconds = time.perf_counter() - began
            run = {"conversations": number, "seeded": seeded, "seconds": seconds}
            results["runs"].append(run | {"tokens_per_s": number * length / seconds})
            job.write(results)


class Watch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class TimedServer:
    """A server whose calls during weight sync and sleep are timed, each by its name."""

    def __init__(self, server: Any, watch: Watch) -> None:
        self._server, self._watch = server, watch

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server, name)
        if name not in TIMED_CALLS:
            return method

        async def timed(*arguments: Any) -> Any:
            tags = arguments[0] if name == "wake_up" else []
            with self._watch("/".join([name, *tags])):
                return await method(*arguments)

        return timed


@dataclass
class Parts:
    """An engine, and a trainer where one was asked for."""

    server: Any
    policy: Any
    sync: Any
    on_trainer: Any
    watch: Watch
    seconds: dict[str, float]
    dry_run: bool


@asynccontextmanager
async def _engine(job: Job, *, eager: bool, trainer: bool) -> AsyncIterator[Parts]:
    from minirl.config import load_config
    from minirl.distributed import distributed
    from minirl.launch import TrainerThread
    from minirl.rollout.vllm_server import VLLMServer
    from minirl.rollout.weight_sync import WeightSync
    from minirl.trainer.policy import PolicyTrainer

    watch = Watch()
    with watch("make_model"):
        model = write_random(
            ROOT / "build" / ("gpu_session_tiny" if job.dry_run else "gpu_session_qwen3_0.6b"),
            _shape(job.dry_run),
            torch.float32 if job.dry_run else torch.bfloat16,
            "cpu",
            SHARPNESS,
        )
    config = load_config([f"model.path={model}", *_settings(job.dry_run, eager)])
    async with AsyncExitStack() as stack:
        world = stack.enter_context(distributed(config))
        on_trainer, policy = TrainerThread(), None
        cuda = world.device.type == "cuda"
        if trainer:
            with watch("load_trainer"):
                policy = await on_trainer(PolicyTrainer, config, world)
        server = VLLMServer(
            config,
            log_file=job.out / "engine.log",
            device_ids=world.group_devices if cuda else None,
        )
        with watch("start_engine"):
            await stack.enter_async_context(server)
        start = dict(watch.seconds)
        timed: Any = TimedServer(server, watch)
        weight_sync = policy and WeightSync(config, world, timed, on_trainer, policy.vocab_size)
        yield Parts(timed, policy, weight_sync, on_trainer, watch, start, job.dry_run)
        if weight_sync:
            await weight_sync.close()


def _settings(dry_run: bool, eager: bool) -> list[str]:
    longest = 64 if dry_run else 512
    return [
        *("model.dtype=bfloat16", "actor.optim.lr=1e-4", "rollout.max_num_seqs=256"),
        *(f"rollout.response_length={longest}", f"data.max_prompt_length={longest}"),
        *("rollout.gpu_memory_utilization=0.4", "rollout.sync_check.max_logprob_diff=1.0"),
        *(f"rollout.enforce_eager={eager or dry_run}", "rollout.cpu_kv_cache_gb=0.25"),
        f"rollout.update_weights_bucket_megabytes={1 if dry_run else 256}",
        *(["model.dtype=float32"] if not torch.cuda.is_available() else []),
    ]


def _shape(dry_run: bool) -> dict[str, Any]:
    return TINY if dry_run else QWEN3_06B
