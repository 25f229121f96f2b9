"""Slices that were gathered, and how views, permutations and copies put them in order
(`stretto.ir.placements`).

Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir.dims import dims_of, operands
from stretto.ir.placement import EQUAL, Factor, Placement, RefusedError
from stretto.ir.program import Op, TensorSpec

VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default"),
        *("unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "flatten.using_ints"),
        "view_as.default",
    )
)
"""The same elements in the same order in another shape."""


KEEP_ORDER = frozenset(("aten.clone.default", "aten._to_copy.default", "aten.contiguous.default"))


def stacked(spec: TensorSpec, dim: int, blocks: int, size: int) -> Placement:
    """What `size` ranks' slices along a dim are when they are gathered one behind another along dim 0."""
    home: list[Factor] = []
    now: list[tuple[Factor, ...]] = []
    ranks = (0, size)
    for d, n in enumerate(spec.shape):
        pieces: tuple[Factor, ...] = ((3 * d + 1, n),)
        if d == dim:
            pieces = ((3 * d + 1, blocks), (3 * d + 2, n // blocks))
            home += [pieces[0], ranks, pieces[1]]
        else:
            home += pieces
        now.append(pieces)
    now[0] = (ranks, *now[0])
    return Placement("stacked", home=tuple(home), now=tuple(now))


def ordered(op: Op, held: Placement, spec: TensorSpec) -> Placement:
    """What was gathered is put in order."""
    made = op.outputs[0]
    now: list[tuple[Factor, ...]] | None = None
    home = list(held.home)
    if held.kind == "stacked" and made is not None and len(operands(op)) == 1:
        if op.target in VIEW_OPS:
            now = _regrouped([f for dim in held.now for f in dim], made.shape, home)
        elif op.target in ("aten.permute.default", "aten.transpose.int"):
            rule = dims_of(op, [spec])
            assert rule is not None
            now = [held.now[label] for label in rule.outputs[0] if label is not None]
        elif op.target in KEEP_ORDER:
            now = list(held.now)
    if now is None:
        raise RefusedError("a gathered value is used before its slices are in order", operands(op))
    if [f for dim in now for f in dim if f[1] != 1] == [f for f in home if f[1] != 1]:
        return EQUAL
    return Placement("stacked", home=tuple(home), now=tuple(now))


def _regrouped(
    factors: list[Factor], shape: Sequence[int], home: list[Factor]
) -> list[tuple[Factor, ...]] | None:
    """The factors, in their order, as dims of another shape; cut where they must be, in `home` as well."""
    left = [f for f in factors if f[1] != 1]
    fresh = 1000 + len(home)
    dims: list[tuple[Factor, ...]] = []
    for n in shape:
        taken: list[Factor] = []
        while n > 1:
            if not left:
                return None
            number, size = left.pop(0)
            if n % size == 0:
                taken.append((number, size))
                n //= size
                continue
            if size % n:
                return None
            first, second = (fresh, n), (fresh + 1, size // n)
            fresh += 2
            at = home.index((number, size))
            home[at : at + 1] = [first, second]
            taken.append(first)
            left.insert(0, second)
            n = 1
        dims.append(tuple(taken))
    return dims if not left else None
