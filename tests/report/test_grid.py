"""Tables fit the terminal: words are broken, numbers are not, and what is left comes in further columns."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from stretto.report import grid as room
from stretto.report.grid import Grid, fitted

HEAD = ("op", "calls", "each, of the step", "total time", "rate", "reads → makes")
ROWS = [
    (
        f"aten.some_operation_{n}.default",
        str(n),
        f"{n} ms (8.5%)",
        "1.5 ms",
        "676 GFLOP/s",
        "float32[8,8] " * n,
    )
    for n in range(1, 6)
]
GRID = Grid("Ops", HEAD, ROWS, (0, 5), "a caption of some length, which is printed below the table")


def printed(width: int, grid: Grid = GRID) -> list[str]:
    out = StringIO()
    grid.print(Console(file=out, width=width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_no_line_is_wider_and_no_number_is_broken(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row in ROWS:
        for cell in row[1:5]:
            assert cell in text
    words = "".join(text.split())
    for head in HEAD:
        assert all(word in words for word in head.split())


def test_a_wide_terminal_has_one_table_and_a_narrow_one_the_first_column_again() -> None:
    one, several = printed(200), printed(60)
    assert sum("┏" in line for line in one) == 1
    count = sum("┏" in line for line in several)
    assert count > 1
    assert sum(line.startswith("Ops") for line in several) == count
    assert sum("further columns" in line for line in several) == count - 1
    assert sum("┃ op " in line for line in several) == count


def test_nothing_is_lost_in_a_column_that_nothing_fits_beside() -> None:
    grid = Grid("", ("", "a number of words"), [("x" * 18, "1" * 30)])
    assert sum(line.count("1") for line in printed(40, grid)) == 30


def test_lines_of_a_plan_are_broken_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a head\n  name             " + "some words " * 20
    assert fitted(text) == text.rstrip()
    monkeypatch.setattr(room, "console_of", lambda most: Console(width=80))
    lines = fitted(text).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(re.match(r" {19}\S", line) for line in lines[2:])
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
