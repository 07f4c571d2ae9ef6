"""`prime`: every trajectory is scored in a process that can be killed."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minirl.config import CustomRewardConfig, RewardPoolConfig
from minirl.rewards import scoring_process
from minirl.rewards.functions import RewardFunction, require_custom
from minirl.rewards.managers import REWARD_MANAGERS, NaiveRewardManager
from minirl.tools.threads import run_in_thread
from minirl.types import Trajectory
from minirl.waits import WAITS

START_TIMEOUT_S = 120.0
"""Seconds that a process may take to import what the reward function is made of."""


class ScoreTimeoutError(Exception):
    """The reward function took longer than reward.pool.timeout_s; its process was killed."""


@REWARD_MANAGERS.register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores like `naive`, in reward.pool.num_processes processes at once.

    For verifiers that compute for long or may hang, in C code too. What takes longer than
    reward.pool.timeout_s is killed and gets the reward 0; `timeout` in the breakdown is 1 there and
    0 elsewhere. A process that ends by itself (out of memory, a crash) fails its trajectory.

    The reward function is imported in every process, so it must be found by its file or module; of
    minirl, `minirl.rewards.gsm8k` is quick to import, most of the rest brings torch.
    """

    def __init__(
        self,
        compute_score: RewardFunction,
        *,
        custom_reward_function: CustomRewardConfig | None,
        reward_kwargs: Mapping[str, Any],
        pool: RewardPoolConfig | None = None,
    ) -> None:
        custom = require_custom(custom_reward_function, "prime")
        self.pool = ScoringPool(custom, reward_kwargs, pool or RewardPoolConfig())
        super().__init__(self.pool.score)

    async def __call__(
        self, trajectory: Trajectory, row: Mapping[str, Any], solution_str: str
    ) -> None:
        """As `naive`; RuntimeError holds the traceback of what the reward function raised."""
        try:
            await super().__call__(trajectory, row, solution_str)
        except ScoreTimeoutError:
            trajectory.reward = 0.0
            trajectory.reward_breakdown["timeout"] = 1.0
        else:
            trajectory.reward_breakdown["timeout"] = 0.0


class ScoringPool:
    """Processes with one reward function, started when they are needed.

    They end with the pool, and with this process however it ends.
    """

    def __init__(
        self, custom: CustomRewardConfig, options: Mapping[str, Any], config: RewardPoolConfig
    ) -> None:
        self._task = (custom.path, custom.name, dict(options))
        self._timeout_s = config.timeout_s
        self._free = asyncio.Semaphore(config.num_processes)
        self._idle: list[ScoringProcess] = []
        weakref.finalize(self, _kill_all, self._idle)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Any:
        """What the reward function returns; numbers and texts only.

        Raises:
            ScoreTimeoutError: it took too long.
            RuntimeError: it raised, or its process ended.
        """
        with WAITS.on("reward: a free process (reward.pool.num_processes)"):
            await self._free.acquire()
        try:
            process = self._idle.pop() if self._idle else await self._start()
            arguments = (data_source, solution_str, ground_truth, dict(extra_info))
            with WAITS.on("reward: the function, in its process"):
                answer = await process.ask(arguments, self._timeout_s)
            self._idle.append(process)
        finally:
            self._free.release()
        if "error" in answer:
            raise RuntimeError(f"the reward function raised:\n{answer['error']}")
        return answer["result"]

    async def _start(self) -> "ScoringProcess":
        process = ScoringProcess()
        try:
            with WAITS.on("reward: a process to import the function"):
                await process.ask((*self._task, sys.path), START_TIMEOUT_S)
        except ScoreTimeoutError as error:  # of no trajectory
            raise RuntimeError("reward.custom_reward_function: not imported in time") from error
        return process


class ScoringProcess:
    """One process. Where `ask` does not return an answer, the process is dead."""

    def __init__(self) -> None:
        # The thread that starts it must live as long as it: the kernel tells it of that one's end.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(scoring_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the trainer; and a group that can be killed
        )

    async def ask(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Send a message and await the answer; ScoreTimeoutError, or RuntimeError when it ended."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await run_in_thread(self._exchange, pickle.dumps(message))
        except TimeoutError as error:
            self.kill()
            raise ScoreTimeoutError(f"no answer within {timeout_s:g} s") from error
        except BaseException:
            self.kill()
            raise
        if not line:
            self.kill()
            status = self._process.returncode
            raise RuntimeError(f"the process of the reward function ended, exit status {status}")
        return json.loads(line)

    def kill(self) -> None:
        """End it, and what it started."""
        if self._process.returncode is None:  # else its number may be another's by now
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _exchange(self, message: bytes) -> bytes:
        """Blocks until there is a line, or the process has ended: b""."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no line either
            self._process.stdin.write(message)
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:  # not reaped here, so that the group keeps its number until it is killed
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return line


def _kill_all(processes: list[ScoringProcess]) -> None:
    for process in processes:
        process.kill()
