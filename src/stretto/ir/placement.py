"""How one value is placed on ranks, and where a slice lies among its elements (`stretto.ir.placements`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.ir.program import TensorSpec

Kind = Literal["equal", "part", "sum", "local"]


@dataclass(frozen=True, slots=True)
class Placement:
    """How one value is placed on ranks.

    at: of a part, (dim, blocks); several where they are the same slice of the elements.
    uniform: dims along which an equal value is the same everywhere: any slice of it is like any other.
    zero: nothing but zeros, which are as well a partial sum, a slice or a full value.
    unknown: made of full values by an op of an unknown library.
    or_sum: a part that is a partial sum where it was made of another of the slices that an operand may be.
    """

    kind: Kind
    at: tuple[tuple[int, int], ...] = ()
    uniform: frozenset[int] = frozenset()
    zero: bool = False
    unknown: bool = False
    or_sum: bool = False

    @property
    def is_full(self) -> bool:
        """Whether every rank has all of it, as far as is known."""
        return self.kind == "equal" or self == UNKNOWN

    def __str__(self) -> str:
        if self.kind != "part":
            return {"sum": "a partial sum of a sum", "equal": "full", "local": "a rank's own"}.get(
                self.kind, self.kind
            )
        dim, blocks = self.at[0]
        return f"sharded along dim {dim}" + (f" in {blocks} blocks" if blocks > 1 else "")


EQUAL = Placement("equal")
SUM = Placement("sum")
LOCAL = Placement("local")
UNKNOWN = Placement("local", unknown=True)


def of_whom(given: Sequence[Placement]) -> Placement:
    """What an op makes, where no one knows whether ranks make slices of it or the full value."""
    return UNKNOWN if all(p.is_full for p in given) else LOCAL


def part(dim: int, blocks: int = 1) -> Placement:
    return Placement("part", ((dim, blocks),))


class PlacementError(Exception):
    """The op has no placement for its result. The message says what is wrong, `fix` what would be right."""

    fix = "Gather what is sharded first"


class RefusedError(PlacementError):
    """Operands are not placed alike."""

    def __init__(self, what: str) -> None:
        super().__init__(f"has operands that ranks do not keep alike: {what}")


class NeedsEqualError(PlacementError):
    """The op would be right if these partial sums were summed before."""

    fix = "Sum it over the ranks first"

    def __init__(self, names: Sequence[str]) -> None:
        sums = ", ".join(dict.fromkeys(names))
        super().__init__(f"uses {sums} as a full value, of which every rank has only a partial sum")


class EqualReducedError(PlacementError):
    """A sum over ranks of what all of them have full: the value itself."""

    fix = "Use it as it is"

    def __init__(self, name: str) -> None:
        super().__init__(f"sums {name} over ranks, which all have it in full")


def where_cut(shape: Sequence[int], dim: int, blocks: int) -> int:
    """The number of elements behind which, within a rank's slice, the next rank's elements come."""
    return shape[dim] // blocks * math.prod(shape[dim + 1 :])


def cuts_at(shape: Sequence[int], inner: int) -> Iterator[tuple[int, int]]:
    """All (dim, blocks) that are the cut behind `inner` elements, the fewest blocks first."""
    result = []
    behind = 1
    for dim in reversed(range(len(shape))):
        if inner % behind == 0 and inner and shape[dim] % (inner // behind) == 0:
            result.append((shape[dim] // (inner // behind), dim))
        behind *= shape[dim]
    return ((dim, blocks) for blocks, dim in sorted(result))


def blocks_along(dim: int, given: Sequence[Placement], specs: Sequence[TensorSpec]) -> int | None:
    """Blocks of slices of one length, put behind one another along the dim in which they are cut."""
    lengths: dict[int, None] = {}
    for kept, spec in zip(given, specs, strict=True):
        lengths.update((spec.shape[dim] // blocks, None) for d, blocks in kept.at if d == dim)
    for length in lengths:
        total = 0
        for kept, spec in zip(given, specs, strict=True):
            n = spec.shape[dim]
            # What is the same all along it is as well so many slices.
            fits = (dim, n // length) in kept.at or kept.zero or dim in kept.uniform
            if n % length or not fits:
                break
            total += n // length
        else:
            return total
    return None


def is_thin(kept: Placement, shape: Sequence[int]) -> bool:
    """Whether a part may be a partial sum as well, as one that is one element, or one of each block."""
    return kept.or_sum or (kept.kind == "part" and any(shape[dim] == blocks for dim, blocks in kept.at))


def uniform_view(before: Sequence[int], after: Sequence[int], uniform: frozenset[int]) -> frozenset[int]:
    """The uniform dims in another shape: those made of uniform dims alone, and of one element where one
    was."""
    result: set[int] = set()
    spans = list(spans_of(before))
    for dim, (first, last) in enumerate(spans_of(after)):
        if first == last:
            here = [d for d, span in enumerate(spans) if span == (first, last)]
            fits = any(d in uniform for d in here)
        else:
            here = [d for d, (a, b) in enumerate(spans) if a < last and b > first and a != b]
            fits = all(d in uniform for d in here)
        if fits:
            result.add(dim)
    return frozenset(result)


def spans_of(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For each dim, how many rows there are of it and all before, without it and with it."""
    rows = 1
    for n in shape:
        yield rows, rows * n
        rows *= n
