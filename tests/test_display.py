import asyncio
import io
import logging
import re
import sys

import pytest
import uvloop
from rich.console import Console

from minirl.display import Display, braille_chart

METRICS = {
    "critic/score/mean": 0.523,
    "response_length/mean": 123.4,
    "perf/total_num_tokens": 5000,
    "timing_s/step": 4.0,
}
VALIDATED = METRICS | {"val-core/gsm8k/acc/mean@1": 0.61, "val-aux/gsm8k/num_prompts": 100}


def terminal(**options) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=100,
        height=30,
        legacy_windows=False,
        **options,
    )


def rendered(display: Display) -> str:
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(display)
    return console.export_text()


def written(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_panel_shows_everything() -> None:
    display = Display(200, "gsm8k-grpo", console=terminal())
    for step, reward in enumerate([0.1, 0.4, 0.9], 1):
        display.step(step, VALIDATED | {"critic/score/mean": reward})
    display.phase("update_actor")
    display.warn("python took 3 s")
    text = rendered(display)
    for expected in (
        "gsm8k-grpo",
        "step 3/200",
        "update_actor 0 s",
        "reward 0.900, response 123 tokens, 1250 tokens/s, 4.0 s/step",
        "step 3: gsm8k/acc/mean@1 0.610",
        "python took 3 s",
        " 0.9 ",
        " 0.1 ",
    ):
        assert expected in text
    assert "num_prompts" not in text
    assert re.search(r"0:00:00 gone, 0:00:0\d left", text)
    assert any("\u2801" <= character <= "\u28ff" for character in text)


def test_panel_before_the_first_step() -> None:
    text = rendered(Display(200, "run", console=terminal()))
    assert "step 0/200" in text and "-:--:-- left" in text and "reward" not in text


@pytest.mark.parametrize("name", ["run[lr=1e-5]", "a[/b]"])
def test_brackets_in_the_name_are_shown(name: str) -> None:
    assert name in rendered(Display(200, name, console=terminal()))


def test_panel_in_ascii_has_no_other_characters() -> None:
    display = Display(200, "run", console=terminal())
    for step in (1, 2):
        display.step(step, METRICS)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80).print(display)  # would raise UnicodeEncodeError
    file.flush()
    assert b"step 2/200" in file.buffer.getvalue()


def test_phases_nest() -> None:
    display = Display(10, "run", console=terminal())
    display.phase("rollout")
    with display.phase("testing"):
        assert "testing 0 s" in rendered(display)
    assert "rollout 0 s" in rendered(display)


def test_one_plain_line_per_step_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Display(200, "run", console=console) as display:
        with display.phase("rollout"):
            display.step(12, METRICS)
        display.step(13, VALIDATED)
    first, second = console.file.getvalue().splitlines()
    assert re.fullmatch(
        r"step 12/200 \| reward 0\.523 \| response 123 tokens \| 1250 tokens/s \| 4\.0 s/step "
        r"\| \d:\d\d:\d\d left",
        first,
    )
    assert second.endswith("left | val gsm8k/acc/mean@1 0.610")


def test_logs_and_prints_go_above_the_panel_under_uvloop(capsys, monkeypatch) -> None:
    console = terminal()
    library = logging.getLogger("test_display.library")  # with a handler of its own
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(library, "handlers", [handler])
    stderr = sys.stderr

    async def train() -> None:
        with Display(10, "run", console=console) as display:
            display.step(1, METRICS)
            await asyncio.sleep(0)
            library.warning("engine 0: %d preemptions", 3)
            print("a print")
            display.message("a [message]")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        uvloop.run(train())
    text = written(console)
    lines = text.splitlines()
    assert any(line.endswith("engine 0: 3 preemptions") for line in lines)
    assert any(line.endswith("a print") for line in lines)
    assert any(line.endswith("a [message]") for line in lines)
    last_panel = text[text.rindex("╭") :]
    assert re.search(r"warning +engine 0: 3 preemptions", last_panel)
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back
    assert capsys.readouterr() == ("", "")
    assert handler.stream is sys.stderr is stderr
    assert not any(type(h).__name__ == "_LastWarning" for h in logging.root.handlers)


def test_a_warning_that_cannot_be_shown_does_no_harm() -> None:
    with Display(10, "run", console=terminal()) as display:
        (panel,) = (h for h in logging.root.handlers if type(h).__name__ == "_LastWarning")
        panel.handle(logging.makeLogRecord({"msg": "\nthe last one\nof two lines"}))
        panel.handle(logging.makeLogRecord({"msg": "%d of them", "args": ("no number",)}))
        assert re.search(r"warning +the last one *│", rendered(display))
        panel.handle(logging.makeLogRecord({"msg": ""}))
        assert "warning" not in rendered(display)


def test_braille_chart_of_a_ramp() -> None:
    rows = braille_chart([0.0, 1.0], width=2, height=1)
    assert rows == ["⡠⠊"]  # one dot per column, from the bottom left to the top right


def test_braille_chart_connects_a_jump() -> None:
    rows = braille_chart([0.0, 0.0, 1.0, 1.0], width=2, height=2)
    assert rows == ["⠀⡏", "⣀⠇"]


def test_braille_chart_averages_what_does_not_fit() -> None:
    rows = braille_chart([0.0] * 500 + [1.0] * 500, width=10, height=3)
    assert [len(row) for row in rows] == [10, 10, 10]
    assert set(rows[2][:4]) == {"⣀"} and set(rows[0][6:]) == {"⠉"}


def test_braille_chart_of_a_constant_is_level() -> None:
    rows = braille_chart([0.3] * 7, width=4, height=3)
    assert len({row for row in rows if row.strip("⠀")}) == 1
