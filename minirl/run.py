"""Everything long-lived of a run, opened and closed in order; train.py and evaluate.py use it."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from minirl.config import Config
from minirl.distributed import Dist, distributed
from minirl.inputs import Inputs, read_inputs
from minirl.launch import SOCKETS, TrainerThread
from minirl.rollout.manager import AgentLoopManager
from minirl.rollout.modes import MODES
from minirl.rollout.parts import make_router
from minirl.rollout.server import (
    SERVERS,
    AsyncServerBase,
    EngineLostError,
    ServerClient,
    ServerService,
)
from minirl.rollout.weight_sync import WeightSync
from minirl.rollout.worker import LocalWorker, Workers
from minirl.rollout.worker_pool import begin_imports, open_pool
from minirl.trainer.critic import CriticTrainer
from minirl.trainer.policy import PolicyTrainer, ReferencePolicy
from minirl.trainer.reward_model import RewardModel
from minirl.waits import CONVERSATION, WAITS

HEALTH_INTERVAL_S = 1.0


class StderrWarnings(logging.Handler):
    """Prints warnings, one line or more each, to what stderr is at the time (a live display has its
    own); errors end the run, whose reason is printed anyway."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        if record.levelno == logging.WARNING:
            print(f"warning: {record.getMessage()}", file=sys.stderr, flush=True)


WARNINGS = StderrWarnings()


@dataclass(kw_only=True)
class Run:
    """One rank's parts of a run; rank 0 has the inputs and the manager too."""

    config: Config
    world: Dist
    total_steps: int
    on_trainer: TrainerThread
    policy: PolicyTrainer
    reference: ReferencePolicy | None
    critic: CriticTrainer | None
    reward_model: RewardModel | None
    sync: WeightSync
    inputs: Inputs | None
    manager: AgentLoopManager | None


@asynccontextmanager
async def open_run(config: Config, *, training: bool = True) -> AsyncIterator[Run]:
    """Check the inputs, join the world, start engine and trainer at once; in the end close all."""
    is_main = int(os.environ.get("RANK", 0)) == 0
    disable_progress_bar()
    inputs = read_inputs(config, training=training) if is_main else None
    if is_main and config.rollout.agent.num_workers:
        begin_imports()
    on_trainer = TrainerThread()
    async with AsyncExitStack() as stack:
        # The garbage collector need not look again and again at what stays until the end: for the
        # modules alone that would slow the start, and stop all conversations for 0.2 s each time.
        gc.freeze()
        stack.callback(gc.unfreeze)
        world = stack.enter_context(distributed(config))
        if world.device.type == "cuda":
            await on_trainer(torch.cuda.set_device, world.device)  # each thread has its own
        log_file = config.trainer.run_dir / "logs" / f"rank_{world.rank}.log"
        stack.enter_context(_logging(log_file))
        stack.enter_context(WAITS.explained(config.rollout.stall_warning_s))
        CONVERSATION.set(f"rank {world.rank}")
        folder = await on_trainer(world.broadcast_text, SOCKETS.make() if is_main else "")
        await on_trainer(world.require_one_machine, Path(folder))
        SOCKETS.join(folder)
        addresses = [f"ipc://{SOCKETS.path}/engine_{group}" for group in range(world.num_groups)]
        total_steps = await on_trainer(_total_steps, config, world, inputs)
        after_engine = await stack.enter_async_context(AsyncExitStack())
        async with asyncio.TaskGroup() as starting:
            loading = starting.create_task(on_trainer(_load, config, world, total_steps, training))
            if SERVERS.find(config.rollout.name).in_process:
                await loading
            if world.device.type == "cuda":
                # vLLM measures free memory while it starts: nobody else may take any.
                await loading
                await on_trainer(world.release_memory)
            server = await _start_engine(config, world, stack) if world.is_leader else None
        policy, reference, critic, reward_model = loading.result()
        if server:
            service = ServerService(server, addresses[world.group])
            watching = _watch(server, config.rollout.engine_timeout_s)
            await stack.enter_async_context(_background(service.serve(), watching))
        sync = WeightSync(config, world, server, on_trainer, policy.vocab_size)
        after_engine.push_async_callback(sync.close)  # the workers hold its buffer until they end
        manager = await _connect(config, inputs, addresses, stack) if inputs else None
        gc.freeze()
        yield Run(
            config=config,
            world=world,
            total_steps=total_steps,
            on_trainer=on_trainer,
            policy=policy,
            reference=reference,
            critic=critic,
            reward_model=reward_model,
            sync=sync,
            inputs=inputs,
            manager=manager,
        )
        await on_trainer(world.barrier)  # no engine closes while rank 0 may ask it


