"""Layouts: which box of a tensor each rank of a mesh has. No device, no process group.

A layout is a mesh, as the ranks that are in it, and one placement for each of its axes. Dims are cut as
`torch.chunk` cuts, and as DTensor does: shards are of one size rounded up, the last ones are smaller or
empty. Several axes may cut one dim; they do so from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError

Region: TypeAlias = tuple[tuple[int, int], ...]
"""A box of a tensor: (start, stop) for each dim, in elements of the full tensor. () for a 0-d tensor."""

MeshRanks: TypeAlias = tuple[Any, ...]
"""Ranks as nested tuples, one level for each axis of the mesh: ((0, 1), (2, 3)) is a 2x2 mesh."""

COPYING_REDUCTIONS = ("avg", "max", "min")
"""Reductions of equal values that give that value again: each rank of such a Partial axis has it
replicated."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and how a tensor is placed on it.

    mesh_ranks: global ranks as nested tuples (lists are taken too); its shape is the mesh's shape.
    placements: one for each mesh axis: `Shard(dim)`, `Replicate()` or `Partial(reduction)`.
    Raises UsageError if the ranks are ragged, negative or repeated, or the placements do not fit the axes.
    """

    mesh_ranks: MeshRanks
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_ranks", _as_tuples(self.mesh_ranks))
        object.__setattr__(self, "placements", tuple(self.placements))
        try:
            if not self.mesh_shape:
                raise UsageError(
                    f"mesh ranks {self.mesh_ranks}: give nested tuples, such as ((0, 1), (2, 3))"
                )
        except ValueError:
            raise UsageError(f"mesh ranks {self.mesh_ranks} are ragged; give rows of one length") from None
        ranks = self.ranks
        if any(type(rank) is not int or rank < 0 for rank in ranks):
            raise UsageError(f"mesh {self.mesh_ranks}: its entries must be ranks, integers from 0")
        if not ranks or len(set(ranks)) != len(ranks):
            what = "repeats a rank" if ranks else "has no rank"
            raise UsageError(f"mesh {self.mesh_ranks} {what}; give each rank of the mesh once")
        if len(self.placements) != len(self.mesh_shape):
            raise UsageError(
                f"mesh of {len(self.mesh_shape)} axes {self.mesh_shape}, but {len(self.placements)} "
                f"placements {self.placements}; give one placement for each axis"
            )
        for placement in self.placements:
            if type(placement) not in (Shard, Replicate) and not isinstance(placement, Partial):
                raise UsageError(
                    f"placement {placement!r} is not understood; use Shard(dim), Replicate() or Partial()"
                )

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Number of ranks along each axis of the mesh."""
        return np.shape(self.mesh_ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, row by row."""
        return tuple(np.ravel(self.mesh_ranks).tolist())

    def region(self, shape: Sequence[int], rank: int) -> Region | None:
        """The box of a tensor of this shape that a rank has: (start, stop) for each dim.

        An empty shard has start equal to stop, at the dim's end. None: the rank is not on the mesh.
        A rank of a Partial axis has the box of a Replicate axis: its term of the sum is as large.
        Raises UsageError if a placement names a dim that the tensor does not have.
        """
        ranks = self.ranks
        if rank not in ranks:
            return None
        return self._region_at(shape, tuple(map(int, np.unravel_index(ranks.index(rank), self.mesh_shape))))

    def regions(self, shape: Sequence[int]) -> dict[int, Region]:
        """What each rank of the mesh has, ranks row by row; see `region`."""
        coordinates = product(*(range(size) for size in self.mesh_shape))
        return {rank: self._region_at(shape, where) for rank, where in zip(self.ranks, coordinates)}

    def _region_at(self, shape: Sequence[int], where: tuple[int, ...]) -> Region:
        box = [(0, size) for size in shape]
        for placement, size, along in zip(self.placements, self.mesh_shape, where):
            if not isinstance(placement, Shard):
                continue
            dim = sharded_dim(placement, shape)
            start, stop = box[dim]
            chunk = -(-(stop - start) // size)
            first, last = min(start + chunk * along, stop), min(start + chunk * (along + 1), stop)
            box[dim] = (first, last) if first < last else (shape[dim], shape[dim])
        return tuple(box)

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The mesh axes over which the tensor is yet to be reduced."""
        return tuple(i for i, placement in enumerate(self.placements) if isinstance(placement, Partial))

    def reduced(self, shape: Sequence[int]) -> Layout:
        """This layout with its Partial axes reduced: where a tensor goes before it leaves its mesh.

        A Partial axis becomes a shard of the largest dim that no axis cuts yet, so that the reduction is a
        reduce-scatter and each rank then sends a distinct tile; Replicate if no such dim has a row for each
        rank.
        """
        placements = list(self.placements)
        taken = {sharded_dim(p, shape) for p in placements if isinstance(p, Shard)}
        for axis in self.partial_axes:
            free = [d for d in range(len(shape)) if d not in taken and shape[d] >= self.mesh_shape[axis]]
            if free:
                dim = max(free, key=lambda d: (shape[d] % self.mesh_shape[axis] == 0, shape[d], -d))
                placements[axis] = Shard(dim)
                taken.add(dim)
            else:
                placements[axis] = Replicate()
        return Layout(self.mesh_ranks, tuple(placements))

    def zero_ranks(self) -> tuple[int, ...]:
        """Ranks that have zeros when a full value is laid out so: all but the first along a reduced axis.

        On a Partial axis of another reduction (avg, max, min) every rank has the value.
        Raises UsageError for reductions for which neither gives the value back.
        """
        reduced = []
        for axis in self.partial_axes:
            placement = self.placements[axis]
            assert isinstance(placement, Partial)
            if placement.reduce_op == "sum":
                reduced.append(axis)
            elif placement.reduce_op not in COPYING_REDUCTIONS:
                raise UsageError(
                    f"a value cannot be laid out as {placement!r} on mesh {self.mesh_ranks}: a rank's "
                    "term is known only for sum, avg, max and min; use Replicate() as the target"
                )
        coordinates = product(*(range(size) for size in self.mesh_shape))
        return tuple(
            rank for rank, where in zip(self.ranks, coordinates) if any(where[axis] for axis in reduced)
        )

    def __str__(self) -> str:
        kept = ", ".join(str(placement) for placement in self.placements)
        return f"[{kept}] on mesh {self.mesh_ranks}"


def region_shape(region: Region) -> tuple[int, ...]:
    """Sizes of a box, one for each dim."""
    return tuple(stop - start for start, stop in region)


def region_count(region: Region) -> int:
    """Elements in a box; 1 for the box () of a 0-d tensor, 0 for an empty one."""
    return math.prod(region_shape(region))


def intersect(a: Region, b: Region) -> Region | None:
    """The box that two boxes share; None if they share no element."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return both if all(start < stop for start, stop in both) else None


def sharded_dim(placement: Shard, shape: Sequence[int]) -> int:
    """The dim, from 0, that a placement cuts. Raises UsageError if the tensor does not have it."""
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise UsageError(
            f"{placement!r} of a tensor of shape {tuple(shape)}: it has no dim {placement.dim}; "
            f"use Replicate() or {f'a dim below {len(shape)}' if shape else 'nothing else: it has no dims'}"
        )
    return dim


def _as_tuples(ranks: Any) -> Any:
    return tuple(map(_as_tuples, ranks)) if isinstance(ranks, (list, tuple)) else ranks
