"""What an integer tensor says to the op that reads it: which rows of another operand, or where groups of rows
end. What is made up in its place must do the same, else the op does other work than in a step. And which
leaves of a batch name rows of an embedding, or classes of a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stretto.ir.action import Phase
from stretto.ir.dims import GROUPED, OVER_ROWS
from stretto.ir.op_names import LIKELIHOODS
from stretto.ir.prices import specs_of
from stretto.ir.program import Job, Op, Ref, TensorSpec

EMBEDDING = "aten.embedding.default"
"""(weight, indices, ...)"""

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

    if op.target == EMBEDDING:
        yield named(1), Says(size(0, 0))
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


PASSED = ("aten._to_copy.default", "aten.clone.default")


@dataclass(frozen=True, slots=True)
class NumbersRead:
    """leaf: of the batch; value, ops: what is read of it, and how it is made; count: numbers from 0 on that
    are in range; ignored: one more that is; what: it is, in words."""

    leaf: str
    value: str
    ops: tuple[Op, ...]
    count: int
    ignored: int | None
    what: str


def numbers_read(job: Job) -> list[NumbersRead]:
    """Where ops of the forward read rows of an embedding, or labels of a cross-entropy, off the batch, with
    views and casts alone between."""
    made = {op.name: op for stage in job.stages for op in stage.ops[Phase.F]}
    specs = specs_of(job)
    result: list[NumbersRead] = []
    for op in made.values():
        if op.target not in (EMBEDDING, *LIKELIHOODS) or not all(isinstance(arg, Ref) for arg in op.args[:2]):
            continue
        shape = specs[op.args[0].name].shape
        count, ignored, what = shape[0], None, f"the embedding {op.module!r} has {shape[0]} rows"
        if op.target != EMBEDDING:
            count = shape[min(1, len(shape) - 1)]
            ignored, what = op.args[4], f"the loss is over {count} classes"
        chain: list[Op] = []
        name = op.args[1].name
        while name in made and len(made[name].uses) == 1:
            if made[name].alias is None and made[name].target not in PASSED:
                break
            chain.append(made[name])
            name = made[name].uses[0]
        kind, _, leaf = name.partition("/")
        if kind == "batch":
            result.append(NumbersRead(leaf, op.args[1].name, tuple(chain[::-1]), count, ignored, what))
    return result


def rows_named(job: Job) -> dict[str, int]:
    """Leaf of the batch -> the fewest numbers that are in range where it is read, for leaves that are."""
    uses = sorted(numbers_read(job), key=lambda use: -use.count)
    return {use.leaf: use.count for use in uses}
