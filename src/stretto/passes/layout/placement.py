"""How the ranks of one axis have a value, and what a view does to that.

    REPLICATED            every rank has all of it
    sharded(dim, blocks)  every rank has its equal slice of a dim, or of each of `blocks` equal blocks along it
    PARTIAL, HIGHEST      the value is the sum, or the maximum, of what ranks have
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stretto.ir.placement import cuts_at, where_cut
from stretto.ir.program import TensorSpec


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """dim, blocks: of what is sharded; reduction: of what is partial."""

    kind: Literal["replicated", "sharded", "partial"]
    dim: int = 0
    blocks: int = 1
    reduction: Literal["sum", "max"] = "sum"

    def __str__(self) -> str:
        if self.kind == "sharded":
            return f"sharded along dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")
        return "replicated" if self.kind == "replicated" else f"partial ({self.reduction})"

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"

    @property
    def is_partial(self) -> bool:
        return self.kind == "partial"


REPLICATED = AxisPlacement("replicated")
PARTIAL = AxisPlacement("partial")
HIGHEST = AxisPlacement("partial", reduction="max")


def sharded(dim: int, blocks: int = 1) -> AxisPlacement:
    return AxisPlacement("sharded", dim, blocks)


def fits(placement: AxisPlacement, shape: Sequence[int], size: int) -> bool:
    """Whether ranks can have equal slices."""
    if not placement.is_sharded:
        return True
    at = placement.dim
    return at < len(shape) and shape[at] > 0 and shape[at] % (placement.blocks * size) == 0


def local_shape(placement: AxisPlacement, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The shape that one rank has."""
    if not placement.is_sharded:
        return tuple(shape)
    return tuple(n // size if dim == placement.dim else n for dim, n in enumerate(shape))


def local_spec(placement: AxisPlacement, spec: TensorSpec, size: int) -> TensorSpec:
    """What one rank has of a parameter or a leaf."""
    if not placement.is_sharded:
        return spec
    return replace(spec, shape=local_shape(placement, spec.shape, size), stride=None)


def viewed(
    placement: AxisPlacement, before: Sequence[int], after: Sequence[int], size: int
) -> AxisPlacement | None:
    """The placement after a view; None where a slice is no slice of one dim any more."""
    if not placement.is_sharded:
        return placement
    inner = where_cut(before, placement.dim, placement.blocks)
    places = (sharded(dim, blocks) for dim, blocks in cuts_at(after, inner))
    return next((place for place in places if fits(place, after, size)), None)
