"""The benchmark of the rollout's own cost runs, and what it says adds up."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import rollout_driver, rollout_overhead, scaling


def test_the_cost_of_a_conversation_is_measured(tmp_path: Path) -> None:
    measured = rollout_driver.measure(tmp_path, 16)
    assert measured["driver_ms"] > 0 and measured["engine_ms"] >= 0
    assert 400 < measured["tokens"] < 800  # three turns and two results


@pytest.mark.parametrize("main", [rollout_overhead.main, scaling.main])
@pytest.mark.parametrize("number", [0, 20])
def test_conversations_come_in_groups(
    main: Callable[[], None],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--conversations", "16", str(number)])
    with pytest.raises(SystemExit):
        main()
    assert f"--conversations: got [16, {number}]; give multiples of 8" in capsys.readouterr().err


def test_hit_rates_are_told(tmp_path: Path) -> None:
    results = rollout_overhead.measure_routing(argparse.Namespace(quick=True), tmp_path)
    for stats in results.values():
        assert 0 < stats[2].cache_hit_rate / stats[1].cache_hit_rate < 1.02
    lines = rollout_overhead.report_routing(results).splitlines()
    assert len(lines) == 2 + 2 * len(results)
