"""A benchmark writes its own section, below its own machine, and leaves the rest as it is."""

import sys
from pathlib import Path

import pytest

from benchmarks.results import RESULTS, machine_name, provenance, table, words, write_section

BEFORE = """\
# Results

How to read them.

## A laptop

Versions.

### routing

By hand: `## no heading`.

### scaling

| a |
| --- |

## A GPU

### routing

Fast.
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "RESULTS.md"
    path.write_text(BEFORE)
    return path


def test_a_section_is_replaced_in_its_place(path: Path) -> None:
    write_section("routing", "\nNew.\n\n", path=path, machine="A laptop")
    assert path.read_text() == BEFORE.replace("By hand: `## no heading`.", "New.")
    write_section("routing", "By hand: `## no heading`.", path=path, machine="A laptop")
    assert path.read_text() == BEFORE


def test_a_new_section_comes_last_of_its_machine(path: Path) -> None:
    write_section("startup", "22 s", path=path, machine="A laptop")
    assert path.read_text() == BEFORE.replace("| --- |\n", "| --- |\n\n### startup\n\n22 s\n")


def test_a_new_machine_comes_last(path: Path) -> None:
    write_section("startup", "22 s", path=path)
    assert path.read_text() == f"{BEFORE}\n## {machine_name()}\n\n### startup\n\n22 s\n"


def test_the_file_itself_keeps_its_form(tmp_path: Path) -> None:
    """Writing a section changes nothing else of what is recorded, not even a blank line."""
    copy, new = tmp_path / "RESULTS.md", "### routing\n\nNew.\n"
    copy.write_text(RESULTS.read_text())
    write_section("routing", "Old.", path=copy, machine="A laptop")
    old = copy.read_text()
    assert old.startswith(RESULTS.read_text())
    write_section("routing", "New.", path=copy, machine="A laptop")
    assert copy.read_text() == old.replace("### routing\n\nOld.\n", new)


def test_figures_have_three_digits_and_their_range() -> None:
    assert [words(value) for value in (0.12345, 1234.5, 7, "x")] == ["0.123", "1234", "7", "x"]
    assert [words(value) for value in (999.4, 999.7)] == ["999", "1000"]
    assert words([3.0, 1.0, 2.0]) == "2 (1 to 3)" and words([1.0]) == "1"
    assert table(["a", "b"], [(1, [1.0, 2.0])]) == "| a | b |\n| --- | --- |\n| 1 | 1.5 (1 to 2) |"


@pytest.mark.parametrize(
    "given",
    [
        "--parts short long --record --out /tmp/x.json --steps 3",
        "--out=/tmp/x.json --parts short long --steps 3 --record",
    ],
)
def test_a_command_is_told_without_where_its_figures_went(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *given.split()])
    command = provenance(0.5).split("`")[1]
    assert command.endswith(" --parts short long --steps 3") and command.startswith("python -m ")
