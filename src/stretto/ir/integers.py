"""What an integer tensor says to the op that reads it: which rows of another operand, or where groups of rows
end. What is made up in its place must say the like, else the op does other work than in a step.

Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stretto.ir.dims import GROUPED, OVER_ROWS
from stretto.ir.program import Op, Ref, TensorSpec

ROWS_OF = {"aten.embedding.default": (0, 1, 0)}
"""Op -> its argument with the rows, that which names them, and the dim."""

ALONG = (
    *("aten.gather.default", "aten.index_select.default", "aten.scatter.src", "aten.scatter.value"),
    *("aten.scatter_add.default", "aten.index_add.default"),
)
"""Ops whose second argument is the dim along which the third names rows of the first."""

INDEXED = ("aten.index.Tensor", "aten.index_put.default", "aten._unsafe_index.Tensor")
"""Ops whose second argument has an index, or none, for each dim of the first."""

EMBEDDING_BACKWARD = "aten.embedding_dense_backward.default"


@dataclass(frozen=True, slots=True)
class Says:
    """rows: the integers are below it; or, of `ends`, rows are shared out to as many groups as it has
    elements, and it says where each ends."""

    rows: int
    ends: bool = False


def what_integers_say(op: Op, specs: Mapping[str, TensorSpec]) -> dict[str, Says]:
    """Of the integers that an op reads, by name, what they say; none that are not known."""
    return {
        name: says
        for name, says in _said(op, specs)
        if name in specs and specs[name].dtype.startswith("int") and says.rows > 0
    }


def _said(op: Op, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Says]]:
    args = op.args

    def size(at: int, dim: int) -> int:
        held = args[at]
        shape = specs[held.name].shape if isinstance(held, Ref) and held.name in specs else ()
        return shape[dim] if -len(shape) <= dim < len(shape) else 0

    def named(at: int) -> str:
        held = args[at] if at < len(args) else None
        return held.name if isinstance(held, Ref) else ""

    if op.target in ROWS_OF:
        held, at, dim = ROWS_OF[op.target]
        yield named(at), Says(size(held, dim))
    elif op.target == EMBEDDING_BACKWARD:
        if isinstance(args[2], int):
            yield named(1), Says(args[2])
    elif op.target in ALONG:
        if isinstance(args[1], int):
            yield named(2), Says(size(0, args[1]))
    elif op.target in INDEXED:
        for dim, index in enumerate(args[1] if isinstance(args[1], tuple) else ()):
            if isinstance(index, Ref):
                yield index.name, Says(size(0, dim))
    elif op.target in GROUPED:
        # Where the second has no groups of its own, they are of the inner dim, the first's last but in ours.
        held = args[1]
        grouped = isinstance(held, Ref) and held.name in specs and len(specs[held.name].shape) == 3
        yield named(2), Says(size(0, 0 if grouped or op.target == OVER_ROWS else 1), ends=True)
