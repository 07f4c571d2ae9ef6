"""The least possible makespan of a workload on an engine whose speed was measured, and what that
engine takes when nothing but itself and the tools takes any time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.async_vs_sync.workload import Plan


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """What the engine does when it is given enough at once, and nothing is around it."""

    step_s: dict[int, float]
    """Seconds of a step that gives each of so many conversations a token."""
    prefill_token_s: float
    """Seconds per token of prompts that nobody has seen before, many at once."""
    request_s: float
    """Seconds that a request adds to those of its tokens, many at once."""

    @property
    def token_s(self) -> float:
        """Of one conversation alone."""
        return self.step_s[1]

    def best_token_s(self, number: int) -> float:
        """The least engine time per token with at most so many conversations in it."""
        rates = [self.step_s[size] / size for size in self.step_s if size <= number]
        return min(self.step_of(number) / number, *rates)

    def step_of(self, number: int) -> float:
        """Seconds of a step with so many conversations, between those measured in proportion."""
        sizes = sorted(self.step_s)
        return float(np.interp(number, sizes, [self.step_s[size] for size in sizes]))

    def line(self, number: int) -> tuple[float, float]:
        """(a, b) such that a step of n <= `number` conversations takes no less than a + b n."""
        full = self.step_of(number)
        fewer = [size for size in self.step_s if size < number]
        each = max(((full - self.step_s[n]) / (number - n) for n in fewer), default=0.0)
        return full - each * number, each


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
    shared_s: float
    """What the average conversation takes at least before and after its first tool, in steps that
    it shares with the others."""

    @property
    def seconds(self) -> float:
        """The makespan that nothing can beat."""
        return max(self.chain_s, self.work_s, self.pipeline_s, self.shared_s)


def bound(plans: Sequence[Plan], speed: EngineSpeed) -> Bound:
    """Of these conversations, all given at once, where everything outside engine and tools takes no
    time."""
    token_s = speed.best_token_s(len(plans))
    chains, heads, tails, work = [], [], [], []
    for plan in plans:
        prefill = [speed.request_s + n * speed.prefill_token_s for n in plan.new_tokens]
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
        shared_s=_shared(plans, speed),
    )


def greedy(plans: Sequence[Plan], speed: EngineSpeed) -> float:
    """The makespan where every turn is in the engine's next step as soon as its tool has answered:
    what is left to `async` when code outside the engine takes no time. No bound: an engine that
    lets some conversations wait might, in theory, be done sooner."""
    now = 0.0
    ready = [0.0] * len(plans)
    turn, done = [0] * len(plans), [0] * len(plans)  # of each, the turn and its tokens so far
    while left := [i for i, plan in enumerate(plans) if turn[i] < len(plan.turns)]:
        now = max(now, min(ready[i] for i in left))
        batch = [i for i in left if ready[i] <= now]
        new = [plans[i].new_tokens[turn[i]] for i in batch if not done[i]]
        now += speed.step_of(len(batch))
        now += len(new) * speed.request_s + sum(new) * speed.prefill_token_s
        for i in batch:
            this = plans[i].turns[turn[i]]
            done[i] += 1
            if done[i] == this.response_tokens:
                turn[i], done[i], ready[i] = turn[i] + 1, 0, now + (this.tool_s or 0.0)
    return max(ready)


def _pipeline(heads: np.ndarray, work: np.ndarray, tails: np.ndarray) -> float:
    """max over h, t of h + (work of all turns with head >= h and tail >= t) + t. [N] each."""
    order = np.argsort(-tails)
    heads, work, tails = heads[order], work[order], tails[order]
    best = 0.0
    for head in np.unique(heads):
        chosen = heads >= head
        best = max(best, float(np.max(head + np.cumsum(work[chosen]) + tails[chosen])))
    return best


def _shared(plans: Sequence[Plan], speed: EngineSpeed) -> float:
    """Of N conversations that each have no more than the shortest of them has in each turn.

    Until a conversation has its first k tokens it has waited for k steps and for what the others
    did meanwhile: all their prompts and first k tokens, N (w + b k), but for what comes later. Only
    where its own steps are late can that be less: where two get their kth token d steps apart, no
    more than min(d, k) tokens of one, and its prompt if d >= k, come after the other has all. So

        mean time to the kth token  >=  a (k + mean d_i) + N (w + b k)
                                        - (b + w / k) / 2N * sum over i, j of min(|d_i - d_j|, k)

    with d_i >= 0, which _latest makes as small as it can be. After the tools the same holds from
    the end backwards, where only one prompt of each two conversations is sure to count. The average
    of tool, time before and time after is no more than the makespan.
    """
    fixed, each = speed.line(len(plans))
    turns = min(len(plan.turns) for plan in plans)
    if turns < 2 or fixed <= 0:
        return 0.0
    number = len(plans)
    tokens = [min(plan.turns[i].response_tokens for plan in plans) for i in range(turns)]
    prompts = [
        speed.request_s + speed.prefill_token_s * min(plan.new_tokens[i] for plan in plans)
        for i in range(turns)
    ]
    tool = min(plan.turns[0].tool_s or 0.0 for plan in plans)
    first, others = tokens[0], sum(tokens[1:])
    before = fixed * first + number * (prompts[0] + each * first)
    before -= first * _latest(number * (each + prompts[0] / first), fixed)
    after = fixed * others + number * each * others + sum(prompts[1:]) * (number + 1) / 2
    after -= others * _latest(number * each, fixed)
    return tool + before + after


def _latest(shared: float, fixed: float) -> float:
    """The largest shared / 2 * E min(|d - d'|, 1) - fixed * E d over the distributions of d >= 0.

    1 - min(|x|, 1) is a positive definite function, so this is concave, and piecewise linear
    between whole numbers: the best d are 0, 1, 2, ... in falling shares, (level - fixed d) / shared
    of all, as many as are positive.
    """
    if shared <= fixed:
        return 0.0
    count, level = 1, shared
    while level > fixed * count:
        count += 1
        level = shared / count + fixed * (count - 1) / 2
    late = np.arange(count)
    shares = (level - fixed * late) / shared
    return float(shared / 2 * (1 - np.sum(shares**2)) - fixed * np.sum(shares * late))
