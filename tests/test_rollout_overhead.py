"""The benchmark of the rollout's own cost runs, and what it says adds up."""

from pathlib import Path

from benchmarks import rollout_driver, rollout_overhead


def test_the_cost_of_a_conversation_is_measured(tmp_path: Path) -> None:
    measured = rollout_driver.measure(tmp_path, 16)
    assert measured["driver_ms"] > 0 and measured["engine_ms"] >= 0
    assert 400 < measured["tokens"] < 800  # three turns and two results


def test_hit_rates_are_printed(tmp_path: Path, capsys) -> None:
    results = rollout_overhead.measure_routing(True, tmp_path, "")
    for rates in results.values():
        assert 0 < rates[2] / rates[1] < 1.02
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * len(results)
