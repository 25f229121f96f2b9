"""How the ranks of one axis have a value, and what a view does to that.

    REPLICATED            every rank has all of it
    sharded(dim, blocks)  every rank has its equal slice of a dim, or of each of `blocks` blocks along it
    PARTIAL, HIGHEST      the value is the sum, or the maximum, of what ranks have

Where `copies` consecutive ranks share a slice (a head of keys), they have it in full, or partial sums of it
(`adds`), or different slices of it along another dim (`within`). Where all ranks share the only head, they
have SHARED_SUM: partial sums as others, which all linear ops keep so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stretto.ir.placement import cuts_at, where_cut
from stretto.ir.program import TensorSpec


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """dim, blocks, copies, adds, within: of what is sharded; reduction: of what is partial."""

    kind: Literal["replicated", "sharded", "partial"]
    dim: int = 0
    blocks: int = 1
    reduction: Literal["sum", "max"] = "sum"
    copies: int = 1
    adds: bool = False
    within: int | None = None

    def __str__(self) -> str:
        if self.kind != "sharded":
            return "replicated" if self.kind == "replicated" else f"partial ({self.reduction})"
        blocks = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        shared = f", shared by {self.copies}" if self.copies > 1 else ""
        how = (
            f" along dim {self.within}"
            if self.within is not None
            else " as partial sums"
            if self.adds
            else ""
        )
        return f"sharded along dim {self.dim}{blocks}{shared}{how}"

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"

    @property
    def is_partial(self) -> bool:
        return self.kind == "partial"

    @property
    def is_sum(self) -> bool:
        return self.kind == "partial" and self.reduction == "sum"


REPLICATED = AxisPlacement("replicated")
PARTIAL = AxisPlacement("partial")
HIGHEST = AxisPlacement("partial", reduction="max")
SHARED_SUM = AxisPlacement("partial", adds=True)


def sharded(dim: int, blocks: int = 1) -> AxisPlacement:
    return AxisPlacement("sharded", dim, blocks)


def fits(placement: AxisPlacement, shape: Sequence[int], size: int) -> bool:
    """Whether ranks can have equal slices."""
    if not placement.is_sharded:
        return True
    at, within = placement.dim, placement.within
    if within is not None and (within >= len(shape) or shape[within] % placement.copies):
        return False
    parts = placement.blocks * (size // placement.copies)
    return at < len(shape) and shape[at] > 0 and shape[at] % parts == 0


def local_shape(placement: AxisPlacement, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The shape that one rank has."""
    if not placement.is_sharded:
        return tuple(shape)
    parts = {placement.dim: size // placement.copies}
    if placement.within is not None:
        parts[placement.within] = placement.copies
    return tuple(n // parts.get(dim, 1) for dim, n in enumerate(shape))


def local_spec(placement: AxisPlacement, spec: TensorSpec, size: int) -> TensorSpec:
    """What one rank has of a parameter or a leaf."""
    if not placement.is_sharded:
        return spec
    return replace(spec, shape=local_shape(placement, spec.shape, size), stride=None)


def viewed(
    placement: AxisPlacement, before: Sequence[int], after: Sequence[int], size: int
) -> AxisPlacement | None:
    """The placement after a view; None where a slice is no slice of one dim any more."""
    if not placement.is_sharded or tuple(before) == tuple(after):
        return placement
    if placement.within is not None:  # both dims become one, which is sharded as any
        if placement.within != placement.dim + 1:
            return None
        placement = sharded(placement.dim)
    inner = where_cut(before, placement.dim, placement.blocks)
    places = [replace(placement, dim=dim, blocks=blocks) for dim, blocks in cuts_at(after, inner)]
    fitting = next((place for place in places if fits(place, after, size)), None)
    if fitting is None and placement.copies == 1:
        return _in_two(after, inner, size)
    return fitting


def _in_two(shape: Sequence[int], inner: int, size: int) -> AxisPlacement | None:
    """Slices of what are two dims now, of which the first has fewer elements than ranks are."""
    for dim, n in enumerate(shape[:-1]):
        if math.prod(shape[dim:]) == inner and 1 < n < size and size % n == 0:
            place = replace(sharded(dim), copies=size // n, within=dim + 1)
            return place if fits(place, shape, size) else None
    return None


def in_one(placement: AxisPlacement, shape: Sequence[int]) -> tuple[AxisPlacement, tuple[int, ...]]:
    """A placement along two dims, and the shape of the full value, where these are one."""
    at = placement.dim
    return sharded(at), (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
