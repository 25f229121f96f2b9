"""Ops by what a layout does with them."""

from __future__ import annotations

from stretto.ir.op_names import COPIES, LINEAR_REDUCTIONS, SCALED, SUMS, names
from stretto.ir.placed_by_rule import VIEW_OPS

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
