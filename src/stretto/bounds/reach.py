"""Heads and tails: what must come before and after every op, collective and message of one microbatch.

One microbatch has the machines to itself, which is the least that any order must allow:

1. Inside a stage, distances are those of `bounds.stage`. Each stage has *sinks*: its messages that
   leave, and its ends, after which the loss is sent and gradients are reduced. A gradient is reduced first
   along the axes on which it is partial, then over its ties, then over data-parallel ranks
   (`schedule.sums`); a reduction begins when every op that adds to one of its gradients has ended, for all
   microbatches.
2. An op's *head* is its distance from the stage's start, or from the arrival of any value that it needs, or
   from when what its rank makes once a step may be there (`bounds.once`), whichever makes it later.
3. A message leaves when the op that makes it has ended, and arrives after latency and transfer.
4. *Tails* are the same, backward from the step's end.

Messages go from edge to edge in topological order, so cost is linear in edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from stretto.bounds.once import OnceOp, StartedTime, begins_us, rests_us
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
from stretto.ir.action import ONCE_PHASES
from stretto.ir.costs import Costs
from stretto.ir.flow import OVER_STEP, PHASES, made_parameters
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
from stretto.schedule.once import around_starts, communicators_of, placed, with_once


@dataclass(frozen=True, slots=True)
class StageEnd:
    """Ops of a stage, by number, after which reductions follow one after the other; `us` in all (without
    reductions: of the loss)."""

    ops: tuple[int, ...]
    reductions: tuple[StartedTime, ...]
    us: float


@dataclass(slots=True)
class StageReach:
    """One stage by op number; microseconds.

    distances: inside the stage, from its arrivals (`edges_in`) and to its sinks (`edges_out`, then `ends`).
    calls: its collectives with their times. numbers: op name -> number. made_us: when the first of what it
    reads that is made once a step may be there. head_us, tail_us: without the op.
    """

    distances: Distances
    edges_in: list[Edge]
    edges_out: list[Edge]
    ends: list[StageEnd]
    calls: list[tuple[StageCall, CollectiveTime]]
    numbers: dict[str, int]
    made_us: float
    head_us: Array
    tail_us: Array

    def leaving_us(self, edge: Edge, distances: Array) -> float:
        """The distance to the moment when an edge's message leaves, of distances to the ops' ends."""
        return float(distances[self.numbers[edge.value]])


@dataclass(frozen=True, slots=True)
class OnceReach:
    """An op that a rank runs once a step, with its head and tail."""

    of: OnceOp
    head_us: float
    tail_us: float


@dataclass(frozen=True, slots=True)
class Reach:
    """Heads and tails of a job.

    By edge: leaves_us, before when its message cannot leave; travel_us, from then to its arrival; follows_us,
    what must pass after it has arrived. critical_us: the longest chain of one microbatch.
    order: edges, each after those that it depends on. once: by rank, ops that run once a step.
    """

    stages: tuple[StageReach, ...]
    once: tuple[Sequence[OnceReach], ...]
    leaves_us: tuple[float, ...]
    travel_us: tuple[float, ...]
    follows_us: tuple[float, ...]
    critical_us: float
    order: tuple[Edge, ...]


def find_reach(job: Job, stage_ranks: tuple[int, ...], costs: Costs) -> Reach:
    """Heads and tails of every op and message of `job`, in microseconds.

    Raises PlanError when edges form a circle, and when an op that is no view, or a collective, has no time.
    """
    once = _once(job, stage_ranks, costs)
    stages = _stages(job, stage_ranks, costs, once)
    order = _edge_order(job, stages)
    travel_us = []
    for edge in job.edges:
        a, b = stage_ranks[edge.source], stage_ranks[edge.target]
        travel_us.append(0.0 if a == b else message_us(costs.link(a, b), edge.spec.nbytes))

    # 2 and 3. Forward along the messages.
    leaves_us = [0.0] * len(job.edges)
    for edge in order:
        source = stages[edge.source]
        made_us = source.made_us + source.leaving_us(edge, source.distances.from_made)
        leaves_us[edge.index] = max(made_us, source.leaving_us(edge, source.distances.from_start))
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
        head, tail = np.maximum(inside.from_start, stage.made_us + inside.from_made), inside.to_end
        for edge, since in zip(stage.edges_in, inside.from_arrival, strict=True):
            head = np.maximum(head, leaves_us[edge.index] + travel_us[edge.index] + since)
        for to_sink, rest_us in zip(inside.to_sink, rests_us(stage), strict=True):
            tail = np.maximum(tail, to_sink + rest_us)
        # Both count the op itself; a head or a tail is without it.
        stage.head_us, stage.tail_us = head - inside.time_us, tail - inside.time_us
        critical_us = max(critical_us, float((head + stage.tail_us).max(initial=0.0)))
    of_ranks = tuple(_once_reach(job, stage_ranks, stages, rank, of) for rank, of in enumerate(once))
    edges = tuple(leaves_us), tuple(travel_us), tuple(follows_us)
    return Reach(tuple(stages), of_ranks, *edges, critical_us, tuple(order))


def _least_us(inside: Distances, ops: Mask | int) -> float:
    """The least time in which ops, or one, are done on the compute lane."""
    return float(inside.pace.least_us(inside.time_us[ops].sum()))


def _stages(
    job: Job, stage_ranks: tuple[int, ...], costs: Costs, once: Sequence[Sequence[OnceOp]]
) -> list[StageReach]:
    """Step 1; equal stages share their distances."""
    programs = [[op for phase in PHASES for op in stage.ops[phase]] for stage in job.stages]
    faults = [fault for stage, ops in enumerate(programs) for fault in missing_times(costs, stage, ops)]
    if faults:
        raise PlanError("cannot bound the step", faults)
    numbers = [{op.name: at for at, op in enumerate(ops)} for ops in programs]
    ends = _ends(job, stage_ranks, once, numbers)
    there_us = [_there_us(of_rank, made_parameters(job)) for of_rank in once]
    pace = Pace.of(costs.processor)
    known: dict[StageShape, Distances] = {}
    stages: list[StageReach] = []
    for stage, ops in enumerate(programs):
        edges_in = [edge for edge in job.edges if edge.target == stage]
        edges_out = [edge for edge in job.edges if edge.source == stage]
        calls = _calls(ops, numbers[stage], costs)
        arrivals = {edge.value: -1 - k for k, edge in enumerate(edges_in)}
        made_us = there_us[stage_ranks[stage]]
        made = dict.fromkeys(made_us, -1 - len(edges_in))
        at = {**made, **arrivals, **numbers[stage]}
        first_us = min((made_us[name] for op in ops for name in op.uses if name in made_us), default=0.0)
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
        of_stage = ends[stage], calls, numbers[stage]
        stages.append(StageReach(known[shape], edges_in, edges_out, *of_stage, first_us, none, none))
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


def _once(job: Job, stage_ranks: tuple[int, ...], costs: Costs) -> list[tuple[OnceOp, ...]]:
    """By rank, the ops of the programs that run once a step. An op without a time takes none.

    Raises PlanError for a collective that has no cost.
    """
    where = placed(job, stage_ranks)
    job = with_once(job, where)
    communicators = {one.name: one for one in communicators_of(job, where)}
    pace = Pace.of(costs.processor)

    def timed(stage: int, op: Op) -> OnceOp:
        us, started = time_of(costs, stage, op), None
        if op.collective is not None:
            communicator = communicators[op.lane]
            time = collective_time(costs, job, communicator, op.collective)
            started = StartedTime(op.name, communicator.axes[0], time)
        return OnceOp(op, us, float(pace.least_us(np.array(us))), started)

    def programs(rank: int) -> Iterator[OnceOp]:
        for phase in ONCE_PHASES:
            for stage in where.stages_of(rank):
                yield from (timed(stage, op) for op in job.stages[stage].ops.get(phase, ()))

    return [tuple(programs(rank)) for rank in range(where.ranks)]


def _there_us(program: Sequence[OnceOp], made: Collection[str]) -> dict[str, float]:
    """When what is made for ops of actions may be there."""
    there_us: dict[str, float] = {}
    begins_us(program, there_us)
    return {name: there_us[name] for one in program for name in one.op.writes if name in made}


def _once_reach(
    job: Job,
    stage_ranks: Sequence[int],
    stages: Sequence[StageReach],
    rank: int,
    once: Sequence[OnceOp],
) -> list[OnceReach]:
    """What a rank runs once a step, when heads and tails of all other ops are known."""
    here = [(job.stages[at], stage) for at, stage in enumerate(stages) if stage_ranks[at] == rank]
    made = made_parameters(job)
    follows_us: dict[str, float] = defaultdict(float)
    for given, stage in here:
        for op in (op for phase in PHASES for op in given.ops[phase] if not made.isdisjoint(op.uses)):
            at = stage.numbers[op.name]
            for name in made.intersection(op.uses):
                after_us = _least_us(stage.distances, at) + float(stage.tail_us[at])
                follows_us[name] = max(follows_us[name], after_us)
    there_us: dict[str, float] = defaultdict(float)
    adds = [(job.loss, STEP_LOSS)]
    adds += [((stage, value), GRAD + p.name) for p in job.parameters for stage, _, value in p.grads]
    for (owner, value), name in adds:
        if stage_ranks[owner] == rank and value in stages[owner].numbers:
            stage, at = stages[owner], stages[owner].numbers[value]
            added_us = float(stage.head_us[at]) + _least_us(stage.distances, at)
            there_us[name] = max(there_us[name], added_us)
    begins, rests = begins_us(once, there_us), rests_us(once, follows_us)
    return [OnceReach(one, begins[one.op.name], rests[one.op.name]) for one in once]


def _ends(
    job: Job,
    stage_ranks: Sequence[int],
    once: Sequence[Sequence[OnceOp]],
    numbers: Sequence[Mapping[str, int]],
) -> list[list[StageEnd]]:
    """The ends of every stage. numbers: by stage, op name -> number."""
    chains: list[dict[str, tuple[StartedTime, ...]]] = []
    for of_rank in once:
        chain: dict[str, tuple[StartedTime, ...]] = defaultdict(tuple)
        started = {one.op.name: one.started for one in of_rank if one.started is not None}
        leads, _ = around_starts([one.op for one in of_rank])
        for name, lead in leads.items():
            if name:
                for read in dict.fromkeys(n for op in lead for n in op.uses if n.startswith(OVER_STEP)):
                    chain[read] += (started[name],)
        chains.append(chain)
    adding: list[dict[tuple[StartedTime, ...], dict[int, None]]] = [defaultdict(dict) for _ in job.stages]
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
