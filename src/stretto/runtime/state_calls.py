"""Text of calls that change what lives over a step: frees, updates, and sums of squares for their norm."""

from __future__ import annotations

from collections.abc import Callable

from stretto.ir.program import FREE, Op
from stretto.ir.updates import SQUARES, UPDATE, clipped_by, updated


def state_call(op: Op, name: Callable[[str], str], read: Callable[[str], str]) -> str:
    """The line of a window's function (`runtime.generate`); "" for an op that is none of these. name: value
    -> the variable that it gets; read: value -> its variable."""
    if op.target == FREE:
        return f"hooks.free({op.writes!r})"
    if op.target == UPDATE:
        by = clipped_by(op)
        norm = "" if by is None else f", {read(by[0].name)}, {by[1]!r}"
        return f"hooks.update({tuple(gradient for gradient, _ in updated(op))!r}{norm})"
    return f"{name(op.name)} = hooks.squares({op.uses!r}, {op.args[1]})" if op.target == SQUARES else ""
