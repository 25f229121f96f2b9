"""Values that are replicated on tensor-parallel ranks cross stages in parts, where costs say that it pays.

In parts each rank sends its rows alone, and the next stage gathers them: a part of the message, and a
collective more (Megatron-LM's scatter and gather: Narayanan et al. 2021, arXiv 2104.04473, section 4.1).
`passes.borders` scatters reductions; this is for what is left.

    1. Take the values that go to a stage of another rank, are equal along the axis, in one piece, of rows
       that the axis divides, and whose gather has a cost. Rows are what the last dim is not.
    2. A value is cut if a part and its gather take clearly less time than the full tensor (SOONER). Those
       for which they take about as long are cut, all of them, if that clearly relieves the busiest card
       (RELIEF) of a microbatch's messages and of the collectives that share cards.
    3. The sender's part is a view; the receiver gathers before the first op that reads. No number changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stretto.ir.collectives import ALL_GATHER
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES, results_of
from stretto.ir.placed_programs import differing_in
from stretto.ir.program import CHUNK, VIEW, WAIT, Edge, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.transfers import axis_time, message_us, occupancy_us
from stretto.parallelize.tensor import AXIS
from stretto.passes.rewrite import changed, read_as, stage_of
from stretto.passes.step import Context, Step

SOONER = 0.9
"""Of the full message's time, what a part with its gather takes at most that is cut for it; what takes less
than its inverse takes about as long. Assumed: a smaller difference is within what costs can show."""

RELIEF = 0.98
"""Of the busiest card's load, what is left at most where values are cut for it. Assumed, likewise."""


def messages_in_parts(step: Step, context: Context) -> Step:
    """The step with such messages in parts.

    The same for every order of the stages, so that overlap modes stay bitwise equal. Raises PlanError for
    collectives without a cost.
    """
    job, stage_ranks = step.job, step.schedule.stage_ranks
    costs = context.costs_of(job)
    if not job.message_parts or job.size(AXIS) == 1 or (AXIS, ALL_GATHER.name) not in costs.collectives:
        return step
    crossing = [edge for edge in job.edges if stage_ranks[edge.source] != stage_ranks[edge.target]]
    values = divisible(job, crossing)
    chosen = _chosen(job, costs, stage_ranks, crossing, values)
    cut = [edge for edge in crossing if edge.value in chosen]
    if not cut:
        return step
    own = {edge.value: f"{edge.value}_own" for edge in cut}
    specs = {(edge.source, edge.value): edge.spec for edge in cut}

    def sender(stage: Stage) -> Stage:
        """Step 3: after each op that makes such a value, this rank's rows of it."""

        def with_rows(op: Op) -> list[Op]:
            spec = specs.get((stage.index, op.name))
            if spec is None:
                return [op]
            return [op, *cut_rows(op.name, own[op.name], spec, rows_of(spec), job.size(AXIS), op.module)]

        return changed(stage, with_rows)

    return replace(step, job=in_parts(replace(job, stages=tuple(map(sender, job.stages))), cut, own))


