"""A real engine beside a real trainer of the same model, for tests on a CPU and on a GPU."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.config import Config, load_config
from minirl.distributed import distributed
from minirl.inputs import SERVERS  # which has every engine: one test alone imports few of them
from minirl.launch import TrainerThread
from minirl.rollout.client import AsyncLLMServerManager
from minirl.rollout.server import AsyncServerBase, ServerClient, ServerService
from minirl.rollout.weight_sync import Bucket, WeightSync
from minirl.trainer import packing
from minirl.trainer.policy import PolicyTrainer
from minirl.types import MicroBatch, Trajectory


@dataclass
class Pair:
    """An engine and a trainer of the same model."""

    config: Config
    server: AsyncServerBase
    client: ServerClient
    policy: PolicyTrainer
    sync: WeightSync
    on_trainer: TrainerThread
    syncs: int = 0

    async def sync_now(self, weights: Any = None) -> float:
        """Bring the policy's weights (or `weights`) into the engine; the probe's difference."""
        self.syncs += 1
        await self.sync(weights or self.policy.weights, self.syncs)
        return await self.sync.check(self.policy.score, seed=self.syncs)

    async def sample(self, number: int, **params: Any) -> list[Trajectory]:
        router = AsyncLLMServerManager([self.client], max_sticky_sessions=99, sticky_imbalance=4)
        given = {"temperature": self.config.rollout.temperature, "max_tokens": 24, **params}
        prompts = [list(range(3 + i, 45 + 2 * i)) for i in range(number)]
        outputs = await asyncio.gather(
            *(
                router.generate(str(i), prompt_ids=prompt, sampling_params={"seed": i, **given})
                for i, prompt in enumerate(prompts)
            )
        )
        trajectories = [Trajectory(prompt_ids=prompt) for prompt in prompts]
        for trajectory, output in zip(trajectories, outputs, strict=True):
            trajectory.append_sampled(output)
        return trajectories

    async def differences(self, **params: Any) -> tuple[MicroBatch, Tensor]:
        """A sampled batch, and |trainer - engine| in the log-probability of its sampled tokens."""
        trajectories = await self.sample(12, **params)
        rewards = [[0.0] * len(t.response_ids) for t in trajectories]
        batch = packing.pack(trajectories, rewards, list(range(len(trajectories))))
        batch.old_logprobs = await self.on_trainer(self.policy.compute_logprobs, batch)
        sampled = batch.response_mask > 0
        return batch, (batch.old_logprobs - batch.rollout_logprobs)[sampled].abs()

    async def update(self, batch: MicroBatch) -> None:
        """One training step on random advantages."""
        generator = torch.Generator().manual_seed(self.syncs)
        batch.advantages = torch.randn(batch.num_tokens, generator=generator) * batch.response_mask
        await self.on_trainer(self.policy.update, batch)


class Without:
    """The policy's weights less one tensor."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.weights, self.name = pair.policy.weights, name
        self.num_bytes = self.weights.num_bytes

    def __iter__(self) -> Iterator[Bucket]:
        for bucket in self.weights:
            yield [(name, tensor) for name, tensor in bucket if name != self.name]


@asynccontextmanager
async def open_pair(folder: Path, model: Path, *settings: str) -> AsyncIterator[Pair]:
    """Start both on the device that `settings` ask for; logs and the socket go to `folder`."""
    config = load_config([f"model.path={model}", *settings])
    async with AsyncExitStack() as stack:
        world = stack.enter_context(distributed(config))
        on_trainer = TrainerThread()
        # First, since vLLM takes the memory that others allocate while it profiles for its own.
        policy = await on_trainer(PolicyTrainer, config, world)
        server = await stack.enter_async_context(
            SERVERS.find(config.rollout.name)(
                config,
                log_file=folder / "engine.log",
                device_ids=None if world.device.type == "cpu" else world.group_devices,
                num_threads=2,
            )
        )
        service = asyncio.create_task(ServerService(server, f"ipc://{folder}/engine").serve())
        client = await stack.enter_async_context(ServerClient(f"ipc://{folder}/engine"))
        sync = WeightSync(config, world, server, on_trainer, policy.vocab_size)
        yield Pair(config, server, client, policy, sync, on_trainer)
        service.cancel()
        await sync.close()
