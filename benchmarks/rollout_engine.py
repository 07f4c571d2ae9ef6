"""Tokens per second of whole rollouts against bare calls of vLLM with the same requests.

Both arms use one engine in one process, in turn. The rollout goes first and its requests are kept:
prompts, seeds and limits. The bare arm then hands them to `AsyncLLM.generate`, every conversation's
one after another and all conversations at once: no chat, no tools, no rewards, no transport.
"""

import asyncio
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.measure import spent_s
from benchmarks.rollout_driver import open_manager
from minirl.config import Config
from minirl.data import load_rows
from minirl.rollout.manager import AgentLoopManager
from minirl.rollout.server import METHODS, ServerService
from minirl.rollout.vllm_server import VLLMServer
from minirl.types import TokenOutput

Requests = dict[str, list[tuple[list[int], dict[str, Any]]]]
"""By conversation, prompt and sampling parameters of each turn."""


@dataclass(frozen=True)
class Arm:
    """One measurement."""

    tokens: int
    seconds: float
    cpu_s: float
    """Of all processes: what the throughput comes down to where no core is idle."""


class KeepingServer(VLLMServer):
    """A vLLM engine that keeps what it is asked, and can be asked without anything around it."""

    kept: Requests

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        self.kept[request_id.rpartition("#")[0]].append((prompt_ids, sampling_params))
        return await super().generate(prompt_ids, sampling_params, request_id)

    async def forget(self) -> None:
        """Empty the prefix cache, and begin to keep anew."""
        await self._engine.reset_prefix_cache()
        self.kept = defaultdict(list)

    async def generate_bare(self, requests: Requests) -> int:
        """The number of tokens that the engine samples for them."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async def converse(name: str) -> int:
            tokens = 0
            for turn, (prompt_ids, params) in enumerate(requests[name]):
                sampling = SamplingParams(
                    **params,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
                request_id = f"bare-{name}-{turn}"
                async for output in self._engine.generate(prompt, sampling, request_id):
                    tokens += len(output.outputs[0].token_ids)
            return tokens

        return sum(await asyncio.gather(*map(converse, requests)))


async def compare(
    config: Config, folder: Path, *, num_prompts: int, repetitions: int
) -> dict[str, dict[str, Any]]:
    """By kind of agent loop, tokens per second of both arms and the ratios of neighbouring ones."""
    rows = load_rows(config.data.train_files)[:num_prompts]
    address = f"ipc://{folder}/vllm"
    async with AsyncExitStack() as stack:
        server = KeepingServer(config, log_file=folder / "engine.log")
        await stack.enter_async_context(server)
        serving = asyncio.create_task(ServerService(server, address, METHODS).serve())
        stack.callback(serving.cancel)
        results = {}
        for name, given in {"single_turn_agent": _long_turns(config), "tool_agent": config}.items():
            asked = [{**row, "uid": str(i), "agent_name": name} for i, row in enumerate(rows)]
            manager = await stack.enter_async_context(open_manager(given, [address]))
            results[name] = await _compare(server, manager, asked, repetitions)
        return results


def _long_turns(config: Config) -> Config:
    """So hot that turns are long, up to rollout.response_length."""
    multi_turn = replace(config.rollout.multi_turn, max_tokens_per_turn=None)
    return replace(config, rollout=replace(config.rollout, temperature=2.0, multi_turn=multi_turn))


async def _compare(
    server: KeepingServer, manager: AgentLoopManager, rows: list[dict[str, Any]], repetitions: int
) -> dict[str, Any]:
    async def rollout() -> int:
        trajectories = await manager.generate_sequences(rows, step=1)
        return sum(sum(t.response_mask) for t in trajectories)

    await server.forget()
    await rollout()  # warms up, and says what the bare arm has to ask
    requests = server.kept
    pairs = []
    for number in range(repetitions):
        arms = {"rollout": rollout, "bare": partial(server.generate_bare, requests)}
        pair = {}
        for name in sorted(arms, reverse=bool(number % 2)):
            await server.forget()
            started, cpu_s = time.perf_counter(), _cpu_s()
            tokens = await arms[name]()
            pair[name] = Arm(tokens, time.perf_counter() - started, _cpu_s() - cpu_s)
        assert pair["rollout"].tokens == pair["bare"].tokens, "the arms sampled different tokens"
        pairs.append(pair)
    return _summary(pairs, sum(map(len, requests.values())), len(requests))


def _cpu_s() -> float:
    """Of this process and of the engine's."""
    this = psutil.Process()
    return sum(map(spent_s, [this, *this.children(recursive=True)]))


def _summary(pairs: list[dict[str, Arm]], turns: int, number: int) -> dict[str, Any]:
    ratios = [pair["bare"].seconds / pair["rollout"].seconds for pair in pairs]
    cpu_ratios = [pair["bare"].cpu_s / pair["rollout"].cpu_s for pair in pairs]
    speeds = {arm: median(p[arm].tokens / p[arm].seconds for p in pairs) for arm in pairs[0]}
    return {
        "conversations": number,
        "turns": turns,
        "tokens": pairs[0]["bare"].tokens,
        "rollout_tokens_per_s": speeds["rollout"],
        "bare_tokens_per_s": speeds["bare"],
        "ratio": median(ratios),
        "ratios": ratios,
        "cpu_ratio": median(cpu_ratios),
        "cpu_ratios": cpu_ratios,
    }