def _chosen(
    job: Job, costs: Costs, ranks: Sequence[int], crossing: Sequence[Edge], values: Sequence[str]
) -> Collection[str]:
    """Step 2."""
    size = job.size(AXIS)

    def ratio(edge: Edge) -> float:
        link, nbytes = costs.link(ranks[edge.source], ranks[edge.target]), edge.spec.nbytes
        parts_us = message_us(link, nbytes // size) + axis_time(costs, AXIS, ALL_GATHER.name, nbytes).us
        full_us = message_us(link, nbytes)
        return parts_us / full_us if full_us else math.inf

    ratios = {value: max(ratio(edge) for edge in crossing if edge.value == value) for value in values}
    soon = [value for value in values if ratios[value] < SOONER]
    same = [value for value in values if ratios[value] * SOONER < 1.0]
    if soon == same:
        return soon
    loads = [_busiest_us(job, costs, ranks, crossing, cut) for cut in (soon, same)]
    return same if loads[1] < RELIEF * loads[0] else soon


def _busiest_us(
    job: Job, costs: Costs, ranks: Sequence[int], crossing: Sequence[Edge], cut: Collection[str]
) -> float:
    """The most that any card has to do for a microbatch, in one direction, in microseconds."""
    load_us: dict[tuple[int, bool], float] = defaultdict(float)

    def add(rank: int, axis: str, kind: str, nbytes: int) -> None:
        """A collective takes a card both ways, less its latency."""
        if axis in costs.shared:
            time = axis_time(costs, axis, kind, nbytes)
            for outgoing in (True, False):
                load_us[rank, outgoing] += time.us - time.latency_us

    for stage in job.stages:
        for op in (op for phase in PHASES for op in stage.ops[phase]):
            asked = op.collective
            if asked is not None:
                add(ranks[stage.index], asked.axis, asked.kind, asked.nbytes)
    for edge in crossing:
        sender, receiver, nbytes = ranks[edge.source], ranks[edge.target], edge.spec.nbytes
        if edge.value in cut:
            add(receiver, AXIS, ALL_GATHER.name, nbytes)
            nbytes //= job.size(AXIS)
        us = occupancy_us(costs.link(sender, receiver), nbytes)
        load_us[sender, True] += us
        load_us[receiver, False] += us
    return max(load_us.values())


def rows_of(spec: TensorSpec) -> TensorSpec:
    """The same elements as a matrix of rows. spec: of a tensor in one piece, of at least one dim."""
    return TensorSpec((spec.numel // spec.shape[-1], spec.shape[-1]), spec.dtype)


def part_of(spec: TensorSpec, size: int) -> TensorSpec:
    """One rank's rows."""
    rows = rows_of(spec)
    return TensorSpec((rows.shape[0] // size, rows.shape[1]), rows.dtype)


def divisible(job: Job, edges: Sequence[Edge]) -> list[str]:
    """Values of these edges that all ranks of the axis have the same, in one piece, of rows that it divides,
    and that are no results of the step: those that may cross in parts."""
    if not edges:
        return []
    size = job.size(AXIS)
    results = {name for s in job.stages for phase in PHASES for name in results_of(job, s.index, phase)}
    stay = differing_in(job, AXIS) | results

    def fits(spec: TensorSpec) -> bool:
        full = spec.stride is None and len(spec.shape) > 1 and spec.numel > 0
        return full and rows_of(spec).shape[0] % size == 0

    return list(dict.fromkeys(e.value for e in edges if e.value not in stay and fits(e.spec)))


def in_parts(job: Job, edges: Sequence[Edge], own: Mapping[str, str]) -> Job:
    """The job in which edges carry a rank's rows of their values. own: value -> the name of these rows, which
    the sender's ops make already. A receiver gathers them before the first op that reads, and gives the full
    tensor a name of its own."""
    size = job.size(AXIS)
    touched = {stage for edge in edges for stage in (edge.source, edge.target)}
    programs = {at: dict(job.stages[at].ops) for at in touched}
    for edge in edges:
        name = f"{edge.value}_at_{edge.target}"
        read_as(programs[edge.target], edge, name, partial(_gathered, edge, own[edge.value], name, size))
    carried = tuple(
        replace(edge, value=own[edge.value], spec=part_of(edge.spec, size)) if edge in edges else edge
        for edge in job.edges
    )
    stages = tuple(stage_of(s.index, programs[s.index]) if s.index in touched else s for s in job.stages)
    return replace(job, stages=stages, edges=carried)


def cut_rows(value: str, name: str, spec: TensorSpec, rows: TensorSpec, size: int, module: str) -> list[Op]:
    """The ops that make `name`, this rank's part of a value of `spec` seen as `rows`."""
    result: list[Op] = []
    if rows != spec:
        result.append(Op(f"{name}_rows", VIEW, (Ref(value), rows.shape), (), (rows,), value, module=module))
        value = f"{name}_rows"
    part = part_of(rows, size)
    return [*result, Op(name, CHUNK, (Ref(value), 0, AXIS, size), (), (part,), value, module=module)]


def _gathered(edge: Edge, part: str, name: str, size: int, module: str) -> list[Op]:
    """The ops that make `name` of every rank's part."""
    rows, start = rows_of(edge.spec), f"{edge.value}_gather_{edge.target}"
    wait = name if rows == edge.spec else f"{start}_wait"
    result = [Op(start, ALL_GATHER.target, (Ref(part), AXIS, size), (), (rows,), module=module)]
    result.append(Op(wait, WAIT, (Ref(start),), (), (rows,), start, module=module))
    if wait != name:
        result.append(Op(name, VIEW, (Ref(wait), edge.spec.shape), (), (edge.spec,), start, module=module))
    return result
