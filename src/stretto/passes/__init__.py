"""Passes: graph to graph, one file each, applied to a captured step before it is cut into stages.

All have one signature, `Graph -> Graph`, keep the numbers, and stand in one ordered list (`PASSES`), each
under its name.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.passes.graph import Graph
from stretto.passes.scatter import reduce_scatter_chunks

Pass = Callable[[Graph], Graph]

PASSES: dict[str, Pass] = {
    "reduce_scatter_chunks": reduce_scatter_chunks,
}
"""Name -> pass, in the order in which they run."""


def run_passes(graph: Graph) -> Graph:
    """The graph after all passes."""
    for apply in PASSES.values():
        graph = apply(graph)
    return graph


__all__ = ["PASSES", "Graph", "Pass", "run_passes"]
