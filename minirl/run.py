"""Everything long-lived of a run, opened and closed in order; train.py and evaluate.py use it."""

import asyncio
import fcntl
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from minirl.agent_loop import derive_seed
from minirl.config import Config, ConfigError
from minirl.distributed import Dist, compute_in, distributed
from minirl.inputs import Inputs, read_inputs
from minirl.launch import SOCKETS, TrainerThread, ended_by_signals
from minirl.ranks import RANKS
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
from minirl.rollout.worker import LocalWorker, Workers, rare_collections
from minirl.rollout.worker_pool import begin_imports, open_pool
from minirl.tools import BaseTool
from minirl.trainer.checkpoint import Checkpoints
from minirl.trainer.critic import CriticTrainer
from minirl.trainer.determinism import deterministic
from minirl.trainer.policy import AdapterlessPolicy, PolicyTrainer, ReferencePolicy, make_reference
from minirl.trainer.reward_model import RewardModel
from minirl.waits import CONVERSATION, WAITS, within

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
SAVE_GRACE_S = 5.0
"""In which a checkpoint that is being written may still be completed when the run ends early."""
TOOL_CLOSE_S = 20.0
"""For a tool to drop what all conversations share; MCP's sessions take up to 15."""


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
    reference: ReferencePolicy | AdapterlessPolicy | None
    critic: CriticTrainer | None
    reward_model: RewardModel | None
    checkpoints: Checkpoints | None
    """None when the run does not train."""
    sync: WeightSync
    inputs: Inputs | None
    manager: AgentLoopManager | None


@asynccontextmanager
async def open_run(config: Config, *, training: bool = True) -> AsyncIterator[Run]:
    """Check the inputs, join the world, start engine and trainer at once; in the end close all."""
    rank = int(os.environ.get("RANK", 0))
    is_main = rank == 0
    disable_progress_bar()
    on_trainer = TrainerThread()
    async with AsyncExitStack() as stack:
        log_file = config.trainer.run_dir / "logs" / f"rank_{rank}.log"
        stack.enter_context(_logging(log_file, alone=training))
        with ended_by_signals():  # the data may be large, and the other ranks wait until it is read
            inputs = read_inputs(config, training=training) if is_main else None
            if is_main and config.rollout.agent.num_workers:
                begin_imports()
            stack.enter_context(deterministic(config.trainer.deterministic))
            stack.enter_context(rare_collections())
            world = stack.enter_context(distributed(config))
        if world.device.type == "cuda":
            await on_trainer(torch.cuda.set_device, world.device)  # each thread has its own
        else:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            await compute_in(on_trainer.executor, torch.get_num_threads())
        stack.enter_context(WAITS.explained(config.rollout.stall_warning_s))
        CONVERSATION.set(f"rank {world.rank}")
        SOCKETS.join(await on_trainer(world.share_path, SOCKETS.make() if is_main else ""))
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
            server = (
                await _start_engine(config, world, on_trainer, stack) if world.is_leader else None
            )
        policy, reference, critic, reward_model = loading.result()
        checkpoints = await on_trainer(_open_checkpoints, config, world) if training else None
        if checkpoints:
            stack.push_async_callback(asyncio.to_thread, checkpoints.close, SAVE_GRACE_S)
        parts = [RANKS.watch()]
        if server:
            service = ServerService(server, addresses[world.group])
            parts += [service.serve(), _watch(server, config.rollout.engine_timeout_s)]
        await stack.enter_async_context(_background(*parts))
        sync = WeightSync(config, world, server, on_trainer, policy.vocab_size)
        after_engine.push_async_callback(sync.close)  # the workers hold its buffer until they end
        manager = await _connect(config, inputs, addresses, stack) if inputs else None
        gc.freeze()  # what has come since stays as long
        stack.enter_context(RANKS.told())  # before anything is closed, which takes a while
        yield Run(
            config=config,
            world=world,
            total_steps=total_steps,
            on_trainer=on_trainer,
            policy=policy,
            reference=reference,
            critic=critic,
            reward_model=reward_model,
            checkpoints=checkpoints,
            sync=sync,
            inputs=inputs,
            manager=manager,
        )
        await on_trainer(world.barrier)  # no engine closes while rank 0 may ask it


def _total_steps(config: Config, world: Dist, inputs: Inputs | None) -> int:
    """Steps of the run, the same on every rank; 0 when it does not train."""
    batches = len(inputs.train_rows) // config.data.train_batch_size if inputs else 0
    per_epoch = world.gather(batches)[0]  # only rank 0 has rows
    return config.trainer.total_training_steps or per_epoch * config.trainer.total_epochs


