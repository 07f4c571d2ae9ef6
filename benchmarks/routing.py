"""What prefix caches of two real engines hold of conversations, by how turns are routed.

    python -m benchmarks.routing [--repetitions 5] [--quick] [--out build/routing.json] [--record]

vLLM engines of a small random policy, with prompts that take longer to compute than an answer takes
to decode. Three arms in turn, with empty caches:

    one       one engine
    sticky    two, routed by minirl: conversations stay, the samples of a prompt begin together
    spread    two, every turn to the next one, as a load balancer does that knows no conversations

Of the second turns of all conversations the median time is taken. Engines have one thread each.
"""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.measure import ratios
from benchmarks.results import make_parser, start_load, table, write
from benchmarks.rollout_routing import CachingServer, Workload, hold
from minirl.config import Config, load_config
from minirl.rollout.client import AsyncLLMServerManager
from minirl.rollout.vllm_server import VLLMServer
from minirl.testing import tiny_model

ALONE = Workload(
    num_prompts=16,
    n=1,
    num_turns=3,
    prompt_length=1000,
    system_length=24,
    observation=(32, 64),
    tool_s=0.2,
    vocabulary=256,
    sampling_params=(("max_tokens", 16), ("ignore_eos", True), ("temperature", 1.0)),
)
WORKLOADS = {"alone": ALONE, "groups of 8": replace(ALONE, num_prompts=4, n=8)}
SHAPE = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "head_dim": 64}
"""2 to 3 million parameters."""

Rounds = dict[str, dict[str, list[float]]]
"""By arm and figure, a value per round."""


class Engine(VLLMServer):
    """A vLLM engine whose prefix cache can be emptied."""

    async def forget(self) -> None:
        """Empty it."""
        await self._engine.reset_prefix_cache()


class NextServer(AsyncLLMServerManager):
    """Gives every turn to the server after the one that got the last."""

    def _route(self, request_id: str, prompt_ids: list[int], tokens: int) -> int:
        self._last = (self._last + 1) % len(self._servers)
        return self._last


@asynccontextmanager
async def open_engines(folder: Path, number: int = 2) -> AsyncIterator[list[Engine]]:
    """So many engines of one model, which is written there."""
    config = _config(tiny_model(folder / "model", **SHAPE))
    async with AsyncExitStack() as stack:
        engines = [Engine(config, log_file=folder / f"{i}.log") for i in range(number)]
        yield [await stack.enter_async_context(engine) for engine in engines]


def _config(model: Path) -> Config:
    return load_config(
        [
            f"model.path={model}",
            *("model.dtype=float32", "trainer.device=cpu", "rollout.enforce_eager=true"),
            *("data.max_prompt_length=1280", "rollout.response_length=768"),
            *("rollout.max_num_seqs=64", "rollout.cpu_kv_cache_gb=0.75"),
        ]
    )


async def measure(
    engines: Sequence[Engine] | Sequence[CachingServer], workload: Workload, repetitions: int
) -> Rounds:
    """All arms in turn, once more than `repetitions`: the first round warms up."""
    arms = {
        "one": (AsyncLLMServerManager, engines[:1]),
        "sticky": (AsyncLLMServerManager, engines),
        "spread": (NextServer, engines),
    }
    rounds: Rounds = {name: {} for name in arms}
    for number in range(repetitions + 1):
        for name, (kind, servers) in arms.items():
            for engine in engines:
                await engine.forget()
            router = kind(servers, max_sticky_sessions=10_000, sticky_imbalance=4.0)
            for figure, value in (await _run(router, workload)).items():
                rounds[name].setdefault(figure, []).extend([value] if number else [])
    return rounds


async def _run(router: AsyncLLMServerManager, workload: Workload) -> dict[str, float]:
    began = perf_counter()
    conversations = await hold(router, workload)
    seconds = perf_counter() - began
    second = [turns[1] for turns in conversations]
    return {
        "hit rate": router.stats.cache_hit_rate,
        "second turn, s": median((t.end or 0.0) - (t.start or 0.0) for t in second),
        "rollout, s": seconds,
        "moves": float(router.stats.num_moves),
    }


def compare(rounds: Rounds) -> dict[str, list[float]]:
    """Ratios of neighbouring arms, round by round."""

    def of(figure: str, over: str, under: str) -> list[float]:
        return ratios({arm: figures[figure] for arm, figures in rounds.items()}, over, under)

    return {
        "hit rate, sticky / one": of("hit rate", "sticky", "one"),
        "hit rate, spread / sticky": of("hit rate", "spread", "sticky"),
        "second turn, spread / sticky": of("second turn, s", "spread", "sticky"),
        "rollout, spread / sticky": of("rollout, s", "spread", "sticky"),
    }


async def run(workloads: dict[str, Workload], repetitions: int) -> dict[str, Any]:
    """By workload, rounds and ratios."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="routing-") as folder:
        async with open_engines(Path(folder)) as engines:
            for name, workload in workloads.items():
                rounds = await measure(engines, workload, repetitions)
                results[name] = {"rounds": rounds, "ratios": compare(rounds)}
    return results


def report(results: dict[str, Any]) -> str:
    """Two tables."""
    figures = [
        (name, arm, *rounds.values())
        for name, result in results.items()
        for arm, rounds in result["rounds"].items()
    ]
    compared = [
        (name, ratio, values)
        for name, result in results.items()
        for ratio, values in result["ratios"].items()
    ]
    columns = ["hit rate", "second turn, s", "rollout, s", "moves"]
    return "\n\n".join(
        [
            table(["conversations", "engines", *columns], figures),
            table(["conversations", "ratio", "median and range"], compared),
        ]
    )


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("routing", __doc__, repetitions=5)
    parser.add_argument("--quick", action="store_true", help="a trial with a third of the prompts")
    arguments = parser.parse_args()
    load, workloads = start_load(), WORKLOADS
    if arguments.quick:
        workloads = {k: replace(w, num_prompts=w.num_prompts // 3) for k, w in workloads.items()}
    results = uvloop.run(run(workloads, arguments.repetitions))
    print(report(results))
    write(arguments, results, "routing", load, ABOUT, report(results))


ABOUT = """\
Two vLLM engines of a random policy of 2 million parameters, prompts of 1024 tokens, three turns of
16 tokens, observations of 32 to 64, up to 0.2 s between turns. `spread` gives every turn to the
next engine."""

if __name__ == "__main__":
    main()
