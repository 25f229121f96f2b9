"""An all-reduce that is cut becomes a reduce-scatter; one that is also used in full stays.

What is added to a reduction that is then cut is cut before.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.program import Op, Ref, TensorSpec
from stretto.parallelize import ops
from stretto.passes import on_graph
from stretto.passes.rewrite import Graph
from stretto.passes.scatter import cut_before_adding, reduce_scatter_chunks
from tests.parallelize.equality import step
from tests.runtime.equality import plain

X = TensorSpec((2, 4, 6), "float32")
HALF = TensorSpec((2, 2, 6), "float32", (24, 6, 1))


def graph(*, users: tuple[Op, ...] = (), roots: tuple[str, ...] = (), kind: str = "sum") -> Graph:
    found = (
        Op("x", "aten.relu.default", (Ref("batch/0"),), (), (X,)),
        Op("sum", "comm.all_reduce", (Ref("x"), kind, "tp", 2), (), (X,)),
        Op("done", "comm.wait", (Ref("sum"),), (), (X,), "sum"),
        Op("cut", "axis.chunk", (Ref("done"), 1, "tp", 2), (), (HALF,), "sum"),
        Op("y", "aten.relu.default", (Ref("cut"),), (), (TensorSpec((2, 2, 6), "float32"),)),
        *users,
    )
    return Graph(found, frozenset(("y", *roots, *(user.name for user in users))))


def kinds(found: Graph) -> list[str]:
    return [op.collective.kind for op in found.ops if op.collective is not None]


@pytest.mark.parametrize(
    "change",
    [
        {"users": (Op("whole", "aten.relu.default", (Ref("done"),), (), (X,)),)},
        {"roots": ("done",)},
        {"kind": "max"},
        {"users": (Op("other", "axis.chunk", (Ref("done"), 0, "tp", 2), (), (X,), "sum"),)},
        {"users": (Op("other", "axis.chunk", (Ref("done"), 1, "dp", 2), (), (X,), "sum"),)},
    ],
    ids=["used whole", "a result", "a maximum", "another dim", "another axis"],
)
def test_a_sum_that_has_to_stay(change: dict[str, Any]) -> None:
    before = graph(**change)
    assert reduce_scatter_chunks(before) == before
    assert on_graph(before).ops == before.ops


class Cut(nn.Module):
    """A matrix sharded over its input, whose sum is cut along a dim and put together again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.dim = dim


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 6), 0), ((2, 4, 6), 0), ((2, 4, 6), 1), ((1, 4, 6), 1), ((2, 4, 6), 2)]
)
def test_numbers_stay(shape: tuple[int, ...], dim: int) -> None:
    """Along any dim, with and without something before it."""
    model = Cut(dim).double()

    def sharded(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Cut)
        y = model.down(model.up(x).relu())
        y = ops.collect(ops.chunk(y, model.dim, "tp", 2).sin(), model.dim, "tp", 2)
        out: Tensor = y.square().mean()
        return out

    def full(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Cut)
        out: Tensor = model.down(model.up(x).relu()).sin().square().mean()
        return out

    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    job = capture(model, x, sharded, Parallel(tp=2), tp_plan={"up": "colwise", "down": "rowwise"})
    used = [op.collective.kind for o in job.stages[0].ops.values() for op in o if op.collective is not None]
    assert used.count("reduce_scatter") == 1
    expected = plain(copy.deepcopy(model), x, full)
    told, grads = step(job, model, x)
    assert torch.allclose(told, expected.loss, rtol=1e-12, atol=0)
    for name, want in expected.grads.items():
        assert want is not None
        assert torch.allclose(grads[name], want, rtol=1e-10, atol=1e-15)


def test_other_views_of_a_chunk_keep_the_all_reduce() -> None:
    half = TensorSpec((2, 6), "float32", (24, 1))
    cut = Op("half", "aten.select.int", (Ref("cut"), 1, 0), (), (half,), "sum")
    assert kinds(reduce_scatter_chunks(graph(users=(cut,)))) == ["all_reduce"]


ROWS, FULL = TensorSpec((8, 6), "float32"), TensorSpec((2, 4, 6), "float32")


def added_graph(
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
        Op("seen", "aten.view.default", (Ref("both"), FULL.shape), (), (FULL,), "both"),
        Op("again", "aten.add.Tensor", (Ref("seen"), Ref("batch/2")), (), (FULL,)),
        Op("cut", "axis.chunk", (Ref("again"), 1, "tp", 2), (), (HALF,), "again"),
        Op("y", "aten.relu.default", (Ref("cut"),), (), (TensorSpec((2, 2, 6), "float32"),)),
        *users,
    )
    given = {"batch/0": ROWS, "batch/1": other, "batch/2": FULL}
    return Graph(found, frozenset(("y", *roots, *(user.name for user in users))), given=given)


def test_each_is_cut_before_they_are_added() -> None:
    found = cut_before_adding(added_graph())
    made = {op.name: op for op in found.ops}
    assert made["sum"].outputs == made["done"].outputs == (FULL,)
    assert made["cut"].target == "aten.add.Tensor"
    chunks = [op for op in found.ops if op.target == "axis.chunk"]
    assert len(chunks) == 3
    assert all(op.outputs == (HALF,) for op in chunks)
    # In the order in which they were added, and on the side on which they waited.
    first, second = made["cut"].uses
    assert made[second].args[0] == Ref("batch/2")
    assert [made[name].uses[0] for name in made[first].uses] == [made[made[first].uses[0]].uses[0], "done"]
    known = {"batch/0", "batch/1", "batch/2"}
    for op in found.ops:
        assert known.issuperset(op.uses), "every op is after what it uses"
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
    before = added_graph(**change)
    assert cut_before_adding(before) == before
