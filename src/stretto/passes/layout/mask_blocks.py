"""Which blocks of queries see nothing of which blocks of keys, for a mask that the step makes of positions.

Each value is bounded on a block, from the ranges of positions there (interval arithmetic: Moore 1966). What
comes of the batch, or by an op without a rule, may be anything: that hides nothing, and takes nothing from
what positions hide. So a causal mask hides what is behind the diagonal, whatever documents or padding it is
joined with, and a sliding window what is before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import Arg, Op, Ref, TensorSpec
from stretto.passes.layout.ahead import Ahead

Bounds = tuple[float, float]
"""The least and the largest of some elements; of bools, 0 and 1."""

Region = tuple[tuple[int, int], ...]
"""Of each dim, from where to where."""

ANYTHING, A_BOOL = (-math.inf, math.inf), (0.0, 1.0)


def blocks_seen(ahead: Ahead, mask: str, rows: int, columns: int) -> frozenset[tuple[int, int]]:
    """(block of queries, block of keys) where a mask may let one see another. rows, columns: how many. Blocks
    that are alike are looked at together."""
    spec = ahead.spec(mask)
    assert spec is not None
    known, start = _Positions(ahead), tuple((0, n) for n in spec.shape[:-2])
    result: set[tuple[int, int]] = set()
    todo = [((0, rows), (0, columns))]

    def elements(of: tuple[int, int], dim: int, count: int) -> tuple[int, int]:
        size = spec.shape[dim]
        return (0, 1) if size == 1 else (size * of[0] // count, size * of[1] // count)

    while todo:
        of_rows, of_columns = todo.pop()
        region = (*start, elements(of_rows, -2, rows), elements(of_columns, -1, columns))
        least, most = known.bounds(mask, region)
        if most == -math.inf:
            continue
        parts = [*product(_halves(of_rows), _halves(of_columns))]
        if least > -math.inf or len(parts) == 1:
            result.update(product(range(*of_rows), range(*of_columns)))
        else:
            todo += parts
    return frozenset(result)


def _halves(of: tuple[int, int]) -> list[tuple[int, int]]:
    middle = sum(of) // 2
    return [of] if middle == of[0] else [(of[0], middle), (middle, of[1])]


@dataclass(frozen=True, slots=True)
class _Positions:
    ahead: Ahead

    def bounds(self, name: str, region: Region) -> Bounds:
        op, spec = self.ahead.made.get(name), self.ahead.spec(name)
        found = ANYTHING if op is None or spec is None else self._of(op, spec, region)
        if spec is not None and spec.dtype == "bool":
            return found if found[0] >= 0 and found[1] <= 1 else A_BOOL
        return ANYTHING if any(map(math.isnan, found)) else found

    def _of(self, op: Op, spec: TensorSpec, region: Region) -> Bounds:
        kind = op.target.split(".")[1].replace("logical_", "bitwise_")
        if kind == "arange":
            first, step = (op.args[0] if len(op.args) > 1 else 0), (op.args[2] if len(op.args) > 2 else 1)
            ends = [first + step * at for at in (region[0][0], region[0][1] - 1)]
            return min(ends), max(ends)
        if kind in FILLED:
            value = FILLED[kind]
            return self._given(op.args[int(value)], region) if isinstance(value, str) else (value, value)
        if kind in ("tril", "triu"):
            return self._triangle(op, region)
        if kind == "expand":
            return self._given(op.args[0], region)
        if kind == "slice" and len(op.args) == 4:
            dim, start, _ = op.args[1:]
            moved = ((a + start, b + start) if d == dim else (a, b) for d, (a, b) in enumerate(region))
            return self.bounds(op.args[0].name, tuple(moved))
        if op.target in VIEW_OPS:
            return self._view(op, spec, region)
        if kind in ("_to_copy", "clone", "alias"):
            return self._copy(op, spec, self._given(op.args[0], region))
        if kind in RULES and not op.kwargs and (spec.dtype == "bool" or not kind.startswith("bitwise_")):
            return RULES[kind](*(self._given(arg, region) for arg in op.args))
        return ANYTHING

    def _given(self, arg: Arg, region: Region) -> Bounds:
        """What an operand is there, of which dims of one are broadcast."""
        if not isinstance(arg, Ref):
            return (float(arg), float(arg)) if isinstance(arg, (int, float)) else ANYTHING
        spec = self.ahead.spec(arg.name)
        if spec is None:
            return ANYTHING
        last = region[len(region) - len(spec.shape) :]
        own = ((0, 1) if n == 1 else at for n, at in zip(spec.shape, last, strict=True))
        return self.bounds(arg.name, tuple(own))

    def _view(self, op: Op, spec: TensorSpec, region: Region) -> Bounds:
        """Where dims of one come and go."""
        source = self.ahead.spec(op.args[0].name)
        wide = [at for n, at in zip(spec.shape, region, strict=True) if n != 1]
        if source is None or [n for n in source.shape if n != 1] != [n for n in spec.shape if n != 1]:
            return ANYTHING
        return self.bounds(op.args[0].name, tuple((0, 1) if n == 1 else wide.pop(0) for n in source.shape))

    def _copy(self, op: Op, spec: TensorSpec, given: Bounds) -> Bounds:
        """Another dtype may round what is no 0, 1 or infinite."""
        source = self.ahead.spec(op.args[0].name)
        same = source is not None and source.dtype == spec.dtype
        return given if same or {*given} <= {-math.inf, 0, 1, math.inf} else ANYTHING

    def _triangle(self, op: Op, region: Region) -> Bounds:
        """Of what is above the diagonal, or below it, nothing is left."""
        (top, bottom), (left, right) = region[-2:]
        diagonal = op.args[1] if len(op.args) > 1 else 0
        low, high = left - (bottom - 1) - diagonal, right - 1 - top - diagonal
        if op.target.startswith("aten.triu"):
            low, high = -high, -low
        if low > 0:
            return 0, 0
        least, most = self._given(op.args[0], region)
        return (least, most) if high <= 0 else (min(least, 0), max(most, 0))


def _less(a: Bounds, b: Bounds) -> Bounds:
    return float(a[1] < b[0]), float(a[0] < b[1])


def _at_most(a: Bounds, b: Bounds) -> Bounds:
    return float(a[1] <= b[0]), float(a[0] <= b[1])


def _equal(a: Bounds, b: Bounds) -> Bounds:
    return float(a[0] == a[1] == b[0] == b[1]), float(a[0] <= b[1] and b[0] <= a[1])


def _not(a: Bounds) -> Bounds:
    return 1 - a[1], 1 - a[0]


def _where(of: Bounds, a: Bounds, b: Bounds) -> Bounds:
    if of[0] == of[1]:
        return a if of[0] else b
    return min(a[0], b[0]), max(a[1], b[1])


FILLED: Mapping[str, str | int] = {
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("full", "full_like"), "1"),
    "scalar_tensor": "0",
    "new_full": "2",
}
"""The value of all elements, or, as text, which argument that is."""

RULES: Mapping[str, Callable[..., Bounds]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "le": _at_most,
    "ge": lambda a, b: _at_most(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "bitwise_and": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "bitwise_or": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "bitwise_not": _not,
    "where": _where,
    "masked_fill": lambda x, of, value: _where(of, value, x),
}
"""By what an op is called; of bools alone where bits are."""
