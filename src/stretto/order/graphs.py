"""A step in which each rank has one window, made ready to be searched: graphs and urgencies.

How urgent an op is at first: the longest path from it to the end of its microbatch, over all ranks and lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from stretto.ir.action import Action, Overlap, Phase
from stretto.ir.costs import Costs
from stretto.ir.plan import Item, Plan
from stretto.ir.program import Job
from stretto.order.depend import Node, Role, WindowGraph, make_graph
from stretto.order.scope import Whole, make_whole
from stretto.schedule.windows import make_window, window_name
from stretto.simulating.windows import Call, make_ready

Frees = Sequence[Sequence[tuple[int, int]]]
"""By rank, `frees` of `make_graph`."""

Key = tuple[int, bool, Item]
"""An item of any microbatch: stage, whether of F, and the item as of part 0."""


def tails_us(job: Job, costs: Costs, stage_ranks: Sequence[int]) -> Mapping[Key, float]:
    """The longest path from an item to the end of its microbatch, itself and lanes included."""
    nodes = {}
    after: dict[tuple[int, int], list[tuple[int, int]]] = {}
    receives: dict[int, tuple[int, int]] = {}
    for stage in range(len(job.stages)):
        slot = Overlap((Action(stage, Phase.F, 0), Action(stage, Phase.B, 0)))
        graph = make_graph(job, costs, make_window(job, slot), stage_ranks)
        for index, node in enumerate(graph.nodes):
            nodes[stage, index] = graph.window.parts[node.item.part][1], node
            after[stage, index] = [(stage, other) for other in graph.after[index]]
            if node.role is Role.RECEIVE:
                receives[int(node.item.ref)] = stage, index
    for place, (_, node) in nodes.items():
        if node.role is Role.SEND:
            after[place].append(receives[int(node.item.ref)])
    found: dict[tuple[int, int], float] = {}
    for place in TopologicalSorter(after).static_order():
        _, node = nodes[place]
        leads = node.role in (Role.START, Role.SEND) and after[place]
        behind_us = max((found[other] for other in after[place]), default=0.0)
        found[place] = node.work_us + (node.time_us if leads else 0.0) + behind_us
    return {
        (stage, nodes[stage, index][0] is Phase.F, replace(nodes[stage, index][1].item, part=0)): us
        for (stage, index), us in found.items()
    }


@dataclass(frozen=True, slots=True)
class Graphs:
    """What does not depend on which ops are placed for themselves. By rank: graphs, microbatches, calls as in
    `order.scope.Whole`, and by node `tails_us`."""

    graphs: tuple[WindowGraph, ...]
    microbatches: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[Call | None, ...], ...]
    tails_us: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(plan: Plan, frees: Frees = ()) -> Graphs:
        """frees: by rank, as in `make_graph`."""
        job, costs, ranks = plan.job, plan.costs, plan.schedule.stage_ranks
        slots = [slot for (slot,) in plan.schedule.orders]
        microbatches = tuple(tuple(action.microbatch for action in slot.actions) for slot in slots)
        graphs = tuple(
            make_graph(job, costs, plan.windows[window_name(slot)], ranks, microbatches=mine, frees=own)
            for slot, mine, own in zip(slots, microbatches, frees or [()] * len(slots), strict=True)
        )
        known_us = tails_us(job, costs, ranks)

        def tail_us(graph: WindowGraph, node: Node) -> float:
            stage, phase = graph.window.parts[node.item.part]
            return known_us[stage, phase is Phase.F, replace(node.item, part=0)]

        tails = tuple(tuple(tail_us(graph, node) for node in graph.nodes) for graph in graphs)
        calls = tuple(make_ready(plan, graph.window.name).calls for graph in graphs)
        return Graphs(graphs, microbatches, calls, tails)

    def wholes(self, little: float) -> tuple[Whole, ...]:
        """By rank, with one size of ops that are placed for themselves."""
        mine = zip(self.graphs, self.microbatches, self.calls, strict=True)
        return tuple(make_whole(*one, little) for one in mine)
