"""Ops measured beside what is timed: what they take, and as a calibration that prices jobs like theirs."""

from __future__ import annotations

import pytest

from stretto.bench.predict import Cell, Shape, captured, run_cell
from stretto.bench.predict_grid import beside
from stretto.bench.visits import Visits, calibration_of
from stretto.cost.priced import priced_ops


def tiny(name: str, hidden: int, rate: str = "unlimited") -> Cell:
    shape = Shape(name, hidden=hidden, layers=1, heads=2, sequence=8, vocab=64, microbatch=1, microbatches=2)
    return Cell(shape, 1, 1, rate)


def test_jobs_are_priced_by_what_their_ops_took() -> None:
    seen = [Visits(captured(tiny(name, hidden))[2], [0]) for name, hidden in (("a", 32), ("b", 64))]
    with pytest.raises(AssertionError, match="no visit yet"):
        seen[0].agreed()
    for visits in seen:
        visits.visit()
        once = visits.agreed().op_us
        visits.visit()
        assert once != visits.agreed().op_us, "the second visit counts too"
    calibration = calibration_of((visits.job, visits.agreed().op_us) for visits in seen)
    priced_us = taken_us = 0.0
    for visits in seen:
        priced = priced_ops(visits.job, calibration)
        assert {one.how for one in priced.values()} == {"measured", "free"}
        priced_us += sum(one.us for one in priced.values())
        taken_us += sum(us for key, us in visits.agreed().op_us.items() if priced[key].how == "measured")
    # of both jobs together: an op that both of them have costs each of them the mean of the two
    assert priced_us == pytest.approx(taken_us, rel=1e-6)


def test_a_cell_has_the_ops_of_other_shapes_and_its_own_only_when_it_is_asked_for() -> None:
    cell, other = tiny("a", 32), tiny("b", 64)
    _, calibration = run_cell(cell, 1, None, [other])
    own, foreign = (priced_ops(captured(one)[2], calibration) for one in (cell, other))
    assert {one.how for one in foreign.values()} == {"measured", "free"}
    assert {one.how for one in own.values()} > {"measured", "free"}
    _, both = run_cell(cell, 1, None, [cell, other])
    assert {one.how for one in priced_ops(captured(cell)[2], both).values()} == {"measured", "free"}
    assert run_cell(cell, 1)[1].ops == {}


def test_calibrated_shapes_of_the_layout_are_measured_beside() -> None:
    shapes = [tiny(name, 32).shape for name in ("wide", "deep", "long")]
    cells = [Cell(shape, 2, tp, rate) for rate in ("100mbit", "50mbit") for tp in (1, 2) for shape in shapes]
    for cell in cells:
        others = beside(cell, cells)
        calibrated = cell.rate == "100mbit" and cell.shape.name != "wide"
        assert {other.shape.name for other in others} == (set() if calibrated else {"deep", "long"})
        assert len(others) in (0, 2), "each shape once"
        assert all(other.tp == cell.tp for other in others)
    assert beside(cells[0], [cells[0]]) == [], "nothing calibrated is in this grid"
