"""Ops measured beside what is timed: what they take, and as a calibration that prices jobs like theirs."""

from __future__ import annotations

import pytest

from stretto.bench.layers import Layers
from stretto.bench.predict import Cell, Shape, captured, grid, run_cell
from stretto.bench.predict_grid import beside
from stretto.bench.visits import Visits, calibration_of
from stretto.ir.prices import signature
from stretto.measure.sweep import LINEAR_ROWS, LINEAR_SIZES, linear_ops
from stretto.measure.time_ops import distinct_ops
from stretto.price.priced import priced_ops


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


def few_layers() -> Layers:
    return Layers(rows=(8, 16), sizes=((32, 32), (32, 128)))


def test_layers_are_visited_and_price_products_that_no_job_has() -> None:
    layers = few_layers()
    layers.visit()
    once = layers.agreed()
    layers.visit()
    found = layers.agreed()
    assert once != found, "the second visit counts too"
    assert len(found) == 12
    assert all(timing.us > 0.0 and timing.flops and timing.nbytes for timing in found.values())
    assert calibration_of([], found).ops == found
    job = captured(tiny("a", 32))[2]
    took = [(job, {(0, op.name): 9.0 for ops in job.stages[0].ops.values() for op in ops})]
    alone = calibration_of(took).ops
    assert set(alone) & set(found), "the job has products of the layers"
    assert calibration_of(took, found).ops == {**found, **alone}, "a job's own times count"


@pytest.mark.parametrize("name", ["wide", "rows"])
def test_the_sweep_has_no_product_of_a_cell_that_is_priced_by_others(name: str) -> None:
    swept = {signature(op, specs) for op, specs in linear_ops(LINEAR_ROWS, LINEAR_SIZES, "float32")}
    # A pipeline's stages have the products of the whole, so tp tells all layouts.
    for tp in (1, 2):
        cell = next(c for c in grid(rates=("unlimited",)) if (c.shape.name, c.pp, c.tp) == (name, 1, tp))
        own = {key for key in distinct_ops([captured(cell)[2]]) if key.startswith("aten.mm")}
        assert len(own) >= 10
        assert not swept & own


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
