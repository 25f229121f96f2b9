"""What an integer tensor says to the op that reads it: which rows of another operand, or where groups of rows
end. What is made up in its place must do the same, else the op does other work than in a step. And which
leaves of a batch name rows of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stretto.ir.action import Phase
from stretto.ir.dims import GROUPED, OVER_ROWS
from stretto.ir.program import Job, Op, Ref, TensorSpec

ROWS_OF = {"aten.embedding.default": (0, 1, 0)}
"""Op -> its argument with the rows, the one that names them, and the dim."""

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
        kept = args[at]
        shape = specs[kept.name].shape if isinstance(kept, Ref) and kept.name in specs else ()
        return shape[dim] if -len(shape) <= dim < len(shape) else 0

    def named(at: int) -> str:
        kept = args[at] if at < len(args) else None
        return kept.name if isinstance(kept, Ref) else ""

    if op.target in ROWS_OF:
        kept, at, dim = ROWS_OF[op.target]
        yield named(at), Says(size(kept, dim))
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
        kept = args[1]
        grouped = isinstance(kept, Ref) and kept.name in specs and len(specs[kept.name].shape) == 3
        yield named(2), Says(size(0, 0 if grouped or op.target == OVER_ROWS else 1), ends=True)


EMBEDDING = "aten.embedding.default"

OTHER_NUMBERS = ("cumsum", "cumprod", "add", "mul", "arange")
"""Ops after which an integer is no row of an embedding any more: positions are counted from masks so."""


def rows_named(job: Job) -> dict[str, int]:
    """Leaf of the batch -> the rows of the smallest embedding that it picks from (on one rank), for leaves
    that pick from any."""
    shapes = {f"param/{p.name}": p.spec.shape for p in job.parameters}
    leaf_of: dict[str, str] = {f"batch/{name}": name for name, _ in job.batch}
    result: dict[str, int] = {}
    # A leaf is shifted and cut in the stage that picks, or its part arrives from an earlier one.
    for stage in job.stages:
        for op in stage.ops[Phase.F]:
            if op.target == EMBEDDING and len(op.args) > 1:
                weight, index = op.args[0], op.args[1]
                if isinstance(weight, Ref) and isinstance(index, Ref) and index.name in leaf_of:
                    rows = shapes.get(weight.name, (2,))[0]
                    leaf = leaf_of[index.name]
                    result[leaf] = min(result.get(leaf, rows), rows)
            elif _still_rows(op, leaf_of):
                leaf_of[op.name] = next(leaf_of[name] for name in op.uses if name in leaf_of)
    return result


def _still_rows(op: Op, leaf_of: Mapping[str, str]) -> bool:
    """Whether the op's result has numbers of rows as one of its arguments does."""
    made = op.outputs[0] if len(op.outputs) == 1 else None
    if made is None or not made.dtype.startswith("int"):
        return False
    name = op.target.split(".")[1] if "." in op.target else op.target
    return name not in OTHER_NUMBERS and any(used in leaf_of for used in op.uses)
