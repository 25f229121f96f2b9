"""Loads of experts, and who waits for whom, in tables, sentences and on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.ir.metrics import Observed, ObservedRun
from stretto.ir.timeline import Stall, Timeline
from stretto.report.files import OBSERVED, load_timeline, save_json
from stretto.report.findings import stalls_findings, stalls_grid
from stretto.report.html import render
from stretto.report.load import dropped_words, load_findings, load_grid, loads_of, loads_table
from stretto.report.rundir import Run


def of(module: str, name: str, *values: float, least: float = 0.0, joined: str = "sum") -> Observed:
    lowest = tuple(value - least for value in values)
    return Observed(module, name, joined, 10, values, lowest, tuple(v + least for v in values))


END = (
    of("a.experts", "rows", 30.0, 20.0, 40.0, 10.0, least=5.0),
    of("a.experts", "dropped", 0.0, 0.0, 4.0, 0.0),
    of("a", "temperature", 2.5, least=0.5),
    of("b.experts", "rows", 50.0, 0.0, 0.0, 50.0),
    of("b.experts", "buffer", 1.25, joined="max"),
)
EARLIER = tuple(replace(one, steps=30, most=(1.75,) if one.name == "buffer" else one.most) for one in END)


@pytest.fixture
def run() -> ObservedRun:
    started = ObservedRun(0, 0, (), ())
    return started.and_then(30, EARLIER).and_then(40, END)


def test_a_row_a_layer(run: ObservedRun) -> None:
    grid = load_grid(run)
    assert grid is not None
    assert grid.title == "Load by expert, steps 31 to 40"
    assert grid.rows == [
        ("a.experts", "10.0% (3)", "40.0% (2)", "5.0% to 45.0%", "-", "4.0%", "-"),
        ("b.experts", "0.0% (1)", "50.0% (0)", "0.0% to 50.0%", "1, 2", "-", "1.75"),
    ]
    assert "in any of 40 steps" in grid.caption
    assert "25.0% would be even" in grid.caption


def test_what_is_said_of_them(run: ObservedRun) -> None:
    said = load_findings(replace(run, evaluation=(of("a.experts", "rows", 50.0, 50.0),)))
    assert said == [
        "The busiest expert is number 0 of b.experts: 2.00 times the even share, in the mean of the steps 31 "
        "to 40.",
        "2 experts got no rows, as number 1 of b.experts.",
        "In the steps 31 to 40 2.0% of the rows for experts found no room, and were dropped.",
    ]
    assert dropped_words(END) == "2.0% of the rows for experts found no room"
    assert dropped_words(END[3:]) == ""


def test_a_model_without_experts_has_no_table() -> None:
    run = ObservedRun(1, 10, END[2:3], END[2:3])
    assert load_grid(run) is None
    assert loads_table(run) is None
    assert load_findings(run) == []
    assert loads_of(END[2:3]) == ()


def test_the_picture_has_a_cell_an_expert(run: ObservedRun) -> None:
    table = loads_table(run)
    assert table is not None
    assert table.count("<td title=") == 8
    assert "a.experts, expert 2: 40.0% of the rows, 35.0% to 45.0% in single steps" in table
    # Half above the even share, and at it.
    assert "rgba(213,94,0,0.45)" in table
    assert table.count("rgba(0,114,178,0.75)") == 2


def timeline(**more: object) -> Timeline:
    return replace(Timeline("measured", 1, 1000.0, (), (0,), members=2), **more)  # type: ignore[arg-type]


UNEVEN = timeline(busy_us=(600.0, 900.0), stalls=(Stall("ep", 0, 1, 250.0), Stall("ep", 1, 0, 4.0)))


def test_a_row_a_rank() -> None:
    grid = stalls_grid(UNEVEN)
    assert grid is not None
    assert grid.rows == [
        ("rank 0", "600 us (60.0%)", "250 us (25.0%)", "rank 1 (ep)", "4 us (0.4%)"),
        ("rank 1", "900 us (90.0%)", "4 us (0.4%)", "rank 0 (ep)", "250 us (25.0%)"),
    ]
    assert stalls_findings(UNEVEN) == [
        "Rank 0 waits 250 us (25.0% of the step) on ep for rank 1, which computes for 900 us and it for "
        "600 us."
    ]


def test_both_are_kept_in_files(run: ObservedRun, tmp_path: Path) -> None:
    OBSERVED.save(run, tmp_path / "observed.json")
    assert OBSERVED.load(tmp_path / "observed.json") == run
    save_json(UNEVEN, tmp_path / "measured.json")
    assert load_timeline(tmp_path / "measured.json") == UNEVEN


def test_the_page_has_them(run: ObservedRun, tmp_path: Path) -> None:
    page = render(Run(tmp_path, measured=UNEVEN, observed=run))
    for words in (
        "Load by expert, steps 31 to 40",
        "Who waits for whom",
        "Rank 0 waits 250 us",
        "a temperature",
    ):
        assert words in page
