"""The parts of a training step; train.py says in which order they come."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from minirl import credit
from minirl.agent_loop import derive_seed
from minirl.curriculum import hinted_batch, hinted_logprobs
from minirl.evaluate import validate
from minirl.metrics import Metrics, slowest_metrics, timer, trajectory_metrics
from minirl.progress import Progress, Record
from minirl.ranks import RANKS
from minirl.records import Records, open_records
from minirl.rollout.manager import REDUCED, groups_for_training, varied_groups
from minirl.run import Run
from minirl.scoring import score_with_model
from minirl.tail import TailLogprobs
from minirl.trainer import packing
from minirl.trainer.performance import PeakMemory, step_performance
from minirl.trainer.update import TrainedModel
from minirl.types import GREEDY, Group, MicroBatch, Trajectory


class BadStepsError(RuntimeError):
    """Too many steps in a row could not be applied."""


class Steps:
    """What a rank does in a step. Only rank 0 has prompts, trajectories and records.

    >>> with Steps(run) as steps:
    ...     await steps.start()
    ...     for step in steps:
    ...         with steps.timed("gen"):
    ...             groups = await steps.generate()
    """

    def __init__(self, run: Run, record: Record | None = None) -> None:
        self._run = run
        self._config = run.config
        self._progress = Progress(run, record)
        self._is_replay = record is not None
        self._needs = credit.estimator_needs(run.config.algorithm)
        self.needs_old_logprobs = credit.needs_old_logprobs(run.config)
        """If not, `update_actor` has them without a pass of their own."""
        self._tail = TailLogprobs(run) if run.config.actor.logprobs_in_tail else None
        self._metrics = Metrics()
        self._stack = ExitStack()
        self._records: Records | None = None
        self._started = time.perf_counter()
        self._memory = PeakMemory(run.world.device)
        self.trajectories: list[Trajectory] = []
        """All that were sampled in the step, also those that do not train; on rank 0."""

    @property
    def number(self) -> int:
        """Of the step at work; 0 before the first."""
        return self._progress.number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)

    async def start(self) -> None:
        """Go on where the run was, if it was begun before; open the records."""
        self._stack.callback(self._progress.close)
        await self._make_room(level=2)  # until the first weights come
        resumed, metrics = await self._progress.restore()
        if self._run.inputs and not self._is_replay:
            decode = self._run.inputs.tokenizer.decode
            opened = open_records(self._config, self._progress.total, resumed, decode)
            self._records = records = self._stack.enter_context(opened)
            if metrics and records.lacks_resumed:
                await records.log(self.number, metrics)

    def __iter__(self) -> Iterator[int]:
        while self.number < self._progress.total:
            self._progress.begin_step()
            self._metrics = Metrics()
            self._started = time.perf_counter()
            self._groups: list[Group] = []
            self.trajectories = []
            self._bad_sequences: set[int] = set()
            yield self.number

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a part as `timing_s/<name>` and show it as the phase; the peak of its memory too."""
        shown = self._records.display.phase(name) if self._records else nullcontext()
        RANKS.phase(f"step {self.number}, {name}")
        self._memory.take()
        with timer(self._metrics, name), shown:
            yield
        if (peak := self._memory.take()) is not None:
            self._metrics.add(f"perf/max_memory_gb/{name}", peak, reduce="max")

    async def generate(self) -> list[Group]:
        """Roll out the next batch of prompts, rewards included; then the engines sleep.

        With algorithm.filter_groups, batches are drawn until enough groups have a signal.
        """
        num_batches = 0
        while await self._wants_batch(num_batches):
            num_batches += 1
            self._groups += await self._generate_batch()
        if self._run.manager:
            await self._run.manager.sleep(level=2)
        self._metrics.add("training/num_gen_batches", num_batches, reduce="last")
        del self._groups[self._config.data.train_batch_size :]
        return self._groups

    async def assemble(self, groups: list[Group]) -> MicroBatch:
        """The trajectories that train, by group, packed and on every rank."""
        batch = credit.pack_groups(groups, self._config) if self._run.inputs else None
        if batch and groups and self._tail and self._tail.known:
            batch.old_logprobs = self._tail.of(groups, batch)
            share = 1 - float(batch.old_logprobs.isnan().sum()) / max(1, batch.num_tokens)
            self._metrics.add("training/logprobs_in_tail", share, reduce="last")
        return await self._run.on_trainer(self._run.world.broadcast_batch, batch)

    async def compute_logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """The policy's log-probabilities at the start of the step [N], and, for an estimator that
        asks for them, 1 - 2 pi + sum_v pi_v^2 [N]. In bypass_mode the engine's are taken."""
        policy, correction = self._run.policy, self._config.algorithm.rollout_correction
        if correction and correction.bypass_mode:
            return batch.rollout_logprobs, None
        if "logprob_stats" in self._needs:
            return await self._run.on_trainer(policy.compute_logprobs_and_stats, batch)
        if (known := batch.old_logprobs) is None:
            return await self._run.on_trainer(policy.compute_logprobs, batch), None
        unknown = batch.sequence_ids[known.isnan()].unique().tolist()
        if unknown:
            rest = await self._run.on_trainer(policy.compute_logprobs, batch.select(unknown))
            known[batch.places(unknown)] = rest
        return known, None

    async def compute_ref_logprobs(self, batch: MicroBatch) -> Tensor:
        """The reference policy's log-probabilities [N]."""
        assert self._run.reference is not None
        return await self._run.on_trainer(self._run.reference.compute_logprobs, batch)

    async def compute_values(self, batch: MicroBatch) -> Tensor:
        """The critic's values [N]."""
        assert self._run.critic is not None
        return await self._run.on_trainer(self._run.critic.compute_values, batch)

    async def compute_hinted_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] of the same answers where hard prompts hold a hint."""
        run, hinted = self._run, None
        if run.inputs:
            hinted = await hinted_batch(batch, self._groups, self._config, run.inputs)
            share = hinted.num_sequences / max(batch.num_sequences, 1)
            self._metrics.add("cpo/hinted_fraction", share, reduce="last")
        return await run.on_trainer(hinted_logprobs, batch, hinted, run.policy, run.world)

    def correct_mismatch(self, batch: MicroBatch) -> None:
        """Weigh or reject what the engine's log-probabilities do not fit; metrics in any case."""
        metrics = credit.correct_mismatch(batch, self._config.algorithm.rollout_correction)
        self._metrics.update(metrics, reduce="last")

    def penalize_kl(self, batch: MicroBatch) -> None:
        """With use_kl_in_reward: the KL to the reference, out of every token's reward."""
        algorithm = self._config.algorithm
        if algorithm.use_kl_in_reward:
            metrics = credit.penalize_kl(batch, self._progress.kl_controller, algorithm.kl_penalty)
            self._metrics.update(metrics, reduce="last")

    async def compute_advantages(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Advantages and returns [N]: rank 0, which has the groups, computes them for all."""
        both = torch.zeros(2, batch.num_tokens)
        if self._run.inputs:
            both = torch.stack(credit.estimate(batch, self._groups, self._config.algorithm))
        advantages, returns = await self._run.on_trainer(self._run.world.sum_tensor, both)
        return advantages, returns

    async def update_critic(self, batch: MicroBatch) -> None:
        """The critic's gradient steps."""
        assert self._run.critic is not None
        await self._update(self._run.critic, batch)

    async def update_actor(self, batch: MicroBatch) -> None:
        """The policy's gradient steps."""
        await self._update(self._run.policy, batch)
        if not self.needs_old_logprobs:
            if batch.old_logprobs is None:  # nothing was applied
                batch.old_logprobs, _ = await self.compute_logprobs(batch)
            self.correct_mismatch(batch)

    async def update_weights(self) -> None:
        """The policy's weights into the engines, with proof."""
        run, check = self._run, self._config.rollout.sync_check
        await run.sync(run.policy.weights, self.number)
        phases = {f"perf/weight_sync_s/{name}": s for name, s in run.sync.seconds.items()}
        self._metrics.update(phases, reduce="last")
        if check:
            seed = derive_seed(self._config.trainer.seed, self.number, "probe")
            difference = await run.sync.check(run.policy.score, seed)
            self._metrics.add("training/sync_check_diff", difference, reduce="max")

    async def validate(self) -> dict[str, float]:
        """Score the policy on the validation set; rank 0 returns the metrics."""
        if not self._config.data.val_files:
            return {}
        metrics, trajectories = await validate(self._run, self.number)
        self._metrics.update(metrics, reduce="last")
        if self._records:
            await self._records.write(self.number, "val", trajectories, self._started)
        return metrics

    def due(self, every: int) -> bool:
        """Whether this step is one of `every` so many, or the last."""
        return every > 0 and (self.number % every == 0 or self.number == self._progress.total)

    async def save(self) -> None:
        """Write a checkpoint. The training goes on meanwhile (trainer.async_save), the end of the
        run waits."""
        made_room = await self._make_room(level=1)
        await self._progress.save(self._numbers() if self._run.inputs else {})
        if made_room:
            await self._run.on_trainer(self._run.world.release_memory)
            if self._run.manager:
                await self._run.manager.wake_up()
        if self.number == self._progress.total:
            await self._run.on_trainer(self._progress.checkpoints.wait)

    async def record(self, batch: MicroBatch) -> None:
        """Put together what came of the step, and keep its trajectories.

        Before its checkpoint, which holds the numbers too: a run that is killed between the two
        repeats the step, or has them to log.
        """
        progress = self._progress
        progress.num_bad_steps = progress.num_bad_steps + 1 if self._bad_sequences else 0
        await progress.end_step()
        if not self._run.inputs:
            return
        self._measure(batch)
        progress.note_outcome(self._metrics.result())
        if self._records:
            await self._records.write_step(
                self.number,
                self.trajectories,
                batch,
                [t for group in self._groups for t in group.trajectories],
                bad=self._bad_sequences,
                step_start=self._started,
            )

    async def finish(self) -> None:
        """Log the step. Raises BadStepsError, with a checkpoint, after too many bad ones, and
        CheckpointError when one could not be written."""
        seconds = self._progress.checkpoints.poll()
        if self._config.trainer.save_freq > 0:
            self._metrics.add("checkpoint/write_s", seconds, reduce="last")
        if self._records:
            await self._records.log(self.number, self._numbers())
        self._progress.forget()
        limit = self._config.trainer.max_bad_steps
        if self._progress.num_bad_steps >= limit:
            await self.save()
            await self._run.on_trainer(self._progress.checkpoints.wait)
            raise BadStepsError(
                f"step {self.number}: {limit} steps in a row (trainer.max_bad_steps) were not "
                "applied, because the loss, the advantages or the gradient were not finite; their "
                f"trajectories have the split `bad` in {self._config.trainer.run_dir}/trajectories,"
                " and the last state is in its checkpoints"
            )

    async def record_start(self) -> None:
        """Record what was measured before the first step."""
        if self._records and self.number == 0:
            await self._records.log(0, self._metrics.result())

    async def _make_room(self, level: int) -> bool:
        """With actor.offload, all that it keeps in host memory comes to the device to be saved or
        loaded: then the engines sleep."""
        if self._config.actor.offload == "none":
            return False
        if self._run.manager:
            await self._run.manager.sleep(level)
        await self._run.on_trainer(self._run.world.barrier)  # those of the other ranks sleep too
        return True

    async def _wants_batch(self, num_batches: int) -> bool:
        """Whether the step needs groups beside those of so many batches: rank 0 knows, and the
        others ask it where they help to score."""
        filtering = self._config.algorithm.filter_groups
        limit = filtering.max_num_gen_batches if filtering else 1
        missing = len(self._groups) < self._config.data.train_batch_size
        wanted = self._run.manager is not None and missing and (not limit or num_batches < limit)
        if self._run.reward_model is None and not self._tail:
            return wanted
        return (await self._run.on_trainer(self._run.world.gather, wanted))[0]

    async def _generate_batch(self) -> list[Group]:
        """One batch of prompts; the groups that are left of it."""
        in_tail = self._tail.compute if self._tail else None
        if self._run.manager is None:
            if in_tail:
                await in_tail([])
            await self._score([])
            return []
        prompts, rollout = self._progress.loader.next_batch(), self._config.rollout
        needs_greedy = "greedy_rewards" in self._needs
        trajectories = await self._run.manager.generate_sequences(
            prompts,
            step=self.number,
            greedy=needs_greedy,
            journal=self._progress.journal,
            in_tail=in_tail,
        )
        await self._score(trajectories)
        self.trajectories += trajectories
        for name, value in self._run.manager.metrics.items():
            self._metrics.add(name, value, reduce=REDUCED.get(name, "sum"))
        groups = groups_for_training(
            prompts,
            trajectories,
            num_wanted=rollout.n if rollout.on_failure == "drop_group" else 0,
            needs_greedy=needs_greedy,
            tool_reward=self._config.reward.tool_reward,
        )
        filtering = self._config.algorithm.filter_groups
        if not filtering:
            return groups
        return varied_groups(groups, filtering.metric, rollout.mask_terminations)

    async def _score(self, trajectories: list[Trajectory]) -> None:
        """The reward model's part of the rewards, on every rank."""
        filtering = self._config.algorithm.filter_groups is not None
        await score_with_model(self._run, trajectories, self._metrics, engines_go_on=filtering)

    async def _update(self, trained: TrainedModel, batch: MicroBatch) -> None:
        """Nothing at all is applied when an advantage or a return is not finite."""
        if broken := credit.broken_sequences(batch):
            self._bad_sequences.update(broken)
            trained.skip()
            return
        metrics = await self._run.on_trainer(trained.update, batch)
        self._bad_sequences.update(trained.bad_sequences)
        self._metrics.update(metrics, reduce="last")

    def _measure(self, batch: MicroBatch) -> None:
        """Rank 0's numbers of the step, but for the time that it took."""
        config, run = self._config, self._run
        rewards = packing.to_rows(batch, "token_rewards").sum(1).tolist()
        sampled = [t for t in self.trajectories if t.sample_index != GREEDY]
        self._metrics.merge(
            trajectory_metrics(
                sampled,
                response_length=config.rollout.response_length,
                max_prompt_length=config.data.max_prompt_length,
                rewards=rewards,
            )
        )
        self._metrics.update(slowest_metrics(sampled), reduce="last")
        self._metrics.update(credit.batch_metrics(batch), reduce="last")
        self._metrics.add("training/bad_step", bool(self._bad_sequences), reduce="last")
        self._metrics.add("training/epoch", self._progress.loader.epoch, reduce="last")
        phases = {
            name.removeprefix("timing_s/"): value
            for name, value in self._metrics.result().items()
            if name.startswith("timing_s/")
        }
        correction = config.algorithm.rollout_correction
        if self._tail or (correction and correction.bypass_mode):
            phases.pop("old_log_prob")  # all or most of them were known before
        if credit.broken_sequences(batch):
            phases.pop("update_actor", None)  # nothing was computed in it
        epochs = config.actor.ppo_epochs
        performance = step_performance(run.policy, batch, run.world, phases, epochs)
        self._metrics.update(performance, reduce="last")

    def _numbers(self) -> dict[str, float]:
        """All that is known of the step now, how long it has taken, and tokens per second and rank,
        as verl has it."""
        seconds, metrics = time.perf_counter() - self._started, self._metrics.result()
        throughput = metrics["perf/total_num_tokens"] / seconds / self._run.world.world_size
        return metrics | {"timing_s/step": seconds, "perf/throughput": throughput}
