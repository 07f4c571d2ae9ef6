"""For all tests; that it stands here lets those in the folders below import tests/*.py."""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("chaos_checks")

# Before torch is imported here or in a program that a test starts: OpenMP's threads wait by
# spinning. Where processes share the cores that takes several times as long as the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asserts a time, nor draws other examples in CI than here.
settings.register_profile(
    "minirl", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("minirl")


@pytest.fixture(scope="session")
def forkserver() -> ForkServerContext:
    """Starts processes in which minirl is imported already, and nothing of this one goes on."""
    context = multiprocessing.get_context("forkserver")
    modules = ["launch", "testing", "rollout.server", "trainer.critic", "trainer.reward_model"]
    context.set_forkserver_preload([f"minirl.{module}" for module in modules])
    return context


FIRST = [
    "tests/test_train.py",
    "tests/test_selftest.py",
    "tests/test_steps_algorithms.py",
    "tests/test_chaos.py",
    "tests/trainer/test_two_ranks.py",
    "tests/test_resume.py",
    "tests/rollout/test_worker_pool.py",
    "tests/trainer/test_compile.py",
    "tests/test_ranks.py",
    "tests/rollout/test_engines.py",
    "tests/tools/test_mcp.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that all three processes of `make test` end together. Those
    of test_train.py start several processes at once: an engine that is tested beside them takes
    several times as long, so its turn comes when they have ended."""
    files = [item.nodeid.partition("::")[0] for item in items]
    order = {file: place for place, file in enumerate(FIRST)}
    ranked = sorted(range(len(items)), key=lambda i: order.get(files[i], len(order)))
    items[:] = [items[i] for i in ranked]
