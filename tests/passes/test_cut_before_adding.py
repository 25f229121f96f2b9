"""What is added to a sum over ranks that is then cut is cut before."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.ir.program import Op, Ref, TensorSpec
from stretto.passes.graph import Graph
from stretto.passes.scatter import cut_before_adding, reduce_scatter_chunks

ROWS, WHOLE = TensorSpec((8, 6), "float32"), TensorSpec((2, 4, 6), "float32")
HALF = TensorSpec((2, 2, 6), "float32", (24, 6, 1))


def graph(
    *,
    users: tuple[Op, ...] = (),
    roots: tuple[str, ...] = (),
    kind: str = "sum",
    other: Any = ROWS,
    summed: Any = ROWS,
) -> Graph:
    """As experts and their router give gradients back: rows that are summed, and rows that all have."""
    found = (
        Op("x", "aten.relu.default", (Ref("batch/0"),), (), (summed,)),
        Op("b", "aten.relu.default", (Ref("batch/1"),), (), (other,)),
        Op("sum", "comm.all_reduce", (Ref("x"), kind, "tp", 2), (), (ROWS,)),
        Op("done", "comm.wait", (Ref("sum"),), (), (ROWS,), "sum"),
        Op("both", "aten.add.Tensor", (Ref("b"), Ref("done")), (), (ROWS,)),
        Op("seen", "aten.view.default", (Ref("both"), WHOLE.shape), (), (WHOLE,), "both"),
        Op("again", "aten.add.Tensor", (Ref("seen"), Ref("batch/2")), (), (WHOLE,)),
        Op("cut", "axis.chunk", (Ref("again"), 1, "tp", 2), (), (HALF,), "again"),
        Op("y", "aten.relu.default", (Ref("cut"),), (), (TensorSpec((2, 2, 6), "float32"),)),
        *users,
    )
    given = {"batch/0": ROWS, "batch/1": other, "batch/2": WHOLE}
    return Graph(found, frozenset(("y", *roots, *(user.name for user in users))), given=given)


def test_each_is_cut_before_they_are_added() -> None:
    found = cut_before_adding(graph())
    made = {op.name: op for op in found.ops}
    assert made["sum"].outputs == made["done"].outputs == (WHOLE,)
    assert made["cut"].target == "aten.add.Tensor"
    chunks = [op for op in found.ops if op.target == "axis.chunk"]
    assert len(chunks) == 3
    assert all(op.outputs == (HALF,) for op in chunks)
    # In the order in which they were added, and on the side on which they stood.
    first, second = made["cut"].uses
    assert made[second].args[0] == Ref("batch/2")
    assert [made[name].uses[0] for name in made[first].uses] == [made[made[first].uses[0]].uses[0], "done"]
    known = {"batch/0", "batch/1", "batch/2"}
    for op in found.ops:
        assert known.issuperset(op.uses), "every op stands after what it uses"
        known.add(op.name)
    scattered = reduce_scatter_chunks(found)
    assert [op.collective.kind for op in scattered.ops if op.collective is not None] == ["reduce_scatter"]


@pytest.mark.parametrize(
    "change",
    [
        {"users": (Op("whole", "aten.relu.default", (Ref("both"),), (), (ROWS,)),)},
        {"users": (Op("whole", "aten.relu.default", (Ref("done"),), (), (ROWS,)),)},
        {"roots": ("again",)},
        {"kind": "max"},
        {"other": TensorSpec((8, 1), "float32")},
        {"other": TensorSpec((8, 6), "float32", (1, 8))},
        {"other": TensorSpec((8, 6), "float64")},
        {"summed": TensorSpec((8, 6), "float32", (1, 8))},
    ],
    ids=[
        *("sum used", "summed used", "a result", "a maximum", "repeated", "no view of it", "another dtype"),
        "no view of what is summed",
    ],
)
def test_what_has_to_stay(change: dict[str, Any]) -> None:
    before = graph(**change)
    assert cut_before_adding(before) == before
