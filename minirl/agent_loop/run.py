"""The boundary at which what goes wrong in a conversation becomes data."""

import asyncio
import numbers
import traceback
from collections.abc import Mapping
from typing import Any

from minirl.agent_loop.base import (
    AGENT_LOOPS,
    AgentLoopBase,
    AgentLoopContext,
    ServerError,
    trim,
)
from minirl.tools.session import is_failure
from minirl.types import Termination, Trajectory


def make_agent_loop(name: str, context: AgentLoopContext) -> AgentLoopBase:
    """A new agent loop by its name in the agent-loop file, its registered one, or its import path.

    ValueError with the nearest name when there is none.
    """
    factory = context.agent_loops.get(name) or AGENT_LOOPS.find(name)
    return factory(context)


async def run_agent_loop(
    loop: AgentLoopBase, sampling_params: Mapping[str, Any], row: Mapping[str, Any]
) -> list[Trajectory]:
    """Hold one conversation and return its trajectories, at least one, each with a termination.

    An exception in user code becomes `error` with its traceback, rollout.trajectory_timeout_s
    `timeout`; both keep what was sampled until then. Cancellation and ServerError pass through.
    """
    try:
        async with asyncio.timeout(loop.config.rollout.trajectory_timeout_s) as deadline:
            result = await loop.run(dict(sampling_params), **row)
        trajectories = _finished(result)
    except BaseException as error:
        if not is_failure(error) or _is_server_error(error):
            raise
        timed_out = isinstance(error, TimeoutError) and deadline.expired()
        reason: Termination = "timeout" if timed_out else "error"
        return failed_trajectories(loop.trajectories, error, row, reason)
    for trajectory in trajectories:
        _label(trajectory, row)
    return trajectories


def record_failure(trajectory: Trajectory, reason: Termination, error: BaseException) -> None:
    """End a trajectory because of an exception in user code, and keep its traceback."""
    trajectory.termination = reason
    text = "".join(traceback.format_exception(error))
    # A lone surrogate (a file name, a byte that is no text) could not be sent, nor written.
    trajectory.error = text.encode("utf-8", "backslashreplace").decode()
    trim(trajectory)


def _finished(result: Any) -> list[Trajectory]:
    trajectories = result if isinstance(result, list) else [result]
    if not trajectories or not all(isinstance(t, Trajectory) for t in trajectories):
        raise TypeError(f"run() returned {result!r}; expected a trajectory or a list of them")
    if any(t.termination is None for t in trajectories):
        raise ValueError(
            "run() returned a trajectory that has not ended; call self.finish(trajectory, reason)"
        )
    if not all(map(_is_consistent, trajectories)):
        raise ValueError(
            "run() returned a trajectory whose tokens, mask, log-probabilities and turns do not "
            "fit one another; only self.generate and self.append_observation may write to them, "
            "and self.finish(trajectory, reason) ends it"
        )
    for name, value in ((n, v) for t in trajectories for n, v in t.metrics.items()):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"run() returned a trajectory with metrics[{name!r}] = {value!r}")
    return trajectories


def _is_consistent(t: Trajectory) -> bool:
    lengths = {len(t.response_ids), len(t.response_mask), len(t.response_logprobs)}
    turns = {len(t.turn_ends), len(t.turn_rewards), len(t.weight_versions)}
    end = t.turn_ends[-1] if t.turn_ends else 0
    return lengths == {end} and len(turns) == 1


def failed_trajectories(
    trajectories: list[Trajectory],
    error: BaseException,
    row: Mapping[str, Any],
    reason: Termination = "error",
) -> list[Trajectory]:
    """What a conversation that failed comes back as: what there is of it, at least one."""
    trajectories = trajectories or [Trajectory(prompt_ids=[])]
    for trajectory in trajectories:
        record_failure(trajectory, reason, error)
        _label(trajectory, row)
    return trajectories


def _is_server_error(error: BaseException) -> bool:
    """Also inside the group that a TaskGroup of the user's makes of it."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(ServerError) is not None
    return isinstance(error, ServerError)


def _label(trajectory: Trajectory, row: Mapping[str, Any]) -> None:
    trajectory.uid = str(row.get("uid", ""))
    trajectory.sample_index = int(row.get("sample_index", 0))
    trajectory.data_source = row.get("data_source") or ""
    trajectory.ground_truth = (row.get("reward_model") or {}).get("ground_truth")
