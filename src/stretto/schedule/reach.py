"""Heads and tails: what must come before and after every op and message of one microbatch.

May touch `stretto.ir` and `schedule.transfers`. The contract, for one microbatch with the machines to
itself, which is the least that any order must allow:

1. In a stage, an op *needs* what it reads, and what that needs; an op of I or W needs all of F, which is
   an action that comes before theirs in every legal order. A stage's ops run one at a time, so
   between two points all ops that need the first and are needed by the second pass.
2. An op's *head* is the time of all that it needs in its stage, or from the arrival of any value that it
   needs, the time of what it needs of that which needs the value; whichever is later.
3. A message leaves when the op that makes it has ended, and arrives after latency and transfer.
4. *Tails* are the same, backward from the step's end, where the loss and tied gradients are collected.

Messages go from edge to edge in topological order, so cost is linear in edges, and in a stage quadratic in
ops with vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.plan import Costs
from stretto.ir.program import Edge, Job, Stage
from stretto.schedule.transfers import (
    all_reduce_us,
    grad_bytes,
    message_us,
    op_time_us,
    slowest_link,
    tied_ranks,
)

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class StageReach:
    """One stage's ops in order: times, heads and tails in microseconds; `forward` marks those of F."""

    time_us: Array
    head_us: Array
    tail_us: Array
    forward: Mask


@dataclass(frozen=True, slots=True)
class Reach:
    """Heads and tails of a job.

    leaves_us[edge]: before when its message cannot leave; follows_us[edge]: what must pass after it has
    arrived; critical_us: the longest chain of one microbatch.
    """

    stages: tuple[StageReach, ...]
    leaves_us: tuple[float, ...]
    follows_us: tuple[float, ...]
    critical_us: float


class _StageGraph:
    """Step 1 for one stage: `needs[i, j]`: op i is op j or needs it."""

    def __init__(self, stage: Stage, costs: Costs, received: list[Edge]) -> None:
        ops = [op for phase in PHASES for op in stage.ops[phase]]
        self.index = {op.name: at for at, op in enumerate(ops)}
        times = [
            op_time_us(costs, stage.index, op.name, op.alias is not None or op.target == "getitem")
            for op in ops
        ]
        faults = [
            f"stage {stage.index}'s op {op.name} has no time; cost the job again"
            for op, time_us in zip(ops, times, strict=True)
            if time_us is None
        ]
        if faults:
            raise PlanError("cannot bound the step", faults)
        self.time_us: Array = np.array([time_us or 0.0 for time_us in times])
        self.forward: Mask = np.arange(len(ops)) < len(stage.ops[Phase.F])
        self.needs: Mask = np.zeros((len(ops), len(ops)), dtype=bool)
        values = {edge.value for edge in received}
        self.after: dict[str, Mask] = {value: np.zeros(len(ops), dtype=bool) for value in values}
        for at, op in enumerate(ops):
            row = self.needs[at]
            row[at] = True
            if at >= len(stage.ops[Phase.F]):
                row |= self.forward
            for name in op.uses:
                if name in self.index:
                    row |= self.needs[self.index[name]]
        for at, op in enumerate(ops):
            for name in op.uses:
                if name in self.after:
                    self.after[name] |= self.needs[:, at]

    def up_to(self, mask: Mask) -> Array:
        """For each op: the time of the ops in `mask` that it needs, itself included."""
        return self.needs[:, mask] @ self.time_us[mask]

    def onward(self, mask: Mask) -> Array:
        """For each op: the time of the ops in `mask` that need it, itself included."""
        return self.time_us[mask] @ self.needs[mask, :]


