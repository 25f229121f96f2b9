"""Rules that read a rank's coordinate: rows of a sharded table, and one of a sharded dim.

Each rank looks up what is in its own rows and gives zeros for the rest; the sum over ranks is the value. They
are the ops by which `verify` knows lookups in a rank's own rows (`stretto.ir.placed_by_rule`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stretto.ir.program import INDEX, Const, Op, Ref
from stretto.passes.layout.emit import Emitter
from stretto.passes.layout.placement import PARTIAL, REPLICATED, sharded
from stretto.passes.layout.rules import Choice, OpGiven, Rule


def own_rows(out: Emitter, index: str, rows: int) -> tuple[str, str]:
    """Of indices into all rows: those into the rank's own, 0 for others; and which are of others."""
    rank = out.emit(INDEX, out.axis, out.size, name=f"{index}_rank")
    first = out.emit("aten.mul.Tensor", Ref(rank), rows, name=f"{index}_first")
    local = out.emit("aten.sub.Tensor", Ref(index), Ref(first), name=f"{index}_local")
    elsewhere = outside(out, local, rows)
    own = out.emit("aten.masked_fill.Scalar", Ref(local), Ref(elsewhere), 0, name=f"{index}_own")
    return own, elsewhere


def outside(out: Emitter, index: str, rows: int) -> str:
    """Which indices are of none of so many rows."""
    below = out.emit("aten.lt.Scalar", Ref(index), 0, name=f"{index}_below")
    above = out.emit("aten.ge.Scalar", Ref(index), rows, name=f"{index}_above")
    return out.emit("aten.bitwise_or.Tensor", Ref(below), Ref(above), name=f"{index}_outside")


def _wide(out: Emitter, mask: str) -> str:
    return out.emit("aten.unsqueeze.default", Ref(mask), -1, name=f"{mask}_wide")


def _embedding(op: Op, given: OpGiven) -> Iterator[Choice]:
    """NaN for tokens that are not in the vocabulary, which the full table would refuse."""
    if given.first != sharded(0):
        return
    made, full_rows = op.outputs[0], given.specs[0].shape[0]
    assert made is not None

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        table, index = local
        own, elsewhere = own_rows(out, index, out.specs[table].shape[0])
        rows = out.emit(op.target, Ref(table), Ref(own), name=f"{op.name}_rows", flops=op.flops)
        unknown = _wide(out, outside(out, index, full_rows))
        dtype = {"dtype": Const("dtype", made.dtype)}
        zeros = out.emit("aten.zeros_like.default", Ref(unknown), name=f"{op.name}_zeros", kwargs=dtype)
        fill = out.emit("aten.masked_fill.Scalar", Ref(zeros), Ref(unknown), math.nan, name=f"{op.name}_fill")
        wide = _wide(out, elsewhere)
        return (out.emit("aten.where.self", Ref(wide), Ref(fill), Ref(rows), name=op.name),)

    yield Choice((sharded(0), REPLICATED), (PARTIAL,), emit, at_once=True)


def _embedding_backward(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Each rank adds up the gradients of its own rows; the padding token's row never learns."""
    made = op.outputs[0]
    by_frequency = len(op.args) > 4 and op.args[4]
    if made is None or by_frequency or given.wanted != sharded(0):
        return
    rows, padding = made.shape[0] // given.size, int(op.args[3])

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        grad, index = local
        own, elsewhere = own_rows(out, index, rows)
        if padding >= 0:
            pads = out.emit("aten.eq.Scalar", Ref(index), padding, name=f"{index}_pads")
            elsewhere = out.emit(
                "aten.bitwise_or.Tensor", Ref(elsewhere), Ref(pads), name=f"{index}_unlearned"
            )
        wide = _wide(out, elsewhere)
        mine = out.emit("aten.masked_fill.Scalar", Ref(grad), Ref(wide), 0.0, name=f"{op.name}_own")
        return (out.emit(op.target, Ref(mine), Ref(own), rows, -1, *op.args[4:], name=op.name),)

    yield Choice((REPLICATED, REPLICATED), (sharded(0),), emit)


def _gather(op: Op, given: OpGiven) -> Iterator[Choice]:
    dim = op.args[1] % max(len(given.specs[0].shape), 1)
    if given.first != sharded(dim):
        return

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        own, elsewhere = own_rows(out, local[1], out.specs[local[0]].shape[dim])
        found = out.emit(op.target, Ref(local[0]), dim, Ref(own), name=f"{op.name}_own")
        return (out.emit("aten.masked_fill.Scalar", Ref(found), Ref(elsewhere), 0.0, name=op.name),)

    yield Choice((sharded(dim), REPLICATED), (PARTIAL,), emit, at_once=True)


def _scatter_add(op: Op, given: OpGiven) -> Iterator[Choice]:
    dim = op.args[1] % max(len(given.specs[0].shape), 1)
    if given.first != sharded(dim):
        return

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        own, elsewhere = own_rows(out, local[1], out.specs[local[0]].shape[dim])
        mine = out.emit(
            "aten.masked_fill.Scalar", Ref(local[2]), Ref(elsewhere), 0.0, name=f"{op.name}_source"
        )
        return (out.emit(op.target, Ref(local[0]), dim, Ref(own), Ref(mine), name=op.name),)

    yield Choice((sharded(dim), REPLICATED, REPLICATED), (sharded(dim),), emit)


LOOKUPS: dict[str, Rule] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.gather.default": _gather,
    "aten.scatter_add.default": _scatter_add,
}