def _total_steps(config: Config, world: Dist, inputs: Inputs | None) -> int:
    """Steps of the run, the same on every rank; 0 when it does not train."""
    batches = len(inputs.train_rows) // config.data.train_batch_size if inputs else 0
    (per_epoch,) = world.sum_floats([batches])  # only rank 0 has rows
    return config.trainer.total_training_steps or int(per_epoch) * config.trainer.total_epochs


def _load(
    config: Config, world: Dist, total_steps: int, training: bool
) -> tuple[PolicyTrainer, ReferencePolicy | None, CriticTrainer | None, RewardModel | None]:
    policy = PolicyTrainer(config, world, total_steps)
    reference = ReferencePolicy(config, world) if config.ref and training else None
    critic = CriticTrainer(config, world, total_steps) if config.critic and training else None
    reward_model = RewardModel(config, world) if config.reward.reward_model else None
    return policy, reference, critic, reward_model


async def _start_engine(config: Config, world: Dist, stack: AsyncExitStack) -> AsyncServerBase:
    """The engine of this rank's group, on the devices of the group's ranks."""
    size = world.tensor_parallel_size
    cores = len(os.sched_getaffinity(0)) // world.num_groups
    server = SERVERS.find(config.rollout.name)(
        config,
        log_file=config.trainer.run_dir / "logs" / f"engine_{world.group}.log",
        device_ids=None if world.device.type == "cpu" else world.group_devices,
        # One core stays free for the engine's scheduler and the event loop: OpenMP threads wait by
        # spinning, and a worker with as many threads as there are cores loses most of its speed.
        num_threads=max(1, (cores - 1) // size),
    )
    with WAITS.on(f"engine {world.group} to start", logging.INFO):  # minutes, for a large model
        return await stack.enter_async_context(server)


async def _connect(
    config: Config, inputs: Inputs, addresses: list[str], stack: AsyncExitStack
) -> AgentLoopManager:
    """Rank 0: clients to every engine, the agent-loop workers and their manager."""
    for tool in inputs.tools.values():
        stack.push_async_callback(tool.aclose)
    clients = [
        await stack.enter_async_context(ServerClient(address, f"engine {index}"))
        for index, address in enumerate(addresses)
    ]
    workers: Workers
    if config.rollout.agent.num_workers:
        assert SOCKETS.path is not None
        pool = open_pool(config, clients, SOCKETS.path, inputs.modules)
        workers = await stack.enter_async_context(pool)
    else:
        router = make_router(config.rollout.agent, clients)
        pace = MODES.find(config.rollout.mode)(router)
        loops = inputs.make_worker(config, pace)
        stack.push_async_callback(loops.aclose)
        workers = LocalWorker(loops, router, pace)
    return AgentLoopManager(config, workers, clients)


@asynccontextmanager
async def _background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `parts` as long as the run lasts; when one fails, so does the run."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
        yield
        for task in tasks:
            task.cancel()


async def _watch(server: AsyncServerBase, timeout_s: float) -> None:
    """An engine that dies while nobody asks it anything, or stands still with requests in it, ends
    the run all the same."""
    seen, since = (0, 0, 0), time.monotonic()
    while True:
        await server.check_health()
        stats = await server.stats()
        progress = stats.num_steps, stats.num_requests, stats.num_running
        if progress != seen or not stats.num_running:
            seen, since = progress, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            raise EngineLostError(
                f"the engine has made no step for {timeout_s:g} s (rollout.engine_timeout_s), with "
                f"{stats.num_running} requests in it; see {server.log_file}"
            )
        await asyncio.sleep(HEALTH_INTERVAL_S)


@contextmanager
def _logging(path: Path) -> Iterator[None]:
    """Send this rank's log records to its file, warnings to stderr too; the file also gets the
    traceback of what ends the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("minirl")
    log.addHandler(handler)
    log.addHandler(WARNINGS)
    log.setLevel(logging.INFO)
    try:
        yield
    except BaseException:
        log.exception("the run ended early")
        raise
    finally:
        log.removeHandler(WARNINGS)
        log.removeHandler(handler)
        handler.close()
