"""The least possible makespan of a workload on an engine whose speed was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.async_vs_sync.workload import Plan


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """What the engine does at its best, measured without anything around it."""

    step_s: dict[int, float]
    """Seconds of a step that gives each of so many conversations a token."""
    prefill_token_s: float
    """Seconds per token of prompts that nobody has seen before, many at once."""

    @property
    def token_s(self) -> float:
        """Of one conversation alone."""
        return self.step_s[1]

    def best_token_s(self, number: int) -> float:
        """The least engine time per token with at most so many conversations in it."""
        sizes = sorted(self.step_s)
        step_s = float(np.interp(number, sizes, [self.step_s[size] for size in sizes]))
        return min(step_s / number, *(self.step_s[n] / n for n in sizes if n <= number))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bounds of the makespan in seconds; the largest is the least possible one."""

    chain_s: float
    """The longest conversation, alone on the engine."""
    work_s: float
    """All prompts and tokens at the engine's best throughput."""
    pipeline_s: float
    """The same of any set of turns, between the earliest time at which one of them can begin and
    the least that follows one of them (heads and tails of one machine: Carlier, 1982)."""

    @property
    def seconds(self) -> float:
        """The makespan that nothing can beat."""
        return max(self.chain_s, self.work_s, self.pipeline_s)


def bound(plans: Sequence[Plan], speed: EngineSpeed) -> Bound:
    """Of these conversations, all given at once. Every earlier token is taken to be in the prefix
    cache, everything outside engine and tools to take no time: each makes the bound smaller."""
    token_s = speed.best_token_s(len(plans))
    chains, heads, tails, work = [], [], [], []
    for plan in plans:
        prefill = [n * speed.prefill_token_s for n in plan.new_tokens]
        lengths = [turn.response_tokens for turn in plan.turns]
        alone = [n * speed.token_s + s for n, s in zip(lengths, prefill, strict=True)]
        steps = [a + (turn.tool_s or 0.0) for a, turn in zip(alone, plan.turns, strict=True)]
        begins = np.cumsum([0.0, *steps])
        chains.append(begins[-1])
        heads += list(begins[:-1])
        tails += list(begins[-1] - begins[:-1] - alone)
        work += [n * token_s + s for n, s in zip(lengths, prefill, strict=True)]
    return Bound(
        chain_s=float(max(chains)),
        work_s=float(sum(work)),
        pipeline_s=_pipeline(np.array(heads), np.array(work), np.array(tails)),
    )


def _pipeline(heads: np.ndarray, work: np.ndarray, tails: np.ndarray) -> float:
    """max over h, t of h + (work of all turns with head >= h and tail >= t) + t. [N] each."""
    order = np.argsort(-tails)
    heads, work, tails = heads[order], work[order], tails[order]
    best = 0.0
    for head in np.unique(heads):
        chosen = heads >= head
        best = max(best, float(np.max(head + np.cumsum(work[chosen]) + tails[chosen])))
    return best
