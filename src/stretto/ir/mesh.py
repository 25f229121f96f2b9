"""The mesh: how the ranks of a run are laid out over axes, and which ranks talk on a communicator.

Axes have the order of `stretto.ir.axes`, as far as there are any, the last fastest. A plan names a *pipeline
rank* by its pp coordinate alone: ranks that differ in other coordinates do equal work on other data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from stretto.ir.axes import PIPELINE


@dataclass(frozen=True, slots=True)
class Mesh:
    """sizes: (axis, size) outermost first; an axis that is not named has size 1."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.sizes)

    def size(self, axis: str) -> int:
        return dict(self.sizes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of a rank."""
        result: dict[str, int] = {}
        for axis, size in reversed(self.sizes):
            result[axis] = rank % size
            rank //= size
        return result

    def pp_rank(self, rank: int) -> int:
        """The pipeline rank at which a rank is."""
        return self.coordinates(rank)[PIPELINE]

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at coordinates; axes that are not named are at 0."""
        number = 0
        for axis, size in self.sizes:
            number = number * size + coordinates.get(axis, 0)
        return number

    def group(self, rank: int, axes: Sequence[str], first: Sequence[int]) -> tuple[int, ...] | None:
        """The ranks that share a communicator with `rank`: they have its coordinates on all axes but `axes`;
        on the first of these they are at one of `first`, in that order, on the others anywhere.

        None when `rank` itself is not among them.
        """
        here = self.coordinates(rank)
        if here.get(axes[0], 0) not in first:
            return None
        ranges = [tuple(first), *(range(self.size(axis)) for axis in axes[1:])]
        return tuple(self.rank({**here, **dict(zip(axes, at, strict=True))}) for at in product(*ranges))

    def groups(self, axes: Sequence[str], first: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """All groups of a communicator, each once, in the one order in which every rank makes them."""
        result = (self.group(rank, axes, first) for rank in range(self.world))
        return tuple(dict.fromkeys(group for group in result if group is not None))
