"""Passes: graph to graph, one file each, applied to a captured step before it is cut into stages.

All have one signature, `Graph -> Graph`, keep the numbers, and stand in one ordered list (`PASSES`), each
under its name, by which it can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stretto.errors import UsageError
from stretto.passes.dead_ops import dead_ops
from stretto.passes.equal_collectives import equal_collectives
from stretto.passes.graph import Graph
from stretto.passes.no_ops import no_ops
from stretto.passes.plain_matmul import plain_matmuls
from stretto.passes.scatter import reduce_scatter_chunks
from stretto.passes.sequence_first import sequence_first

Pass = Callable[[Graph], Graph]

PASSES: dict[str, Pass] = {
    "dead_ops": dead_ops,
    "plain_matmuls": plain_matmuls,
    "reduce_scatter_chunks": reduce_scatter_chunks,
    "sequence_first": sequence_first,
    "no_ops": no_ops,
    "equal_collectives": equal_collectives,
}
"""Name -> pass, in the order in which they run."""

SCATTER_BORDERS = "scatter_borders"
"""The name of what is done to a step that has its stages (`capture.borders`); it can be left out, too."""

MESSAGES_IN_PARTS = "messages_in_parts"
"""The name of what planning does to messages (`passes.messages_in_parts`), likewise."""


def check_names(names: Collection[str]) -> None:
    """Raises UsageError for a name that no pass has."""
    known = (*PASSES, SCATTER_BORDERS, MESSAGES_IN_PARTS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"skip_passes names {', '.join(map(repr, unknown))}, which no pass is called: "
            f"the passes are {', '.join(known)}"
        )


def run_passes(graph: Graph, skip: Collection[str] = ()) -> Graph:
    """The graph after all passes but those in `skip`. Raises UsageError for a name that no pass has."""
    check_names(skip)
    for name, apply in PASSES.items():
        if name not in skip:
            graph = apply(graph)
    return graph


__all__ = ["MESSAGES_IN_PARTS", "PASSES", "SCATTER_BORDERS", "Graph", "Pass", "check_names", "run_passes"]
