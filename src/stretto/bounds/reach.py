"""Heads and tails: what must come before and after every op, collective and message of one microbatch.

One microbatch has the machines to itself, which is the least that any order must allow:

1. Inside a stage, distances are those of `bounds.stage`. Each stage has *sinks*: its messages that
   leave, and its ends, after which the loss is sent and gradients are reduced. A gradient is reduced first
   along the axes on which it is partial, then over its ties, then over data-parallel ranks
   (`schedule.sums`); a reduction begins when every op that adds to one of its gradients has ended, for all
   microbatches.
2. An op's *head* is its distance from the stage's start, or from the arrival of any value that it needs,
   whichever makes it later.
3. A message leaves when the op that makes it has ended, and arrives after latency and transfer.
4. *Tails* are the same, backward from the step's end.

Messages go from edge to edge in topological order, so cost is linear in edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from stretto.bounds.stage import (
    NEVER,
    Array,
    Distances,
    Mask,
    StageCall,
    StageShape,
    find_distances,
)
from stretto.errors import PlanError
from stretto.ir.action import Phase, Schedule
from stretto.ir.costs import Costs
from stretto.ir.flow import OVER_STEP, PHASES
from stretto.ir.program import GRAD, STEP_LOSS, WAIT, Edge, Job, Op
from stretto.ir.transfers import (
    CollectiveTime,
    axis_time,
    collective_time,
    message_us,
    missing_times,
    time_of,
)
from stretto.processor.budget import Pace
from stretto.schedule.once import around_starts, communicators_of, with_once


@dataclass(frozen=True, slots=True)
class ReductionTime:
    """Gradients that are reduced together and what that takes. axis: of its communicator, `pp` for ties."""

    name: str
    axis: str
    time: CollectiveTime


@dataclass(frozen=True, slots=True)
class StageEnd:
    """Ops of a stage, by number, after which reductions follow one after the other; `us` in all (without
    reductions: of the loss)."""

    ops: tuple[int, ...]
    reductions: tuple[ReductionTime, ...]
    us: float


@dataclass(slots=True)
class StageReach:
    """One stage by op number; microseconds.

    distances: inside the stage, from its arrivals (`edges_in`) and to its sinks (`edges_out`, then `ends`).
    calls: its collectives with their times. numbers: op name -> number. head_us, tail_us: without the op.
    """

    distances: Distances
    edges_in: list[Edge]
    edges_out: list[Edge]
    ends: list[StageEnd]
    calls: list[tuple[StageCall, CollectiveTime]]
    numbers: dict[str, int]
    head_us: Array
    tail_us: Array

    def leaving_us(self, edge: Edge, distances: Array) -> float:
        """The distance to the moment when an edge's message leaves, of distances to the ops' ends."""
        return float(distances[self.numbers[edge.value]])


@dataclass(frozen=True, slots=True)
class Reach:
    """Heads and tails of a job.

    By edge: leaves_us, before when its message cannot leave; travel_us, from then to its arrival; follows_us,
    what must pass after it has arrived. critical_us: the longest chain of one microbatch.
    order: edges, each after those that it depends on.
    """

    stages: tuple[StageReach, ...]
    leaves_us: tuple[float, ...]
    travel_us: tuple[float, ...]
    follows_us: tuple[float, ...]
    critical_us: float
    order: tuple[Edge, ...]


def find_reach(job: Job, stage_ranks: tuple[int, ...], costs: Costs) -> Reach:
    """Heads and tails of every op and message of `job`, in microseconds.

    Raises PlanError when edges form a circle, and when an op that is no view, or a collective, has no time.
    """
    stages = _stages(job, stage_ranks, costs)
    order = _edge_order(job, stages)
    travel_us = []
    for edge in job.edges:
        a, b = stage_ranks[edge.source], stage_ranks[edge.target]
        travel_us.append(0.0 if a == b else message_us(costs.link(a, b), edge.spec.nbytes))

    # 2 and 3. Forward along the messages.
    leaves_us = [0.0] * len(job.edges)
    for edge in order:
        source = stages[edge.source]
        leaves_us[edge.index] = source.leaving_us(edge, source.distances.from_start)
        for arriving, since in zip(source.edges_in, source.distances.from_arrival, strict=True):
            time_us = leaves_us[arriving.index] + travel_us[arriving.index] + source.leaving_us(edge, since)
            leaves_us[edge.index] = max(leaves_us[edge.index], time_us)

    # 2 and 4. Backward along the messages.
    follows_us = [0.0] * len(job.edges)

    def rests_us(stage: StageReach) -> list[float]:
        """What must pass after each sink; of messages that leave, those that are known by now."""
        leaving = [travel_us[edge.index] + follows_us[edge.index] for edge in stage.edges_out]
        return leaving + [end.us for end in stage.ends]

    for edge in reversed(order):
        target = stages[edge.target]
        inside = target.distances
        since = inside.from_arrival[target.edges_in.index(edge)]
        after = since > NEVER
        follows_us[edge.index] = _least_us(inside, after)
        for before, to_sink, rest_us in zip(
            inside.before_sink, inside.to_sink, rests_us(target), strict=True
        ):
            both = after & before
            if both.any():
                # All that is between; and the longest chain, which counts each op on it from both sides.
                chain_us = float((since[both] + to_sink[both] - inside.time_us[both]).max())
                passes_us = max(chain_us, _least_us(inside, both))
                follows_us[edge.index] = max(follows_us[edge.index], passes_us + rest_us)
        if after.any():
            chain_us = float((since[after] + inside.to_end[after] - inside.time_us[after]).max())
            follows_us[edge.index] = max(follows_us[edge.index], chain_us)

    # 2 and 4, for every op.
    critical_us = 0.0
    for stage in stages:
        inside = stage.distances
        head, tail = inside.from_start, inside.to_end
        for edge, since in zip(stage.edges_in, inside.from_arrival, strict=True):
            head = np.maximum(head, leaves_us[edge.index] + travel_us[edge.index] + since)
        for to_sink, rest_us in zip(inside.to_sink, rests_us(stage), strict=True):
            tail = np.maximum(tail, to_sink + rest_us)
        # Both count the op itself; a head or a tail is without it.
        stage.head_us, stage.tail_us = head - inside.time_us, tail - inside.time_us
        critical_us = max(critical_us, float((head + stage.tail_us).max(initial=0.0)))
    return Reach(
        tuple(stages), tuple(leaves_us), tuple(travel_us), tuple(follows_us), critical_us, tuple(order)
    )


def _least_us(inside: Distances, ops: Mask) -> float:
    """The least time in which ops are done on the compute lane."""
    return float(inside.pace.least_us(inside.time_us[ops].sum()))


def _stages(job: Job, stage_ranks: tuple[int, ...], costs: Costs) -> list[StageReach]:
    """Step 1; equal stages share their distances."""
    programs = [[op for phase in PHASES for op in stage.ops[phase]] for stage in job.stages]
    faults = [fault for stage, ops in enumerate(programs) for fault in missing_times(costs, stage, ops)]
    if faults:
        raise PlanError("cannot bound the step", faults)
    numbers = [{op.name: at for at, op in enumerate(ops)} for ops in programs]
    ends = _ends(job, stage_ranks, costs, numbers)
    pace = Pace.of(costs.processor)
    known: dict[StageShape, Distances] = {}
    stages: list[StageReach] = []
    for stage, ops in enumerate(programs):
        edges_in = [edge for edge in job.edges if edge.target == stage]
        edges_out = [edge for edge in job.edges if edge.source == stage]
        calls = _calls(ops, numbers[stage], costs)
        arrivals = {edge.value: -1 - k for k, edge in enumerate(edges_in)}
        at = {**arrivals, **numbers[stage]}
        shape = StageShape(
            tuple(time_of(costs, stage, op) for op in ops),
            len(job.stages[stage].ops[PHASES[0]]),
            tuple(tuple(at[name] for name in op.uses if name in at) for op in ops),
            len(edges_in),
            tuple(call for call, _ in calls),
            (*((numbers[stage][edge.value],) for edge in edges_out), *(end.ops for end in ends[stage])),
            pace,
        )
        if shape not in known:
            known[shape] = find_distances(shape)
        none = np.zeros(len(ops))
        stages.append(
            StageReach(known[shape], edges_in, edges_out, ends[stage], calls, numbers[stage], none, none)
        )
    return stages


def _calls(ops: list[Op], number: dict[str, int], costs: Costs) -> list[tuple[StageCall, CollectiveTime]]:
    """The collectives of a stage that an op waits for; each once."""
    calls: dict[int, tuple[StageCall, CollectiveTime]] = {}
    for at, op in enumerate(ops):
        start = number.get(op.uses[0], -1) if op.target == WAIT and op.uses else -1
        asked = ops[start].collective if start >= 0 else None
        if asked is not None and start not in calls:
            time = axis_time(costs, asked.axis, asked.kind, asked.nbytes)
            calls[start] = (StageCall(start, at, asked.axis, time.us), time)
    return list(calls.values())


def _edge_order(job: Job, stages: list[StageReach]) -> list[Edge]:
    """Edges so that each comes after those whose values its own value needs."""
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for edge in job.edges:
        source = stages[edge.source]
        arrivals = zip(source.edges_in, source.distances.from_arrival, strict=True)
        needed = (e.index for e, since in arrivals if source.leaving_us(edge, since) > NEVER)
        sorter.add(edge.index, *needed)
    try:
        return [job.edges[index] for index in sorter.static_order()]
    except CycleError as error:
        circle = " -> ".join(str(job.edges[index]) for index in error.args[1])
        raise PlanError(
            "cannot bound the step", [f"values wait for each other in a circle: {circle}"]
        ) from None


def _ends(
    job: Job, stage_ranks: Sequence[int], costs: Costs, numbers: Sequence[Mapping[str, int]]
) -> list[list[StageEnd]]:
    """The ends of every stage. numbers: by stage, op name -> number.

    Raises PlanError for a collective that has no cost.
    """
    empty: tuple[tuple[()], ...] = ((),) * (1 + max(stage_ranks))
    where = Schedule("", len(stage_ranks), job.microbatches, tuple(stage_ranks), empty)
    reducing = with_once(job, where)
    communicators = {one.name: one for one in communicators_of(job, where)}
    chains: list[dict[str, tuple[ReductionTime, ...]]] = []
    for rank in range(where.ranks):
        chain: dict[str, tuple[ReductionTime, ...]] = defaultdict(tuple)
        for stage in where.stages_of(rank):
            leads, _ = around_starts(reducing.stages[stage].ops.get(Phase.REDUCE_GRAD, ()))
            for name, lead in leads.items():
                if not name:
                    continue
                assert lead[-1].collective is not None
                communicator = communicators[lead[-1].lane]
                time = collective_time(costs, job, communicator, lead[-1].collective)
                for read in dict.fromkeys(n for op in lead for n in op.uses if n.startswith(OVER_STEP)):
                    chain[read] += (ReductionTime(name, communicator.axes[0], time),)
        chains.append(chain)
    adding: list[dict[tuple[ReductionTime, ...], dict[int, None]]] = [defaultdict(dict) for _ in job.stages]
    for parameter in job.parameters:
        for stage, _, value in parameter.grads:
            followed = chains[stage_ranks[stage]].get(GRAD + parameter.name, ())
            if followed and value in numbers[stage]:
                adding[stage][followed][numbers[stage][value]] = None
    ends = [
        [StageEnd(tuple(ops), chain, sum(r.time.us for r in chain)) for chain, ops in by_chain.items()]
        for by_chain in adding
    ]
    stage, value = job.loss
    if STEP_LOSS in chains[stage_ranks[stage]] and value in numbers[stage]:
        [of_loss] = chains[stage_ranks[stage]][STEP_LOSS]
        ends[stage].append(StageEnd((numbers[stage][value],), (), of_loss.time.us))
    return ends
