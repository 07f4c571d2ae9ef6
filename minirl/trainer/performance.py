"""How well a step used its devices: tokens and operations per second, memory, balance."""

import torch

from minirl.distributed import Dist
from minirl.trainer import packing
from minirl.trainer.flops import forward_flops, peak_flops
from minirl.trainer.model import PackedModel
from minirl.types import MicroBatch

PASSES = {"old_log_prob": 1, "update_actor": 3}
"""Phases of the policy, in forward passes: a backward pass costs as much as two."""


def step_performance(
    policy: PackedModel, batch: MicroBatch, world: Dist, seconds: dict[str, float], ppo_epochs: int
) -> dict[str, float]:
    """Metrics of the phases in `seconds` that the policy worked in.

    `perf/tokens_per_s/<phase>` over all ranks; `perf/tflops/<phase>`, 10^12 operations per second
    and rank, and `perf/mfu/<phase>`, their share of the device's peak where that is known: what is
    computed again for the sake of memory does not count. `perf/imbalance` is the work of the
    slowest rank in each slot over the mean, at least 1; `perf/micro_batch_fill` the share of
    actor.max_tokens_per_micro_batch that is used.
    """
    kept = (packing.trained_per_sequence(batch) > 0).nonzero().squeeze(1).tolist()
    if not kept:
        return {}
    batch = batch.select(kept)
    metrics = balance(batch.lengths.tolist(), world.world_size, policy.max_tokens)
    flops, peak = forward_flops(policy.model, batch), peak_flops(world.device)
    for phase, passes in PASSES.items():
        if phase not in seconds:
            continue
        passes *= ppo_epochs if phase == "update_actor" else 1
        rate = passes * flops / seconds[phase] / world.world_size
        metrics[f"perf/tokens_per_s/{phase}"] = batch.num_tokens / seconds[phase]
        metrics[f"perf/tflops/{phase}"] = rate / 1e12
        if peak:
            metrics[f"perf/mfu/{phase}"] = rate / peak
    return metrics


def balance(lengths: list[int], num_ranks: int, max_tokens: int) -> dict[str, float]:
    """`perf/imbalance` and `perf/micro_batch_fill` of the plan for these sequences."""
    slots = list(zip(*packing.plan(lengths, num_ranks, max_tokens), strict=True))
    costs = [[sum(packing.cost(lengths[s]) for s in members) for members in slot] for slot in slots]
    mean = sum(map(sum, costs)) / num_ranks
    room = max_tokens * num_ranks * len(slots)
    return {
        "perf/imbalance": sum(map(max, costs)) / mean,
        "perf/micro_batch_fill": sum(lengths) / room,
    }


class PeakMemory:
    """The most memory that tensors held on a device since the last question, GiB; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.take()

    def take(self) -> float | None:
        """The peak, and begin anew."""
        if self._device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self._device) / 2**30
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak
