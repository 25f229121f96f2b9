"""One row an axis of the mesh: what is split over it, what must be summed over it, how ranks are numbered.

Rows are outermost first, and ranks are numbered with the last axis fastest, so that tensor-parallel peers
are neighbours (Megatron-LM's order, arXiv 2104.04473: they share a node).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal

from stretto.files.codec import Fits


class Sums(IntEnum):
    """Which gradients are partial sums along an axis. A gradient's sums come in this order."""

    PARTIAL = 0
    """Of parameters that name the axis in `Parameter.partial`."""
    TIED = 1
    """Of parameters of which several of its ranks have a copy."""
    ALL = 2
    """Of all but those that are sharded over it: each rank has other data."""


@dataclass(frozen=True, slots=True)
class Axis:
    """splits: what its ranks have different parts of; of all else they have equal copies."""

    name: str
    splits: Literal["stages", "batch", "sequence", "experts", "parameters"]
    sums: Sums


PP = Axis("pp", "stages", Sums.TIED)
DP = Axis("dp", "batch", Sums.ALL)
DP_SHARD = Axis("dp_shard", "batch", Sums.ALL)
CP = Axis("cp", "sequence", Sums.PARTIAL)
EP = Axis("ep", "experts", Sums.ALL)
TP = Axis("tp", "parameters", Sums.PARTIAL)

BY_NAME = {axis.name: axis for axis in (PP, DP, DP_SHARD, CP, EP, TP)}

AXES = tuple(BY_NAME)
"""All names, outermost first."""

OtherAxis = Annotated[str, Fits(lambda axis: axis in AXES[1:], f"an axis of {', '.join(AXES[1:])}")]
"""The name of one other than pp."""

PIPELINE = PP.name
"""Its coordinate is a rank's pipeline rank: other ranks of a pipeline rank do equal work on other data."""

TENSOR = TP.name
"""Along it, values are equal unless the program says otherwise."""

WITHIN = tuple(axis.name for axis in BY_NAME.values() if axis.sums is Sums.PARTIAL)
"""Axes whose ranks share every sample: along them, the program says which values differ."""


def sums_of(axis: str) -> Sums:
    """Which gradients are partial sums along an axis; along one that is not known, those that say so."""
    return BY_NAME[axis].sums if axis in BY_NAME else Sums.PARTIAL
