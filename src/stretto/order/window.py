"""One window by itself, listed: how urgent its nodes are, and the memory that it may hold.

May touch this room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from stretto.order.depend import Role, WindowGraph
from stretto.order.follow import replay
from stretto.order.listing import Listing
from stretto.order.scope import Whole, make_whole
from stretto.order.walk import walk
from stretto.order.worlds import WindowWorld


def urgencies(graph: WindowGraph) -> list[float]:
    """How urgent nodes of one window are, in microseconds: the longest path to its end, through lanes as well
    as compute (critical path), or to the end of what must follow a message. What nothing waits for, as weight
    gradients, is the least urgent and fills gaps."""
    found = [0.0] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        behind = max((found[n] for n in graph.after[index]), default=0.0)
        # What only a later window waits for is in no hurry.
        leads = node.role is Role.SEND or (node.role is Role.START and graph.after[index])
        on_lane_us = max(node.time_us, node.tail_us) if leads else 0.0
        found[index] = max(node.work_us, on_lane_us) + behind
    return found


def captured_limit(graph: WindowGraph) -> int:
    """The bytes that the captured order needs, one part after the other: what an order may use as well."""
    return replay(graph, range(len(graph.nodes))).peak_bytes


def list_order(
    graph: WindowGraph,
    *,
    urgency: Sequence[float] | None = None,
    fit: bool = False,
    limit_bytes: int | None = None,
    sequence: Sequence[int] | None = None,
    held: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """An order of the graph's nodes.

    urgency: by node; `urgencies` without it. fit: see step 1. limit_bytes: above what is held at the
    window's begin; what the captured order needs without it. sequence: all starts, in an order that does not
    go against what they need. held: op -> the start before which it does not run; no start needs such an op.
    """
    if limit_bytes is None:
        limit_bytes = captured_limit(graph)
    urgency = urgencies(graph) if urgency is None else urgency
    made = list_window(make_whole(graph), urgency, fit, limit_bytes, sequence, held or {})
    return tuple(made.order)


def list_window(
    whole: Whole,
    urgency: Sequence[float],
    fit: bool,
    limit_bytes: int,
    sequence: Sequence[int] | None,
    held: Mapping[int, int],
) -> Listing:
    """A window by itself, walked to its end. Arguments as in `list_order`."""
    graph = whole.graph
    world = WindowWorld(graph)
    rank = Listing(world, 0, whole, urgency, memory=whole.memory.empty())
    rank.limit_bytes, rank.fit, rank.held = limit_bytes, fit, held
    if sequence is not None:
        rank.queues = {}
        for index in sequence:
            rank.queues.setdefault(graph.nodes[index].lane, deque()).append(index)
    made = walk(world, [rank])
    assert made is not None, "a window by itself comes to its end"
    return rank
