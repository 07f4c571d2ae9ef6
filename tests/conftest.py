"""For all tests; that it stands here lets those in the folders below import tests/*.py."""

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest

pytest.register_assert_rewrite("chaos_checks")


@pytest.fixture(scope="session")
def forkserver() -> ForkServerContext:
    """Starts processes in which minirl is imported already, and nothing of this one goes on."""
    context = multiprocessing.get_context("forkserver")
    modules = ["launch", "testing", "rollout.server", "trainer.critic", "trainer.reward_model"]
    context.set_forkserver_preload([f"minirl.{module}" for module in modules])
    return context


LONGEST = [
    "tests/test_train.py",
    "tests/rollout/test_engines.py",
    "tests/test_selftest.py",
    "tests/test_resume.py",
    "tests/trainer/test_two_ranks.py",
    "tests/trainer/test_compile.py",
    "tests/test_ranks.py",
    "tests/test_replay.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that several processes end together (`make test` has two)."""
    files = [item.nodeid.partition("::")[0] for item in items]
    order = {file: place for place, file in enumerate(LONGEST)}
    ranked = sorted(range(len(items)), key=lambda i: order.get(files[i], len(order)))
    items[:] = [items[i] for i in ranked]
