"""Only experts hide an all-to-all: the order of Tutel's and FasterMoE's pipeline, for a job's own graph.

Tutel (arXiv 2206.03382) and FasterMoE (PPoPP 2022) cut what experts get into slices;
the all-to-alls of one slice run under the experts of another, forward and backward, and all else of a block
waits for the last of them. Here:

    1. A module with experts has a stretch of each program, from its first op to its last. Its weight
       gradients belong to that of the backward, as where one backward makes both.
    2. Each stretch gets the best order that is found for it alone (`order.window`), without a limit of
       memory. So within it slices overlap at least as well as theirs.
    3. All else runs as captured, before or behind the stretch.

An ordering policy: `register` makes it known, and it must not be given windows of several actions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from stretto.ir.action import Phase
from stretto.ir.program import Job, Op
from stretto.order.depend import WindowGraph
from stretto.order.policies import Policy
from stretto.order.window import improve_order


def under_experts(job: Job, modules: Collection[str]) -> Policy:
    """The policy for windows of a job. modules: names of those that hold experts."""
    weights = {op.name: op for stage in job.stages for op in stage.ops[Phase.W]}
    programs = {
        op.name: op for stage in job.stages for phase in (Phase.F, Phase.I) for op in stage.ops[phase]
    }

    def order(graph: WindowGraph) -> list[int]:
        assert len(graph.window.parts) == 1, "stretches are of one program"
        names = [str(node.item.ref) for node in graph.nodes]
        places = _stretches([programs.get(name) for name in names], modules)
        last = max(places.values(), default=0) + 1
        of_module = {programs[names[at]].module: place for at, place in places.items()}
        found: dict[int, list[int]] = {}
        for at, name in enumerate(names):
            place = places.get(at, last)
            if name in weights:
                place = of_module.get(weights[name].module, last)
            found.setdefault(place, []).append(at)
        ordered: list[int] = []
        for place in sorted(found):
            part = _part(graph, found[place])
            inner = improve_order(part) if part.communicates else range(len(part.nodes))
            ordered += [found[place][at] for at in inner]
        return ordered

    return order


def _stretches(ops: Sequence[Op | None], modules: Collection[str]) -> dict[int, int]:
    """Step 1: the number of its stretch, by op. Those of experts are odd. Ops that are None have none."""
    ends: dict[str, tuple[int, int]] = {}
    for at, op in enumerate(ops):
        if op is not None and op.module in modules:
            ends[op.module] = ends.get(op.module, (at, at))[0], at
    spans = sorted(ends.values())
    assert all(end < start for (_, end), (start, _) in pairwise(spans)), "modules' ops lie apart"
    found: dict[int, int] = {}
    for at, op in enumerate(ops):
        if op is not None:
            before = sum(end < at for _, end in spans)
            found[at] = 2 * before + (before < len(spans) and spans[before][0] <= at)
    return found


def _part(graph: WindowGraph, nodes: Sequence[int]) -> WindowGraph:
    """The graph of some of its nodes, ascending, as if others had run."""
    places = {index: at for at, index in enumerate(nodes)}

    def among(found: Sequence[int]) -> tuple[int, ...]:
        return tuple(places[index] for index in found if index in places)

    return replace(
        graph,
        nodes=tuple(replace(graph.nodes[n], start=places.get(graph.nodes[n].start, -1)) for n in nodes),
        before=tuple(among(graph.before[n]) for n in nodes),
        after=tuple(among(graph.after[n]) for n in nodes),
        storages=(),
    )