def _load(
    config: Config, world: Dist, total_steps: int, training: bool
) -> tuple[PolicyTrainer, Any, CriticTrainer | None, RewardModel | None]:
    policy = PolicyTrainer(config, world, total_steps)
    reference = make_reference(config, world, policy) if config.ref and training else None
    critic = CriticTrainer(config, world, total_steps) if config.critic and training else None
    reward_model = RewardModel(config, world) if config.reward.reward_model else None
    return policy, reference, critic, reward_model


def _open_checkpoints(config: Config, world: Dist) -> Checkpoints:
    trainer = config.trainer
    return Checkpoints(
        trainer.run_dir / "checkpoints",
        world,
        max_to_keep=trainer.max_ckpt_to_keep,
        background=trainer.async_save,
        timeout_s=trainer.collective_timeout_s,
    )


async def _start_engine(
    config: Config, world: Dist, on_trainer: TrainerThread, stack: AsyncExitStack
) -> AsyncServerBase:
    """The engine of this rank's group, on the devices of the group's ranks."""
    size = world.tensor_parallel_size
    cpu, cores = world.device.type == "cpu", len(os.sched_getaffinity(0)) // world.num_groups
    # Engines with one seed would all draw the same for requests that have none of their own.
    seed = derive_seed(config.trainer.seed, "engine", world.group)
    config = replace(config, trainer=replace(config.trainer, seed=seed))
    server = SERVERS.find(config.rollout.name)(
        config,
        log_file=config.trainer.run_dir / "logs" / f"engine_{world.group}.log",
        device_ids=None if cpu else world.group_devices,
        # One core stays free for the event loop, which works while the engine does.
        num_threads=max(1, (cores - 1) // size),
        # Of several ranks one may wait for the others there while its engine should go on.
        executor=on_trainer.executor if cpu and world.world_size == 1 else None,
    )
    with WAITS.on(f"engine {world.group} to start", logging.INFO):  # minutes, for a large model
        return await stack.enter_async_context(server)


async def _connect(
    config: Config, inputs: Inputs, addresses: list[str], stack: AsyncExitStack
) -> AgentLoopManager:
    """Rank 0: clients to every engine, the agent-loop workers and their manager."""
    for tool in inputs.tools.values():
        stack.push_async_callback(_close, tool)
    clients = [
        await stack.enter_async_context(ServerClient(address, f"engine {index}"))
        for index, address in enumerate(addresses)
    ]
    if others := clients[1:]:  # the first is in this process
        watching = (_watch_from_afar(client, config.rollout.engine_timeout_s) for client in others)
        await stack.enter_async_context(_background(*watching))
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


async def _close(tool: BaseTool) -> None:
    """One that hangs does not keep the run from ending."""
    try:
        async with asyncio.timeout(TOOL_CLOSE_S):
            await tool.aclose()
    except TimeoutError:
        logger.warning("tool %r was not closed within %g s", tool.name, TOOL_CLOSE_S)


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
    seen, idle_s = (0, 0, 0), 0.0
    while True:
        await server.check_health()
        stats = await server.stats()
        progress = stats.num_steps, stats.num_requests, stats.num_running
        if progress != seen or not stats.num_running:
            seen, idle_s = progress, 0.0
        elif idle_s > timeout_s:
            raise EngineLostError(
                f"the engine has made no step for {timeout_s:g} s (rollout.engine_timeout_s), with "
                f"{stats.num_running} requests in it; see {server.log_file}"
            )
        await asyncio.sleep(HEALTH_INTERVAL_S)
        idle_s += HEALTH_INTERVAL_S  # not by a clock: this process may be stopped and go on, too


async def _watch_from_afar(client: ServerClient, timeout_s: float) -> None:
    """The rank that holds an engine, and watches it, may itself hang; then requests would wait
    for ever."""
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        try:
            await within(timeout_s, client.stats())
        except TimeoutError as error:
            raise EngineLostError(
                f"the process that holds {client.name} has not answered for {timeout_s:g} s "
                "(rollout.engine_timeout_s)"
            ) from error


@contextmanager
def _logging(path: Path, *, alone: bool) -> Iterator[None]:
    """Send this rank's log records to its file, warnings to stderr too; the file also gets the
    traceback of what ends the run. ConfigError where it cannot be written, or another run is
    `alone` in writing to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise ConfigError(f"trainer.default_local_dir: {problem}; name another folder") from error
    assert handler.stream
    try:
        if alone:  # for as long as the file is open here; children do not hold the lock
            fcntl.lockf(handler.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"trainer.experiment_name: {path.parents[1]} is that of a run that has not ended "
            f"({error.strerror}: {path}); wait for its end, or write another name"
        ) from error
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
