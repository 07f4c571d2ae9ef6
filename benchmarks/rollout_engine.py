"""Tokens per second of whole rollouts against bare calls of vLLM with the same requests.

Both arms use one engine in one process, in turn. The rollout goes first and its requests are kept:
prompts, seeds and limits. The bare arm then hands them to `AsyncLLM.generate`, every conversation's
one after another and all conversations at once: no chat, no tools, no rewards, no transport.
"""

import asyncio
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rollout_driver import open_manager
from minirl.config import Config
from minirl.data import load_rows
from minirl.rollout.server import METHODS, ServerService
from minirl.rollout.vllm_server import VLLMServer
from minirl.types import TokenOutput

Requests = dict[str, list[tuple[list[int], dict[str, Any]]]]
"""By conversation, prompt and sampling parameters of each turn."""


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
        manager = await stack.enter_async_context(open_manager(config, [address]))

        async def rollout(name: str) -> tuple[float, int]:
            asked = [{**row, "uid": str(i), "agent_name": name} for i, row in enumerate(rows)]
            await server.forget()
            started = time.perf_counter()
            trajectories = await manager.generate_sequences(asked, step=1)
            seconds = time.perf_counter() - started
            return seconds, sum(sum(t.response_mask) for t in trajectories)

        async def bare(requests: Requests) -> tuple[float, int]:
            await server.forget()
            started = time.perf_counter()
            tokens = await server.generate_bare(requests)
            return time.perf_counter() - started, tokens

        results = {}
        for name in ("single_turn_agent", "tool_agent"):
            await rollout(name)  # warms up, and says what the bare arm has to ask
            requests = server.kept
            pairs = []
            for number in range(repetitions):
                pair = {}
                for arm in ("rollout", "bare")[:: 1 if number % 2 else -1]:
                    pair[arm] = await (rollout(name) if arm == "rollout" else bare(requests))
                assert pair["rollout"][1] == pair["bare"][1], "the arms sampled different tokens"
                pairs.append(pair)
            results[name] = _summary(pairs, sum(map(len, requests.values())), len(requests))
        return results


def _summary(pairs: list[dict[str, tuple[float, int]]], turns: int, number: int) -> dict[str, Any]:
    ratios = [pair["bare"][0] / pair["rollout"][0] for pair in pairs]
    per_s = {arm: [pair[arm][1] / pair[arm][0] for pair in pairs] for arm in pairs[0]}
    return {
        "conversations": number,
        "turns": turns,
        "tokens": pairs[0]["bare"][1],
        "rollout_tokens_per_s": median(per_s["rollout"]),
        "bare_tokens_per_s": median(per_s["bare"]),
        "ratio": median(ratios),
        "ratios": ratios,
    }


def with_kv_cache(config: Config, gigabytes: float) -> Config:
    """The same config for an engine with so much memory for keys and values."""
    return replace(config, rollout=replace(config.rollout, cpu_kv_cache_gb=gigabytes))
