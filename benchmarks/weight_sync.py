"""What a weight sync costs, in copies of its bytes, against the real vLLM engine.

    python -m benchmarks.weight_sync [--models debug medium] [--repetitions 9]
                                     [--out FILE] [--record]

After an update that changes every weight, the trainer's weights go to the engine. In turn with it,
as many bytes are copied from memory to memory by one `Tensor.copy_`: the ratio is what all of
gathering, describing, loading and waking costs on top. The first sync, which makes the buffer and
warms up, does not count. Then the phases, and the proof (`rollout.sync_check`), which is no part of
the ratio. `debug` is the demo's shape, `medium` 192 MB; weights are random.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleave, machine, ratios, show
from benchmarks.results import make_parser, start_load, table, write
from benchmarks.shapes import SHAPES, random_model
from minirl.config import Config, load_config
from minirl.distributed import distributed
from minirl.launch import TrainerThread
from minirl.rollout.transformers_server import TransformersServer
from minirl.rollout.vllm_server import VLLMServer
from minirl.rollout.weight_sync import WeightSync
from minirl.trainer.policy import PolicyTrainer


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("weight_sync", __doc__, repetitions=9)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["debug", "medium"])
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    arguments = parser.parse_args()
    load, texts = start_load(), list[str]()
    results: dict[str, Any] = {"machine": machine() | {"load": load}}
    for name in arguments.models:
        print(f"{name}:")
        with asyncio.Runner() as runner:
            results[name] = measure(runner, name, arguments.engine, arguments.repetitions)
        show(results[name])
        texts.append(table([name, ""], results[name].items()))
    write(arguments, results, "weight_sync", load, *texts)


def measure(runner: asyncio.Runner, name: str, engine: str, repetitions: int) -> dict[str, Any]:
    """Figures of one model; lists have an entry per repetition."""
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    folder = random_model(name, "cuda" if cuda else "cpu", dtype)
    config = load_config(_settings(folder, engine, cuda))
    parts = _parts(config, Path("build") / f"weight_sync_{name}.log")
    policy, sync = runner.run(parts.__aenter__())
    num_bytes = policy.weights.dtype.itemsize * sum(p.numel() for p in policy.model.parameters())
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=policy.world.device)
    target = torch.ones_like(source)
    phases: dict[str, list[float]] = {}

    async def steady() -> None:
        await sync(policy.weights, sync.version + 1)
        for phase, seconds in sync.seconds.items():
            phases.setdefault(f"seconds of it, {phase}", []).append(seconds)

    async def prove() -> None:
        await sync.check(policy.score, seed=sync.version)

    arms = {
        "copy": lambda: target.copy_(source),
        "change": lambda: _change(policy),
        "sync": lambda: runner.run(steady()),
        "check": lambda: runner.run(prove()),
    }
    try:
        runner.run(steady())
        seconds = interleave(arms, repetitions)
    finally:
        runner.run(parts.__aexit__(None, None, None))
    del seconds["change"]
    return {
        "MB": num_bytes / 1e6,
        **{f"seconds {arm}": values for arm, values in seconds.items()},
        **{phase: values[-repetitions:] for phase, values in phases.items()},
        "sync / copy": ratios(seconds, "sync", "copy"),
    }


def _change(policy: PolicyTrainer) -> None:
    """Of every weight a little, so that a sync that does not arrive is told."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)


@asynccontextmanager
async def _parts(config: Config, log_file: Path) -> AsyncIterator[tuple[PolicyTrainer, WeightSync]]:
    """The trainer, and the engine that it shares the device with."""
    async with AsyncExitStack() as stack:
        world = stack.enter_context(distributed(config))
        on_trainer = TrainerThread()
        policy = await on_trainer(PolicyTrainer, config, world)
        kind = VLLMServer if config.rollout.name == "vllm" else TransformersServer
        server = kind(
            config,
            log_file=log_file,
            device_ids=world.group_devices if world.device.type == "cuda" else None,
        )
        await stack.enter_async_context(server)
        sync = WeightSync(config, world, server, on_trainer, policy.vocab_size)
        stack.push_async_callback(sync.close)
        yield policy, sync


def _settings(folder: Path, engine: str, cuda: bool) -> list[str]:
    return [
        *(f"model.path={folder}", f"model.dtype={'bfloat16' if cuda else 'float32'}"),
        *(f"rollout.name={engine}", "rollout.enforce_eager=true", "rollout.cpu_kv_cache_gb=0.25"),
        *("rollout.response_length=64", "data.max_prompt_length=64", "rollout.max_num_seqs=8"),
        "rollout.gpu_memory_utilization=0.4",
        f"rollout.sync_check.max_logprob_diff={1.0 if cuda else 1e-4}",
    ]


if __name__ == "__main__":
    main()
