"""What the trainer's speed and memory are made of; compared arms are interleaved in one run.

    python -m benchmarks.train_step [--parts logprobs packing phases trl ...] [--model debug]
                                    [--mix agent] [--repetitions 5] [--out FILE] [--record]

    logprobs   log-probabilities and gradients of a large vocabulary: a few rows of logits at a time
               (what the trainer does) against all at once; time, and peak memory
    vocabulary the peak memory of forward and backward over 16 384 tokens with 152 000 words, over
               that of the layers alone (activations and gradients): at most 1.5
    compile    a pass with model.compile over one without it, for batches of changing lengths
    packing    an update's gradients: packed to a token budget (what the trainer does) against rows
               padded to the longest allowed; time, padding, and how far the gradients differ
    phases     old log-probabilities and update: seconds, tokens and operations per second, the
               share of what a plain matrix product reaches on the device in the same run
    trl        the update against TRL's GRPOTrainer on the same model and trajectories, where trl is
               installed

Models have random weights: `debug` is the demo's shape, the others published ones.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.measure import Arms, interleave, machine, ratios, show
from benchmarks.results import make_parser, provenance, start_load, table, write_section
from benchmarks.shapes import SHAPES, random_model
from benchmarks.trl_update import TRLUpdate
from minirl.algorithms import aggregate, policy_loss
from minirl.config import Config, load_config
from minirl.distributed import distributed
from minirl.trainer import attention, logprobs, packing
from minirl.trainer.flops import forward_flops
from minirl.trainer.policy import PolicyTrainer, loss_options
from minirl.trainer.reward_model import pack_sequences
from minirl.trainer.update import Totals
from minirl.types import LossInputs, MicroBatch, TokenOutput, Trajectory

SCORES, PASSES = ("at_once", "chunks"), ("layers", "model")
"""Whose peak memory is measured in a process of its own."""

MIXES = {
    "agent": (1 / 16, 1.0, 0.14),  # many short conversations, few that reach the limit
    "even": (1.0, 1.0, 0.0),
    "uniform": (1 / 16, 1.0, 1.0),
}
"""Shortest and longest response as shares of the limit, and the power of a uniform draw between: 0
is all the longest, 1 uniform, small mostly short."""


def main() -> None:
    """Run the parts, print, write."""
    parser = make_parser("train_step", __doc__, repetitions=5)
    parts = ["logprobs", "packing", "phases", "trl"]  # the others take minutes on a CPU
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=parts)
    parser.add_argument("--model", choices=SHAPES, default="debug")
    parser.add_argument("--mix", choices=MIXES, default="agent")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="limit of a response, tokens")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--words", type=int, default=152_000, help="of the part vocabulary")
    parser.add_argument("--two-pools", action="store_true", help="of libgomp's, for the phases")
    parser.add_argument("--peak-of", choices=(*SCORES, *PASSES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        arm = arguments.peak_of
        run = _score_arms()[arm] if arm in SCORES else _pass(arm, arguments)
        print(_peak_bytes(run))
        return
    load, texts = start_load(), list[str]()
    results: dict[str, Any] = {"machine": machine(), "arguments": vars(arguments) | {"out": ""}}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        print(f"{part}:")
        results[part] = PARTS[part](arguments)
        show(results[part])
        texts.append(table([part, ""], results[part].items()))
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.record:
        write_section("train_step", "\n\n".join([provenance(load), *texts]))


def _score_arms() -> Arms:
    """Forward and backward of the head and the log-probabilities: 2048 tokens and 32 768 words on a
    CPU (256 MiB of logits in float32), 16 384 tokens and 152 000 words on a GPU."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    tokens, width, words = (16384, 1024, 151936) if cuda else (2048, 256, 32768)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(words, width, generator=generator) / width**0.5
    weight = weight.to(device, dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=generator).to(device)
    upstream = torch.randn(tokens, generator=generator).to(device)

    def at_once() -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight).float()
        total = torch.logsumexp(logits, dim=-1)
        return logits.gather(-1, targets[:, None]).squeeze(-1) - total, total

    def chunks() -> tuple[Tensor, Tensor]:
        return logprobs._LinearScores.apply(hidden, weight, None, targets, 1.0, "nothing")

    def with_gradient(score: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            scores = score()[0]
            return [scores, *torch.autograd.grad((scores * upstream).sum(), (hidden, weight))]

        return run

    return {"at_once": with_gradient(at_once), "chunks": with_gradient(chunks)}


def _pass(arm: str, arguments: argparse.Namespace) -> Callable[[], object]:
    """Forward and backward of a Qwen3 of four narrow layers over `max_tokens` tokens in sequences
    of 512: of the layers alone, or with head and log-probabilities."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES["debug"] | {
        "vocab_size": arguments.words,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
    }
    torch.manual_seed(0)
    config = Qwen3Config(**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).to(device)
    lengths = [512] * (arguments.max_tokens // 512)
    tokens = [torch.randint(arguments.words, (n,)).tolist() for n in lengths]
    batch = pack_sequences(tokens).to(torch.device(device))
    batch.response_mask = (batch.positions > 0).float()

    def layers() -> None:
        logprobs._hidden(model, batch, logprobs._predicted(batch)).sum().backward()

    def model_pass() -> None:
        logprobs.token_logprobs(model, batch, 1.0)[0].sum().backward()

    return layers if arm == "layers" else model_pass


def measure_vocabulary(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part `vocabulary`."""
    peaks = {arm: _peak_of(arm, arguments) for arm in PASSES}
    return {
        **{f"peak MiB {arm}": peak / 2**20 for arm, peak in peaks.items()},
        "logits at once would be MiB": arguments.max_tokens * arguments.words * 4 / 2**20,
        "memory, model / layers": peaks["model"] / peaks["layers"],
    }


def measure_compile(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part `compile`: log-probabilities and update over three batches of other lengths."""
    batches = []
    for number in range(3):
        varied = argparse.Namespace(**vars(arguments) | {"length": arguments.length - 17 * number})
        batches.append(_batch(varied))
    config = _config(arguments)
    compiled = replace(config, model=replace(config.model, compile=True))
    with distributed(config) as world:
        policies = {
            "plain": PolicyTrainer(config, world),
            "compile": PolicyTrainer(compiled, world),
        }

        def work(policy: PolicyTrainer) -> Callable[[], object]:
            return lambda: [(policy.compute_logprobs(b), policy.update(b)) for b in batches]

        began = time.perf_counter()
        work(policies["compile"])()
        first = time.perf_counter() - began
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        arms: Arms = {name: work(policy) for name, policy in policies.items()}
        seconds = interleave(arms, arguments.repetitions)
    return {
        "seconds of the first pass": first,
        "graphs after the first pass": graphs,
        "graphs at the end": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        **{f"seconds {name}": values for name, values in seconds.items()},
        "time, compile / plain": ratios(seconds, "compile", "plain"),
    }


def _peak_of(arm: str, arguments: argparse.Namespace) -> int:
    """In a process of its own: what one has touched stays with it."""
    command = [sys.executable, "-m", "benchmarks.train_step", f"--peak-of={arm}"]
    command += [f"--words={arguments.words}", f"--max-tokens={arguments.max_tokens}"]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that `run` holds on top of its inputs."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Bytes of this process in memory now (VmRSS), or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measure_logprobs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part `logprobs`."""
    arms = _score_arms()
    seconds = interleave(arms, arguments.repetitions)
    pairs = zip(*(arm() for arm in arms.values()), strict=True)
    peaks = {name: _peak_of(name, arguments) for name in arms}
    return {
        **{f"seconds {name}": values for name, values in seconds.items()},
        **{f"peak MiB {name}": peak / 2**20 for name, peak in peaks.items()},
        "time, chunks / at_once": ratios(seconds, "chunks", "at_once"),
        "memory, at_once / chunks": peaks["at_once"] / peaks["chunks"],
        "largest relative difference": max(_difference([a], [b]) for a, b in pairs),
    }


def _difference(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference over the largest value."""
    largest = max(float(b.detach().abs().max()) for b in right)
    pairs = zip(left, right, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs) / largest


def _config(arguments: argparse.Namespace) -> Config:
    """The run's settings, with a folder of random weights at the shape; made once."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    folder = random_model(arguments.model, device, dtype)
    return load_config(
        [
            f"model.path={folder}",
            f"model.dtype={'bfloat16' if cuda else 'float32'}",
            f"data.train_batch_size={arguments.sequences}",
            f"rollout.response_length={arguments.length}",
            f"data.max_prompt_length={PROMPT_LENGTH}",
            f"actor.max_tokens_per_micro_batch={arguments.max_tokens}",
            f"model.enable_gradient_checkpointing={arguments.model in ('qwen3-4b', 'qwen3-8b')}",
            "rollout.n=1",
            "rollout.sync_check=null",
        ]
    )


PROMPT_LENGTH = 16


def _batch(arguments: argparse.Namespace) -> MicroBatch:
    """Trajectories of the mix, of random tokens, with advantages."""
    generator = torch.Generator().manual_seed(0)
    shortest, longest, power = MIXES[arguments.mix]
    words = SHAPES[arguments.model]["vocab_size"]
    draws = torch.linspace(0, 1, arguments.sequences) ** (1 / power if power else 0)
    trajectories = []
    for draw in draws.tolist():
        n = max(1, round(arguments.length * (shortest + (longest - shortest) * draw)))
        prompt = torch.randint(words, (PROMPT_LENGTH,), generator=generator).tolist()
        tokens = torch.randint(words, (n,), generator=generator).tolist()
        trajectory = Trajectory(prompt_ids=prompt)
        trajectory.append_sampled(
            TokenOutput(token_ids=tokens, logprobs=[-1.0] * n, finish_reason="stop")
        )
        trajectories.append(trajectory)
    rewards = [[0.0] * len(t.response_ids) for t in trajectories]
    batch = packing.pack(trajectories, rewards, list(range(arguments.sequences)))
    batch.advantages = torch.randn(batch.num_tokens, generator=generator) * batch.response_mask
    batch.old_logprobs = batch.rollout_logprobs
    return batch


def _packed_gradients(policy: PolicyTrainer, batch: MicroBatch) -> list[Tensor]:
    """What an optimizer step of the trainer does up to the step."""
    counts = _counts(batch)
    for _, micro in policy.micro_batches(batch):
        loss, _, _ = policy._loss(micro, counts, Totals("actor"))
        loss.backward()
    return _take_gradients(policy.model)


def _padded_gradients(policy: PolicyTrainer, batch: MicroBatch, width: int) -> list[Tensor]:
    """The same with every sequence padded to `width`, as many tokens at once as there."""
    config, model, counts = policy.config, policy.model, _counts(batch)
    sequences = [
        (batch.tokens[i], batch.response_mask[i], batch.advantages[i], batch.old_logprobs[i])
        for i in (torch.arange(batch.num_tokens).split(batch.lengths.tolist()))
        if batch.advantages is not None and batch.old_logprobs is not None
    ]
    size = max(1, policy.max_tokens // width)
    model.set_attn_implementation("sdpa")
    for start in range(0, len(sequences), size):
        rows = [
            torch.stack([F.pad(x, (0, width - len(x))) for x in column]).to(model.device)
            for column in zip(*sequences[start : start + size], strict=True)
        ]
        tokens, mask, advantages, old = rows
        # Padding stands on the right: causal attention alone keeps it out.
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        inputs = LossInputs(
            logprobs=F.pad(chosen, (1, 0)) * mask,
            old_logprobs=old,
            advantages=advantages,
            response_mask=mask,
        )
        per_token, _ = policy_loss("vanilla", inputs, **loss_options(config.actor))
        aggregate(per_token, mask, "token-mean", num_tokens=counts["num_tokens"]).backward()
    model.set_attn_implementation(attention.NAME)
    return _take_gradients(model)


def _counts(batch: MicroBatch) -> dict[str, float]:
    trained = packing.trained_per_sequence(batch)
    return {"num_tokens": float(trained.sum()), "num_sequences": float((trained > 0).sum())}


def _take_gradients(model: torch.nn.Module) -> list[Tensor]:
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def measure_packing(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part `packing`."""
    config, batch = _config(arguments), _batch(arguments)
    width = PROMPT_LENGTH + arguments.length
    with distributed(config) as world:
        policy = PolicyTrainer(config, world)
        arms: Arms = {
            "packed": lambda: _packed_gradients(policy, batch),
            "padded": lambda: _padded_gradients(policy, batch, width),
        }
        seconds = interleave(arms, arguments.repetitions)
        difference = _difference(arms["packed"](), arms["padded"]())
    return {
        **{f"seconds {name}": values for name, values in seconds.items()},
        "share of padding": 1 - batch.num_tokens / (width * batch.num_sequences),
        "time, padded / packed": ratios(seconds, "padded", "packed"),
        "largest relative difference": difference,
    }


def measure_phases(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part `phases`."""
    config, batch = _config(arguments), _batch(arguments)
    with distributed(config) as world, ThreadPoolExecutor(1) as other:
        policy = PolicyTrainer(config, world)
        if arguments.two_pools:
            other.submit(lambda: torch.ones(2**20).exp_()).result()
        flops = forward_flops(policy.model, batch)
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        size = 8192 if world.device.type == "cuda" else 1024
        square = torch.randn(size, size, device=world.device, dtype=dtype)
        arms: Arms = {
            "matrix product": lambda: square @ square,
            "old_log_prob": lambda: policy.compute_logprobs(batch),
            "update_actor": lambda: policy.update(batch),
        }
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # of the parts before
        seconds = interleave(arms, arguments.repetitions)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    work = {"matrix product": 2.0 * size**3, "old_log_prob": flops, "update_actor": 3 * flops}
    rates = {name: [work[name] / s for s in values] for name, values in seconds.items()}
    results: dict[str, Any] = {"tokens": batch.num_tokens, "peak GiB": peak}
    for name, values in seconds.items():
        results[f"seconds {name}"] = values
        results[f"TFLOP/s {name}"] = [rate / 1e12 for rate in rates[name]]
    for name in ("old_log_prob", "update_actor"):
        results[f"tokens/s {name}"] = [batch.num_tokens / s for s in seconds[name]]
        results[f"share of a product, {name}"] = ratios(rates, name, "matrix product")
    return results


def measure_trl(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part `trl`: forward, backward, clipping and optimizer of one update."""
    if importlib.util.find_spec("trl") is None:
        return {"left out": "trl is not installed"}
    config, batch = _config(arguments), _batch(arguments)
    with distributed(config) as world:
        policy = PolicyTrainer(config, world)
        theirs = TRLUpdate(config, batch, world.device, policy.max_tokens)
        arms: Arms = {"minirl": lambda: policy.update(batch), "trl": theirs.update}
        seconds = interleave(arms, arguments.repetitions)
    return {
        "trl": version("trl"),
        **{f"seconds {name}": values for name, values in seconds.items()},
        "time, trl / minirl": ratios(seconds, "trl", "minirl"),
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "logprobs": measure_logprobs,
    "vocabulary": measure_vocabulary,
    "compile": measure_compile,
    "packing": measure_packing,
    "phases": measure_phases,
    "trl": measure_trl,
}

if __name__ == "__main__":
    main()
