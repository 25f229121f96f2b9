"""Ops that nothing needs are dropped: no root (loss, gradient, update) can be reached from them.

A random op may go as well: draws depend on the names of ops alone, so those that stay draw what they drew.

    1. From the roots backwards, mark what is used. The rest goes.
"""

from __future__ import annotations

from stretto.passes.graph import Graph
from stretto.passes.rewrite import live, rebuilt


def dead_ops(graph: Graph) -> Graph:
    """See the module."""
    kept = live(graph.ops, graph.roots)
    return graph if len(kept) == len(graph.ops) else rebuilt(graph, kept)
