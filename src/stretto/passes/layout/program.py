"""A step as layout passes read and write it, and ops by what a layout does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.ir.flow import is_external
from stretto.ir.op_names import COPIES, LINEAR_REDUCTIONS, SCALED, SUMS, names
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import Op, TensorSpec
from stretto.passes.rewrite import with_uses

SAME_DATA = VIEW_OPS | names("t transpose.int permute alias detach expand")
"""The same elements in other shapes and orders, without a copy."""

KEEP_PARTIAL = (
    SAME_DATA
    | COPIES
    | SUMS
    | SCALED
    | LINEAR_REDUCTIONS
    | names("slice_backward slice.Tensor select.int cat div.Tensor")
)
"""Linear ops behind which a sum over ranks may as well be taken: they make what is summed no larger, or are
where partial sums meet."""

SIZE_AT = {
    "aten.view.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.reshape.default": 1,
    "aten.expand.default": 1,
    "aten.slice_backward.default": 1,
    "aten.select_backward.default": 1,
}
"""Position of the argument that is the shape of the result."""

LIKE = names("zeros_like ones_like empty_like full_like")
"""A number everywhere, in the shape of the operand."""

NEW = names("new_zeros new_ones new_empty new_full new_empty_strided")
"""A number everywhere, in a shape of its own."""

ZEROS = names("new_zeros zeros_like zeros")
"""Which may as well be what a rank adds to a sum."""


class Origin(NamedTuple):
    """segment: of the forward's execution, None for gradient reductions; backward: whether it is of that."""

    segment: int | None
    backward: bool


@dataclass(frozen=True, slots=True)
class StepProgram:
    """ops: with their origins. given: what no op makes -> spec. roots: what is needed -> its value:
    "loss", "grad/<parameter>", "update/<buffer>", "seen/<number>". ties: parameter -> the first name of its
    tensor."""

    ops: tuple[tuple[Op, Origin], ...]
    given: Mapping[str, TensorSpec]
    roots: Mapping[str, str]
    ties: Mapping[str, str]

    def with_ops(self, ops: Iterable[tuple[Op, Origin]], now: Callable[[str], str]) -> StepProgram:
        """Other ops. now: what a root's value is called in them."""
        roots = {root: now(value) for root, value in self.roots.items()}
        return replace(self, ops=tuple(ops), roots=roots)


def with_equal_views_once(program: StepProgram) -> StepProgram:
    """Views of one value that are equal become one, which is gathered once for all that read it: those of
    modules side by side, so that no stage sends one to another, and not one of the forward for the backward,
    for which it would be kept."""
    first: dict[tuple[object, ...], str] = {}
    gone: dict[str, str] = {}

    def now(name: str) -> str:
        return gone.get(name, name)

    ops: list[tuple[Op, Origin]] = []
    for op, origin in program.ops:
        op = with_uses(op, now)
        if op.target in SAME_DATA and not is_external(op.uses[0]):
            beside = op.module.rpartition(".")[0]
            key = (op.target, repr(op.args), repr(op.kwargs), origin.backward, beside)
            if key in first:
                gone[op.name] = first[key]
                continue
            first[key] = op.name
        ops.append((op, origin))
    return program.with_ops(ops, now)
