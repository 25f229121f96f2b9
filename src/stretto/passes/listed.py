"""Where a pass is in the one list of passes: each file of this room that has one says so in `LISTED`.

A new pass is a new file here, and nothing else names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.passes.graph import Graph
from stretto.passes.step import Pass

GraphPass = Callable[[Graph], Graph]


@dataclass(frozen=True, slots=True)
class OfGraph:
    """A pass of a captured graph, before there are stages. place: passes run in the order of their places."""

    place: int
    apply: GraphPass


@dataclass(frozen=True, slots=True)
class OfStep:
    """A pass of a step, where ranks and costs are known. place: as in `OfGraph`. tried: planning also tries
    steps without it, and takes the faster."""

    place: int
    apply: Pass
    tried: bool = False
