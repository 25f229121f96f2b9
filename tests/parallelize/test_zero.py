"""Ranks that keep parts of parameters, gradients and states train to what the plain model trains to."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from tests.parallelize.zero import ZeroCell, assert_same_parameters, plain_training, training, worst_error

TABLE = """
    # zero, dp_shard (- is all of dp = 4), pp, schedule, tp, ep, cp = 2, recompute, precision, and what else
    1 -  1  1f1b             1  1  -        full  float64  clipped
    2 2  1  1f1b             1  1  ring     none  float64  tied frozen
    3 -  1  1f1b             2  2  gathered none  bf16     tied clipped
    1 2  2  1f1b             2  1  -        full  bf16     tied
    2 2  2  1f1b             2  2  ring     full  float64  clipped
    3 -  2  1f1b             1  1  gathered none  float64  frozen clipped
    1 -  2  interleaved-1f1b 1  2  ring     full  float64  tied clipped
    2 -  2  interleaved-1f1b 2  1  gathered none  float64  tied frozen
    3 2  2  interleaved-1f1b 1  1  -        full  bf16     frozen
    1 -  2  zb-h2            1  1  gathered none  float64  tied frozen
    2 2  2  zb-h2            2  2  -        full  bf16
    3 -  2  zb-h2            1  1  ring     none  float64  tied clipped
    1 2  2  zb-v             2  2  -        none  bf16     frozen
    2 -  2  zb-v             1  1  ring     full  bf16     tied clipped
    3 2  2  zb-v             1  1  gathered full  float64  tied frozen
"""
"""Cells that have between them all pairs of settings. With tp ranks share the sequence, with ep it is cut."""

LAYOUTS = [(1, "1f1b"), *((2, name) for name in ("1f1b", "interleaved-1f1b", "zb-h2", "zb-v"))]
GRID: dict[str, tuple[Any, ...]] = {
    "zero": (1, 2, 3),
    "dp_shard": (None, 2),
    "layout": tuple(LAYOUTS),
    "tp": (1, 2),
    "ep": (1, 2),
    "cp_kind": ("", "ring", "gathered"),
    "recompute": ("none", "full"),
    "precision": ("float64", "bf16"),
    "tied": (False, True),
    "frozen": (False, True),
    "clipped": (False, True),
}

FAST = ("1 - 1 1f1b", "2 2 1 1f1b", "3 - 2 1f1b 1")
"""How fast rows begin."""


def read(row: str) -> ZeroCell:
    """A cell of its row."""
    zero, dp_shard, pp, schedule, tp, ep, cp_kind, recompute, precision, *more = row.split()
    return ZeroCell(
        zero=int(zero),  # type: ignore[arg-type]
        dp_shard=None if dp_shard == "-" else int(dp_shard),
        pp=int(pp),
        schedule=schedule,
        tp=int(tp),
        ep=int(ep),
        cp_kind="" if cp_kind == "-" else cp_kind,  # type: ignore[arg-type]
        recompute=recompute,
        precision=precision,  # type: ignore[arg-type]
        **dict.fromkeys(more, True),  # type: ignore[arg-type]
    )


ROWS = [" ".join(row.split()) for row in TABLE.strip().split("\n")[1:]]
CELLS = [pytest.param(row, marks=[] if row.startswith(FAST) else pytest.mark.slow) for row in ROWS]

ROUNDED = 1e-3
"""By how much of its norm a bf16 model's parameter may differ where gradients are added in another order: an
element of a copy in bf16 is then rounded otherwise now and then."""


def test_the_table_has_all_pairs() -> None:
    def pairs(settings: dict[str, Any]) -> set[Any]:
        return set(combinations(settings.items(), 2))

    cells = [read(row) for row in ROWS]
    found = [{key: getattr(c, key, (c.pp, c.schedule)) for key in GRID} for c in cells]
    every = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, every))


@pytest.mark.parametrize(
    "cell",
    [
        ZeroCell(0, frozen=True, clipped=True),
        pytest.param(
            ZeroCell(0, pp=2, tp=2, ep=2, schedule="zb-v", recompute="full", tied=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_copies_train_to_what_the_plain_model_trains_to(cell: ZeroCell) -> None:
    assert worst_error(training(cell, cell.plan()), plain_training(cell))[0] <= 1e-10


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("experts", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_ranks_keep_rows_of_the_matrices_of_one_expert(zero: int, experts: int) -> None:
    """One expert a rank, or three, which two ranks cannot share evenly."""
    cell = ZeroCell(zero, ep=2, experts=experts)  # type: ignore[arg-type]
    assert worst_error(training(cell, cell.plan()), plain_training(cell))[0] <= 1e-10


@pytest.mark.parametrize("row", CELLS)
def test_parts_train_to_what_the_plain_model_trains_to(row: str) -> None:
    """In bf16, to what copies train to."""
    cell = read(row)
    found = training(cell, cell.plan())
    if cell.precision == "float64":
        error, name = worst_error(found, plain_training(cell))
        assert error <= 1e-10, f"{name} differs by {error:.1e}"
        return
    copies = replace(cell, zero=0, dp_shard=None)
    error, name = worst_error(found, training(copies, copies.plan()))
    assert error <= ROUNDED, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize(
    "cell",
    [
        ZeroCell(1, precision="bf16"),
        pytest.param(
            ZeroCell(1, pp=2, schedule="zb-h2", tp=2, precision="bf16", frozen=True), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_sums_in_one_order_are_those_of_copies_to_the_bit(cell: ZeroCell) -> None:
    """A step's gradients are summed over one axis, once."""
    copies = replace(cell, zero=0)
    assert_same_parameters(training(cell, cell.plan()), training(copies, copies.plan()))


@pytest.mark.parametrize(
    "cell",
    [
        ZeroCell(0, pp=2, schedule="zb-h2", clipped=True),
        ZeroCell(3, pp=2, schedule="zb-h2", clipped=True),
        *(
            pytest.param(cell, marks=pytest.mark.slow)
            for cell in (
                ZeroCell(1, pp=2, schedule="zb-v", tp=2, precision="bf16"),
                ZeroCell(2, ep=2, dp_shard=2, tied=True, precision="bf16"),
                ZeroCell(3, pp=2, schedule="interleaved-1f1b", ep=2, recompute="full", precision="bf16"),
            )
        ),
    ],
    ids=str,
)
def test_two_runs_and_other_orders_train_to_the_same_bits(cell: ZeroCell) -> None:
    plan = cell.plan()
    first = training(cell, plan)
    slow_links = {"latency_us": 2000.0, "link_gbps": 0.001}
    others = [plan, cell.plan(overlap="off"), cell.plan(order="captured"), cell.plan(figures=slow_links)]
    for other in others:
        assert_same_parameters(training(cell, other), first)