def find_reach(job: Job, stage_ranks: tuple[int, ...], costs: Costs) -> Reach:
    """Heads and tails of every op and message of `job`, in microseconds.

    Raises PlanError when edges form a circle, or an op that is no view has no time.
    """
    into: dict[int, list[Edge]] = {stage.index: [] for stage in job.stages}
    out_of: dict[int, list[Edge]] = {stage.index: [] for stage in job.stages}
    for edge in job.edges:
        into[edge.target].append(edge)
        out_of[edge.source].append(edge)
    graphs = [_StageGraph(stage, costs, into[stage.index]) for stage in job.stages]
    ends_us = _ends(job, stage_ranks, costs, graphs)

    def travel_us(edge: Edge) -> float:
        a, b = stage_ranks[edge.source], stage_ranks[edge.target]
        return 0.0 if a == b else message_us(costs.link(a, b), edge.spec.nbytes)

    def makes(graph: _StageGraph, edge: Edge) -> Mask:
        """Ops that the op which makes the edge's value needs, itself included (none: it passes through)."""
        at = graph.index.get(edge.value)
        return graph.needs[at] if at is not None else np.zeros(len(graph.time_us), dtype=bool)

    order = _edge_order(job, graphs, into)
    leaves_us = [0.0] * len(job.edges)
    follows_us = [0.0] * len(job.edges)
    arrives_us = [0.0] * len(job.edges)

    # 2 and 3. Forward along the messages.
    for edge in order:
        graph = graphs[edge.source]
        mask = makes(graph, edge)
        leaves_us[edge.index] = float(graph.time_us[mask].sum())
        for arriving in into[edge.source]:
            passed = graph.after[arriving.value] & mask
            if passed.any():
                time_us = arrives_us[arriving.index] + float(graph.time_us[passed].sum())
                leaves_us[edge.index] = max(leaves_us[edge.index], time_us)
        arrives_us[edge.index] = leaves_us[edge.index] + travel_us(edge)

    # 4. Backward along the messages.
    for edge in reversed(order):
        graph = graphs[edge.target]
        after = graph.after[edge.value]
        at_end = float(graph.time_us[after].sum())
        closing = [
            float(graph.time_us[after & graph.needs[end]].sum()) + us
            for end, us in ends_us[edge.target].items()
            if after[end]
        ]
        leaving = [
            float(graph.time_us[after & makes(graph, next_edge)].sum())
            + travel_us(next_edge)
            + follows_us[next_edge.index]
            for next_edge in out_of[edge.target]
            if (after & makes(graph, next_edge)).any()
        ]
        follows_us[edge.index] = max([at_end, *closing, *leaving])

    # 2 and 4, for every op.
    stages: list[StageReach] = []
    critical_us = 0.0
    for stage, graph in zip(job.stages, graphs, strict=True):
        everything = np.ones(len(graph.time_us), dtype=bool)
        head = graph.up_to(everything)
        tail = graph.onward(everything)
        for edge in into[stage.index]:
            after = graph.after[edge.value]
            head = np.where(after, np.maximum(head, arrives_us[edge.index] + graph.up_to(after)), head)
        for edge in out_of[stage.index]:
            mask = makes(graph, edge)
            rest_us = travel_us(edge) + follows_us[edge.index]
            tail = np.where(mask, np.maximum(tail, graph.onward(mask) + rest_us), tail)
        for end, us in ends_us[stage.index].items():
            mask = graph.needs[end]
            tail = np.where(mask, np.maximum(tail, graph.onward(mask) + us), tail)
        # Both count the op itself; a head or a tail is without it.
        head, tail = head - graph.time_us, tail - graph.time_us
        if len(head):
            critical_us = max(critical_us, float((head + graph.time_us + tail).max()))
        stages.append(StageReach(graph.time_us, head, tail, graph.forward))
    return Reach(tuple(stages), tuple(leaves_us), tuple(follows_us), critical_us)


def _ends(
    job: Job, stage_ranks: tuple[int, ...], costs: Costs, graphs: list[_StageGraph]
) -> list[dict[int, float]]:
    """What follows the last ops: for each stage, op index -> microseconds of the collective after it."""
    ends: list[dict[int, float]] = [{} for _ in graphs]
    sizes = grad_bytes(job)
    for name, ranks in tied_ranks(job, stage_ranks).items():
        us = all_reduce_us(slowest_link(costs, ranks), len(ranks), sizes[name])
        for parameter in job.parameters:
            for stage, _, value in parameter.grads if parameter.tied_to == name else ():
                at = graphs[stage].index.get(value)
                if at is not None:
                    ends[stage][at] = us
    every = sorted(set(stage_ranks))
    stage, value = job.loss
    at = graphs[stage].index.get(value)
    if len(every) > 1 and at is not None:
        ends[stage][at] = max(ends[stage].get(at, 0.0), slowest_link(costs, every).latency_us)
    return ends


def _edge_order(job: Job, graphs: list[_StageGraph], into: dict[int, list[Edge]]) -> list[Edge]:
    """Edges so that each comes after those whose values its own value needs."""
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for edge in job.edges:
        graph = graphs[edge.source]
        at = graph.index.get(edge.value)
        needed = (
            e.index
            for e in into[edge.source]
            if at is not None and bool((graph.after[e.value] & graph.needs[at]).any())
        )
        sorter.add(edge.index, *needed)
    try:
        return [job.edges[index] for index in sorter.static_order()]
    except CycleError as error:
        circle = " -> ".join(str(job.edges[index]) for index in error.args[1])
        raise PlanError(
            "cannot bound the step", [f"values wait for each other in a circle: {circle}"]
        ) from None
