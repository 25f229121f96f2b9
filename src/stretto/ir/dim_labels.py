"""Labels of dims: what a rule for an op says, and the words in which it says it (`stretto.ir.dims`).

Touches `stretto.ir.program` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.ir.program import Op, TensorSpec, refs

Labels = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Dims:
    """One op's rule. inputs: labels of the operands' dims, in the order of `operands`; outputs: of results.

    linear: sets of positions of operands. added: positions of operands that are added to the sum over
    `summed` labels (the bias of `addmm`): where that is a sum over ranks, they would be counted by each.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    whole: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    added: frozenset[int] = frozenset()


SUMMED = "summed"
"""In place of a result's dim: each rank has an addend of it."""


def results_along(rule: Dims, label: int) -> tuple[int | str | None, ...] | None:
    """Which dim of each result is cut where operands are cut along a label, or `SUMMED`; None: none, of what
    a kernel notes for its backward. Without an answer, results from parts are no parts of the result."""
    result: list[int | str | None] = []
    for out in rule.outputs:
        if label in out:
            result.append(out.index(label))
        elif label in rule.summed:
            result.append(SUMMED)
        elif len(rule.outputs) > 1 and all(of is None for of in out):
            result.append(None)
        else:
            return None
    return tuple(result)


def operands(op: Op) -> tuple[str, ...]:
    """Names of the values that an op reads, in order, as often as it reads them."""
    return (*refs(op.args), *refs(tuple(value for _, value in op.kwargs)))


def each(*positions: int) -> tuple[frozenset[int], ...]:
    """Linear in each of these operands by itself."""
    return tuple(frozenset((at,)) for at in positions)


def together(count: int) -> tuple[frozenset[int], ...]:
    """Linear in all operands together (a sum)."""
    return (frozenset(range(count)),)


def labels_of(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def dim_of(value: object, count: int) -> int:
    return int(value) % max(count, 1)  # type: ignore[call-overload, no-any-return]


def broadcast(spec: TensorSpec, shape: Sequence[int]) -> Labels:
    """Labels of an operand of an op with broadcasting, whose result has dims 0, 1, 2..."""
    skipped = len(shape) - len(spec.shape)
    return tuple(
        None if n == 1 and shape[skipped + d] != 1 else skipped + d for d, n in enumerate(spec.shape)
    )
