import json
import math

import numpy as np
import pytest
from PIL import Image

from minirl import plots
from minirl.plots import learning_curve


def write_run(run_dir, num_steps=30, reward=True, validation="acc"):
    run_dir.mkdir()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            row = {"step": step, "seconds": 10.0 + 7.5 * step}
            if reward and step:
                row["critic/score/mean"] = step / num_steps if step != 5 else "NaN"
            if validation and step % 10 == 0:
                row[f"val-core/openai/gsm8k/{validation}/mean@4"] = step / 40
                row["val-core/openai/gsm8k/reward/mean@4"] = step / 50
                row["val-core/openai/gsm8k/acc/pass@4"] = step / 30
            file.write(json.dumps(row) + "\n")
    return run_dir


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, for a look at what is on them."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1]
    )
    return figures


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_one_run(tmp_path, drawn) -> None:
    out = learning_curve(write_run(tmp_path / "grpo"), tmp_path / "curve.png")
    image = Image.open(out)
    assert image.size == (1200, 900) and len(image.convert("L").getcolors()) > 10
    upper, lower = drawn[0].axes
    (line,) = upper.lines
    assert line.get_xdata().tolist() == [0, 10, 20, 30]
    assert line.get_ydata().tolist() == [0.0, 0.25, 0.5, 0.75]
    raw, smooth = lower.lines
    assert len(raw.get_xdata()) == 30 and math.isnan(raw.get_ydata()[4])
    assert smooth.get_ydata()[15] == pytest.approx(16 / 30)
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("validation success", "training reward")
    assert lower.get_xlabel() == "step"
    (time_axis,) = upper.child_axes
    assert time_axis.get_xlabel() == "time (min)"
    assert drawn[0].get_suptitle() == "grpo (3.92 min)"
    assert legend(drawn[0]) == ["openai/gsm8k acc/mean@4", "reward, running mean"]


def test_time_axis_follows_the_recorded_seconds(tmp_path, drawn) -> None:
    learning_curve(write_run(tmp_path / "run"), tmp_path / "curve.png")
    upper = drawn[0].axes[0]
    low, high = upper.get_xlim()
    got = upper.child_axes[0].get_xlim()
    assert got == pytest.approx(((10 + 7.5 * low) / 60, (10 + 7.5 * high) / 60))


def test_several_runs(tmp_path, drawn) -> None:
    runs = [write_run(tmp_path / "grpo"), write_run(tmp_path / "rloo", validation=None)]
    learning_curve(runs, tmp_path / "curve.png", title="two runs")
    upper, lower = drawn[0].axes
    assert len(upper.lines) == 1 and len(lower.lines) == 4
    assert len({line.get_color() for line in lower.lines}) == 2
    assert drawn[0].get_suptitle() == "two runs"
    assert legend(drawn[0]) == ["grpo (3.92 min)", "rloo (3.92 min)", "openai/gsm8k acc/mean@4"]


def test_legend_covers_no_data(tmp_path, drawn) -> None:
    learning_curve([write_run(tmp_path / "a"), write_run(tmp_path / "b")], tmp_path / "curve.png")
    box = drawn[0].legends[0].get_window_extent()
    assert not any(box.overlaps(ax.get_window_extent()) for ax in drawn[0].axes)


def test_a_run_without_accuracy_draws_the_score(tmp_path, drawn) -> None:
    learning_curve(write_run(tmp_path / "run", validation="reward"), tmp_path / "curve.png")
    assert drawn[0].axes[0].get_ylabel() == "validation score"
    assert legend(drawn[0])[0] == "openai/gsm8k reward/mean@4"


def test_reward_alone_has_one_panel(tmp_path, drawn) -> None:
    learning_curve(write_run(tmp_path / "run", validation=None), tmp_path / "curve.png")
    assert len(drawn[0].axes) == 1


def test_nothing_to_draw_is_an_error(tmp_path) -> None:
    run = write_run(tmp_path / "run", reward=False, validation=None)
    with pytest.raises(ValueError, match=r"run/metrics\.jsonl: neither critic/score/mean"):
        learning_curve(run, tmp_path / "curve.png")


def test_running_mean_is_centred_and_shrinks_at_the_ends() -> None:
    values = plots._running_mean(np.array([0.0, 3.0, 6.0, 0.0]))
    assert values.tolist() == [1.5, 3.0, 3.0, 3.0]
