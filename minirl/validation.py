"""Validation scores per data source: mean, pass@k, best@k and the majority vote."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, pstdev


@dataclass(frozen=True, slots=True, kw_only=True)
class ValResult:
    """One sampled answer to one validation prompt."""

    data_source: str
    uid: str
    """Of the prompt: its answers share it."""
    score: float
    acc: float | None = None
    """1 if the answer is right, 0 if not, as the reward function says; None = by the score."""
    answer: str | None = None
    """What the answer says, extracted (`"72"`), for the vote; None = it says nothing usable."""


def validation_metrics(results: Iterable[ValResult]) -> dict[str, float]:
    """Scores by verl's names; n is the number of answers per prompt, every prompt counts the same.

    | name | value |
    |---|---|
    | `val-core/<data_source>/reward/mean@n` | mean score |
    | `val-core/<data_source>/acc/mean@n` | mean of `acc`, or share of scores >= 1 |
    | `val-core/<data_source>/acc/pass@k` | chance that one of k answers succeeds: `pass_at_k` |
    | `val-core/<data_source>/acc/maj@n` | success of `majority`; if answers are given and n > 1 |
    | `val-aux/<data_source>/reward/std@n` | standard deviation (ddof 0) within a prompt; if n > 1 |
    | `val-aux/<data_source>/reward/best@k/mean` | expected best score of k: `best_at_k`; if n > 1 |
    | `val-aux/<data_source>/num_prompts` | prompts behind the above |

    k is 1, 2, 4, ... and n. All values are exact; verl draws k answers at random with replacement,
    so its best@k and maj@k are lower. Raises ValueError when the prompts of a data source do not
    have equally many answers.
    """
    sources: dict[str, dict[str, list[ValResult]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        sources[result.data_source][result.uid].append(result)
    metrics: dict[str, float] = {}
    for source, prompts in sources.items():
        groups = list(prompts.values())
        n = _answers_per_prompt(source, prompts)
        ks = [k for k in range(1, n + 1) if k == n or k & (k - 1) == 0]
        metrics |= _core(f"val-core/{source}", groups, n, ks)
        metrics |= _aux(f"val-aux/{source}", groups, n, ks)
    return metrics


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the unbiased chance that k of n answers, c of them right, hold a
    right one (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1)."""
    return 1 - comb(n - c, k) / comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected maximum of k of the n scores drawn without replacement; pass@k for scores 0 and 1.

    The i-th smallest (from 1) is the maximum of C(i-1, k-1) of the C(n, k) subsets.
    """
    ranked = sorted(scores)
    return sum(comb(i, k - 1) * score for i, score in enumerate(ranked)) / comb(len(ranked), k)


def majority(answers: Sequence[str | None], values: Sequence[float]) -> float:
    """Expected value of the most frequent answer; answers that tie are equally likely to be chosen.

    None does not vote; without any vote the value is 0. Answers that read alike but are valued
    differently count with their mean.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, value in zip(answers, values, strict=True):
        if answer is not None:
            votes[answer].append(value)
    most = max(map(len, votes.values()), default=0)
    return fmean(fmean(v) for v in votes.values() if len(v) == most) if votes else 0.0


def _core(prefix: str, groups: list[list[ValResult]], n: int, ks: list[int]) -> dict[str, float]:
    right = [[float(r.score >= 1) if r.acc is None else r.acc for r in group] for group in groups]
    metrics = {
        f"{prefix}/reward/mean@{n}": fmean(r.score for group in groups for r in group),
        f"{prefix}/acc/mean@{n}": fmean(map(fmean, right)),
    }
    for k in ks:
        metrics[f"{prefix}/acc/pass@{k}"] = fmean(pass_at_k(n, int(sum(c)), k) for c in right)
    answers = [[r.answer for r in group] for group in groups]
    if n > 1 and any(a is not None for group in answers for a in group):
        metrics[f"{prefix}/acc/maj@{n}"] = fmean(map(majority, answers, right))
    return metrics


def _aux(prefix: str, groups: list[list[ValResult]], n: int, ks: list[int]) -> dict[str, float]:
    scores = [[r.score for r in group] for group in groups]
    metrics = {f"{prefix}/num_prompts": float(len(groups))}
    if n > 1:
        metrics[f"{prefix}/reward/std@{n}"] = fmean(map(pstdev, scores))
        for k in ks:
            metrics[f"{prefix}/reward/best@{k}/mean"] = fmean(best_at_k(s, k) for s in scores)
    return metrics


def _answers_per_prompt(source: str, prompts: dict[str, list[ValResult]]) -> int:
    first = next(iter(prompts))
    n = len(prompts[first])
    for uid, group in prompts.items():
        if len(group) != n:
            raise ValueError(
                f"validation of {source!r}: {len(group)} answers to prompt {uid!r} but {n} to "
                f"{first!r}; give every prompt n results, score 0 for one that failed"
            )
    return n
