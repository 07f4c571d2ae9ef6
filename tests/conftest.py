"""For all tests; that it stands here lets those in the folders below import tests/*.py."""

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest

pytest.register_assert_rewrite("chaos_checks")


@pytest.fixture(scope="session")
def forkserver() -> ForkServerContext:
    """Starts processes in which minirl is imported already, and nothing of this one goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["minirl.launch", "minirl.testing", "minirl.rollout.server"])
    return context
