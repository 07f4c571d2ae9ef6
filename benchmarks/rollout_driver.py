"""What a conversation costs rank 0, in CPU time and in memory, over a scripted engine.

The engine is a process of its own behind the real service, and samples without computing anything,
so the CPU time of this process is that of agent loops, chat, tools, rewards, routing and transport.
"""

import gc
import json
import multiprocessing
import re
import resource
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.measure import spent_s
from minirl.config import Config, load_config
from minirl.rollout.manager import AgentLoopManager
from minirl.rollout.modes import Pace
from minirl.rollout.parts import load_parts, make_router
from minirl.rollout.server import ServerClient, ServerService, ServerStats
from minirl.rollout.worker import LocalWorker, Workers, rare_collections
from minirl.rollout.worker_pool import open_pool
from minirl.testing import byte_tokenizer
from minirl.types import TokenOutput

FORKSERVER = multiprocessing.get_context("forkserver")
"""So that each measurement has a new process, and only the first waits for the imports."""
FORKSERVER.set_forkserver_preload([__name__])
NUM_TURNS = 3
QUESTION = re.compile(r"12 \* (\d+) \+ 5")


class ScriptedTurns:
    """Answers every conversation with two tool calls and a result, those of its prompt, so that no
    two groups have the same; what ServerService serves."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.turns: dict[str, Iterator[TokenOutput]] = {}

    def _answer(self, prompt_ids: list[int]) -> Iterator[TokenOutput]:
        question = QUESTION.search(self.tokenizer.decode(prompt_ids))
        assert question
        number = int(question[1])
        for expression in (f"12 * {number}", f"{12 * number} + 5"):
            call = {"name": "calculator", "arguments": {"expression": expression}}
            yield self._output(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        yield self._output(f"The result is\n#### {12 * number + 5}")

    def _output(self, text: str) -> TokenOutput:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        logprobs = [-(1 + token_id) / 300 for token_id in ids]
        return TokenOutput(token_ids=ids, logprobs=logprobs, finish_reason="stop")

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        """The next turn of the conversation, at once."""
        conversation = request_id.rpartition("#")[0]
        if conversation not in self.turns:
            self.turns[conversation] = self._answer(prompt_ids)
        return next(self.turns[conversation])

    async def stats(self) -> ServerStats:
        """Nothing is measured here."""
        return ServerStats()


class EngineProcess:
    """ScriptedTurns in a process of its own."""

    def __init__(self, address: str) -> None:
        self._process = FORKSERVER.Process(target=_serve, args=(address,), daemon=True)

    def __enter__(self) -> psutil.Process:
        self._process.start()
        return psutil.Process(self._process.pid)

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(address: str) -> None:
    service = ServerService(ScriptedTurns(), address, ["generate", "stats"])
    uvloop.run(service.serve())


def make_config(folder: Path, *overrides: str) -> Config:
    """A config for the calculator's tool loop over a byte tokenizer, which is written there."""
    byte_tokenizer().save_pretrained(folder / "model")
    return load_config(
        [
            f"model.path={folder}/model",
            "data.max_prompt_length=2048",
            "rollout={n: 8, response_length: 1024}",
            "rollout.agent.default_agent_loop=tool_agent",
            "rollout.multi_turn.tool_config_path=examples/calculator/tools.yaml",
            *overrides,
        ]
    )


def make_rows(number: int) -> list[dict[str, Any]]:
    """As the dataset gives them."""
    return [
        {
            "uid": f"0-{i}",
            "prompt": [{"role": "user", "content": f"What is 12 * {i} + 5? Use the tool."}],
            "data_source": "calculator",
            "reward_model": {"style": "rule", "ground_truth": str(12 * i + 5)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(number)
    ]


@asynccontextmanager
async def open_manager(config: Config, addresses: list[str]) -> AsyncIterator[AgentLoopManager]:
    """As rank 0 of a run has it; sockets of agent-loop workers lie beside the first address."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ServerClient(address, f"engine {i}"))
            for i, address in enumerate(addresses)
        ]
        workers: Workers
        if config.rollout.agent.num_workers:
            folder = Path(addresses[0].removeprefix("ipc://")).parent
            workers = await stack.enter_async_context(open_pool(config, clients, folder))
        else:
            router = make_router(config.rollout.agent, clients)
            pace = Pace(router)
            workers = LocalWorker(load_parts(config).make_worker(config, pace), router, pace)
        stack.enter_context(rare_collections())  # as open_run does
        yield AgentLoopManager(config, workers, clients)


def measure(folder: Path, number: int) -> dict[str, float]:
    """A rollout of `number` conversations, in groups of 8, in a new process over a new engine."""
    address = f"ipc://{folder}/engine"
    with EngineProcess(address) as engine, ProcessPoolExecutor(1, FORKSERVER) as pool:
        return pool.submit(_run, folder, address, number, engine.pid).result()


def _run(folder: Path, address: str, number: int, engine_pid: int) -> dict[str, float]:
    return uvloop.run(_measure(make_config(folder), address, number, psutil.Process(engine_pid)))


async def _measure(
    config: Config, address: str, number: int, engine: psutil.Process
) -> dict[str, float]:
    async with open_manager(config, [address]) as manager:
        await manager.generate_sequences(make_rows(2), step=0)
        rows = make_rows(number // config.rollout.n)
        rss = _start_of_peak()
        engine_cpu_s, cpu_s = spent_s(engine), time.process_time()
        trajectories = await manager.generate_sequences(rows, step=1)
        cpu_s, engine_cpu_s = time.process_time() - cpu_s, spent_s(engine) - engine_cpu_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        generations = sum(t.num_turns for t in trajectories)
        assert generations == NUM_TURNS * number and all(t.reward for t in trajectories)
        return {
            "driver_ms": cpu_s / generations * 1e3,
            "engine_ms": engine_cpu_s / generations * 1e3,
            "peak_kb": (peak - rss) / number / 1e3,
            "tokens": sum(len(t.token_ids) for t in trajectories) / number,
        }


def _start_of_peak() -> int:
    """Bytes in use; from now on the peak counts anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss
