"""A module of a user's that cannot be imported in a worker process."""

import multiprocessing

from minirl.agent_loop import SingleTurnAgentLoop

if multiprocessing.parent_process() is not None:
    raise RuntimeError("no license for a second process")


class RefuserLoop(SingleTurnAgentLoop):
    """Works in rank 0."""
