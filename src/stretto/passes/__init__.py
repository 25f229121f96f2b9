"""Passes, one file each, in one ordered list.

Those of a captured graph (`GRAPH_PASSES`) are `Graph -> Graph`, keep the numbers, and run before the graph is
cut into stages. Those of a step (`STEP_PASSES`) are `Step, Context -> Step`; planning runs them where ranks
and costs are known (`stretto.planning.variants`). A pass has its function's name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from importlib import import_module

from stretto.errors import UsageError
from stretto.passes.graph import Graph
from stretto.passes.listed import GraphPass, OfGraph, OfStep


def _listed() -> list[OfGraph | OfStep]:
    """What the files of this room list, in order."""
    modules = (import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    found = [getattr(module, "LISTED", None) for module in modules]
    return sorted((one for one in found if isinstance(one, OfGraph | OfStep)), key=lambda one: one.place)


_ALL = _listed()

GRAPH_PASSES: dict[str, GraphPass] = {
    one.apply.__name__: one.apply for one in _ALL if isinstance(one, OfGraph)
}
"""Name -> pass, in the order in which they run."""

STEP_PASSES = tuple(one for one in _ALL if isinstance(one, OfStep))
"""In the order in which they run."""

SCATTER_BORDERS = "scatter_borders"
"""The name of what is done to a step that has its stages (`capture.borders`); it can be left out, too."""

MESSAGES_IN_PARTS = "messages_in_parts"
"""The name of what planning does to messages (`passes.messages_in_parts`), likewise."""


def check_names(names: Collection[str]) -> None:
    """Raises UsageError for a name that no pass has that can be left out."""
    known = (*GRAPH_PASSES, SCATTER_BORDERS, MESSAGES_IN_PARTS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"skip_passes names {', '.join(map(repr, unknown))}, which no pass is called: "
            f"the passes are {', '.join(known)}"
        )


def run_passes(graph: Graph, skip: Collection[str] = ()) -> Graph:
    """The graph after all passes but those in `skip`. Raises UsageError for a name that no pass has."""
    check_names(skip)
    for name, apply in GRAPH_PASSES.items():
        if name not in skip:
            graph = apply(graph)
    return graph


__all__ = [
    "GRAPH_PASSES",
    "MESSAGES_IN_PARTS",
    "SCATTER_BORDERS",
    "STEP_PASSES",
    "Graph",
    "check_names",
    "run_passes",
]
