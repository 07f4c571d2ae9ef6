"""The parts of a training step; train.py says in which order they come."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Self

from torch import Tensor

from minirl.agent_loop import derive_seed
from minirl.algorithms import ADV_ESTIMATORS, AdvantageInputs, compute_advantages
from minirl.config import to_yaml
from minirl.data import PromptLoader
from minirl.display import Display
from minirl.evaluate import validate
from minirl.metrics import Metrics, timer, trajectory_metrics
from minirl.registry import option_names
from minirl.rewards import token_rewards
from minirl.rollout.manager import groups_for_training
from minirl.run import Run
from minirl.tracking import Tracking, TrajectoryWriter
from minirl.trainer import packing
from minirl.trainer.policy import mismatch_metrics
from minirl.types import Group, MicroBatch, Trajectory


class Steps:
    """What a rank does in a step. Only rank 0 has prompts, trajectories, trackers and a display.

    >>> with Steps(run) as steps:
    ...     await steps.start()
    ...     for step in steps:
    ...         with steps.timed("gen"):
    ...             trajectories = await steps.generate()
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config = run.config
        self._metrics = Metrics()
        self._stack = ExitStack()
        self.number = 0
        """Of the step at work; 0 before the first."""
        self.total = run.total_steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    async def start(self) -> None:
        """Resume from a checkpoint where there is one; open display and trackers."""
        run, trainer = self._run, self._config.trainer
        if run.inputs:
            data = self._config.data
            self._loader = PromptLoader(
                run.inputs.train_rows,
                data.train_batch_size,
                seed=trainer.seed,
                shuffle=data.shuffle,
            )
        resumed = await run.on_trainer(self._load_checkpoint)
        if run.inputs:
            self._open_trackers(resumed)

    def __iter__(self) -> Iterator[int]:
        while self.number < self.total:
            self.number += 1
            self._metrics = Metrics()
            self._started = time.perf_counter()
            yield self.number

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a part as `timing_s/<name>` and show it as the phase."""
        with timer(self._metrics, name):
            if self._run.inputs:
                with self._display.phase(name):
                    yield
            else:
                yield

    async def generate(self) -> list[Trajectory]:
        """Roll out the next batch of prompts, rewards included; then the engines sleep."""
        if not self._run.manager:
            return []
        self._prompts = self._loader.next_batch()
        trajectories = await self._run.manager.generate_sequences(self._prompts, step=self.number)
        await self._run.manager.sleep(level=2)
        self._metrics.update(self._run.manager.metrics, reduce="last")
        return trajectories

    async def assemble(self, trajectories: list[Trajectory]) -> MicroBatch:
        """The trajectories that train, by group, packed and on every rank."""
        batch = None
        if self._run.inputs:
            self._trajectories = trajectories
            groups = groups_for_training(
                self._prompts,
                trajectories,
                drop_failed_groups=self._config.rollout.on_failure == "drop_group",
            )
            batch = self._pack(groups)
        return await self._run.on_trainer(self._run.world.broadcast_batch, batch)

    async def compute_logprobs(self, batch: MicroBatch) -> Tensor:
        """The policy's log-probabilities at the start of the step [N]."""
        return await self._run.on_trainer(self._run.policy.compute_logprobs, batch)

    async def compute_ref_logprobs(self, batch: MicroBatch) -> Tensor:
        """The reference policy's log-probabilities [N]."""
        assert self._run.reference is not None
        return await self._run.on_trainer(self._run.reference.compute_logprobs, batch)

    async def compute_advantages(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Advantages and returns [N]: a function of the batch alone, the same on every rank."""
        self._metrics.update(mismatch_metrics(batch), reduce="last")
        algorithm = self._config.algorithm
        known = option_names(ADV_ESTIMATORS.find(algorithm.adv_estimator))
        options = {k: v for k, v in vars(algorithm).items() if k in known} | algorithm.options
        inputs = AdvantageInputs(
            token_rewards=packing.to_rows(batch, "token_rewards"),
            response_mask=packing.to_rows(batch, "response_mask"),
            group_ids=batch.group_ids,
        )
        advantages, returns = compute_advantages(algorithm.adv_estimator, inputs, **options)
        return packing.from_rows(batch, advantages), packing.from_rows(batch, returns)

    async def update_actor(self, batch: MicroBatch) -> None:
        """The gradient steps."""
        metrics = await self._run.on_trainer(self._run.policy.update, batch)
        self._metrics.update(metrics, reduce="last")

    async def update_weights(self) -> None:
        """The policy's weights into the engines, with proof."""
        run, check = self._run, self._config.rollout.sync_check
        await run.sync(run.policy.weights, self.number)
        if check:
            seed = derive_seed(self._config.trainer.seed, self.number, "probe")
            difference = await run.sync.check(run.policy.score, seed)
            self._metrics.add("training/sync_check_diff", difference, reduce="max")

    async def validate(self) -> dict[str, float]:
        """Score the policy on the validation set; rank 0 returns the metrics."""
        if not self._run.inputs or not self._run.inputs.val_rows:
            return {}
        metrics, trajectories = await validate(self._run, self.number)
        self._metrics.update(metrics, reduce="last")
        await self._write_trajectories("val", trajectories)
        return metrics

    def due(self, every: int) -> bool:
        """Whether this step is one of `every` so many, or the last."""
        return every > 0 and (self.number % every == 0 or self.number == self.total)

    async def save(self) -> None:
        """Write a checkpoint: everything that the next step depends on."""
        trainer = self._config.trainer
        await self._run.on_trainer(
            self._run.policy.save,
            trainer.run_dir / "checkpoints",
            self.number,
            {"data": self._loader.state_dict()} if self._run.inputs else {},
            max_to_keep=trainer.max_ckpt_to_keep,
        )

    async def finish(self) -> None:
        """Record the step."""
        if not self._run.inputs:
            return
        self._metrics.merge(
            trajectory_metrics(
                self._trajectories,
                response_length=self._config.rollout.response_length,
                max_prompt_length=self._config.data.max_prompt_length,
            )
        )
        await self._write_trajectories("train", self._trajectories)
        seconds = time.perf_counter() - self._started
        self._metrics.add("timing_s/step", seconds, reduce="last")
        self._metrics.add("training/epoch", self._loader.epoch, reduce="last")
        metrics = self._metrics.result()
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / seconds
        self._tracking.log(self.number, metrics)
        self._display.step(self.number, metrics)

    def record_start(self) -> None:
        """Record what was measured before the first step."""
        if self._run.inputs and self.number == 0:
            metrics = self._metrics.result()
            self._tracking.log(0, metrics)
            self._display.step(0, metrics)

    def _pack(self, groups: list[Group]) -> MicroBatch:
        members = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
        masked = set(self._config.rollout.mask_terminations)
        return packing.pack(
            [t for _, t in members],
            [token_rewards(t, self._config.reward.tool_reward) for _, t in members],
            [index for index, _ in members],
            [t.termination not in masked for _, t in members],
        )

    def _load_checkpoint(self) -> int | None:
        """Go on from the latest checkpoint, if there is one; its step, or None."""
        trainer = self._config.trainer
        if trainer.resume_mode == "disable":
            return None
        state = self._run.policy.load_latest(trainer.run_dir)
        if state is None:
            return None
        self.number = state["step"]
        if self._run.inputs:
            self._loader.load_state_dict(state["data"])
        return self.number

    def _open_trackers(self, resumed: int | None) -> None:
        trainer = self._config.trainer
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        (trainer.run_dir / "config.yaml").write_text(to_yaml(self._config))
        tracking = Tracking(
            trainer.logger, trainer.run_dir, asdict(self._config), resumed_at=resumed
        )
        self._tracking = self._stack.enter_context(tracking)
        display = Display(self.total, trainer.experiment_name, start_step=self.number)
        self._display = self._stack.enter_context(display)
        self._writer = TrajectoryWriter(trainer.run_dir)
        if resumed is not None:
            self._display.message(f"resumed from step {resumed} of {trainer.run_dir}")

    async def _write_trajectories(self, split: str, trajectories: list[Trajectory]) -> None:
        assert self._run.inputs is not None
        limit = self._config.rollout.trace
        chosen = trajectories if limit < 0 else trajectories[:limit]
        decode = self._run.inputs.tokenizer.decode
        await asyncio.to_thread(self._writer.write, self.number, split, chosen, decode)
