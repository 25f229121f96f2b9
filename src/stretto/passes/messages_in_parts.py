"""What is whole on all tensor-parallel ranks crosses stages in parts, where the cost model says that it pays.

Each rank of a stage would send all of a value to its like in the next, although the others send the same. In
parts each sends its rows alone, and the next stage gathers them: a part of the message, and a collective
more. Between nodes that is what links are short of (Megatron-LM's scatter and gather: Narayanan et al. 2021,
arXiv 2104.04473, section 4.1). Where collectives cross the same network it moves load from the sender's card
to the receiver's. `capture.borders` cuts sums before they are whole; this is for what is left: gradients that
come out of a norm of many ops, and what skips stages.

    1. Take the values that go to a stage of another rank, are equal along the axis, in one piece, of rows
       that the axis divides, and whose gather has a cost.
    2. A value is cut if a part and its gather take clearly less time than the whole (SOONER). Those for which
       they take about as long are cut, all of them, if that clearly relieves the busiest card (RELIEF) of a
       microbatch's messages and of the collectives that share cards.
    3. The sender's part is a view; the receiver gathers before the first op that reads, and calls the result
       a name of its own.

No number changes. Touches `stretto.ir` only; along other axes than `tp` activations differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from stretto.ir.collectives import ALL_GATHER
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES, results_of
from stretto.ir.placed_programs import differing_in
from stretto.ir.program import CHUNK, VIEW, Edge, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.transfers import axis_time, message_us, occupancy_us
from stretto.parallelize.tensor import AXIS
from stretto.passes.listed import OfStep
from stretto.passes.rewrite import with_uses
from stretto.passes.rows import divides, gather, part_of, rows_of
from stretto.passes.step import Context, Step

SOONER = 0.9
"""Of the whole message's time, what a part with its gather takes at most that is cut for it; what takes less
than its inverse takes about as long. Assumed: a smaller difference is within what costs can tell."""

RELIEF = 0.98
"""Of the busiest card's load, what is left at most where values are cut for it. Assumed, likewise."""


def messages_in_parts(step: Step, context: Context) -> Step:
    """The step with such messages in parts.

    The same for every order of the stages, so that overlap modes stay bitwise equal. Raises PlanError for
    collectives without a cost.
    """
    job, stage_ranks = step.job, step.schedule.stage_ranks
    if not job.message_parts or job.size(AXIS) == 1:
        return step
    costs = context.costs_of(job)
    crossing = [edge for edge in job.edges if stage_ranks[edge.source] != stage_ranks[edge.target]]
    values = _values(job, costs, crossing)
    chosen = _chosen(job, costs, stage_ranks, crossing, values)
    cut = [edge for edge in crossing if edge.value in chosen]
    return replace(step, job=_in_parts(job, cut)) if cut else step


def _values(job: Job, costs: Costs, crossing: Sequence[Edge]) -> list[str]:
    """Step 1."""
    if (AXIS, ALL_GATHER.name) not in costs.collectives or not crossing:
        return []
    differ = differing_in(job, AXIS)
    results = {name for s in job.stages for phase in PHASES for name in results_of(job, s.index, phase)}
    size, stay = job.size(AXIS), differ | results
    return list(dict.fromkeys(e.value for e in crossing if divides(e.spec, size) and e.value not in stay))


def _chosen(
    job: Job, costs: Costs, ranks: Sequence[int], crossing: Sequence[Edge], values: Sequence[str]
) -> Collection[str]:
    """Step 2."""
    size = job.size(AXIS)

    def ratio(edge: Edge) -> float:
        link, nbytes = costs.link(ranks[edge.source], ranks[edge.target]), edge.spec.nbytes
        parts_us = message_us(link, nbytes // size) + axis_time(costs, AXIS, ALL_GATHER.name, nbytes).us
        whole_us = message_us(link, nbytes)
        return parts_us / whole_us if whole_us else math.inf

    ratios = {value: max(ratio(edge) for edge in crossing if edge.value == value) for value in values}
    soon = [value for value in values if ratios[value] < SOONER]
    alike = [value for value in values if ratios[value] * SOONER < 1.0]
    if soon == alike:
        return soon
    loads = [_busiest_us(job, costs, ranks, crossing, cut) for cut in (soon, alike)]
    return alike if loads[1] < RELIEF * loads[0] else soon


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


def _in_parts(job: Job, cut: Sequence[Edge]) -> Job:
    """Step 3."""
    size = job.size(AXIS)
    programs = {stage.index: {phase: list(stage.ops[phase]) for phase in PHASES} for stage in job.stages}
    parts: dict[str, TensorSpec] = {}
    for edge in cut:
        if edge.value not in parts:
            parts[edge.value] = part_of(edge.spec, size)
            made = programs[edge.source][edge.phase]
            at = next(k for k, op in enumerate(made) if op.name == edge.value)
            made[at + 1 : at + 1] = _cut(made[at], edge.spec, size)
        of = programs[edge.target]
        start = f"{edge.value}_gather_{edge.target}"
        for phase in PHASES:
            of[phase] = list(_renamed(of[phase], edge, start))
        of[edge.user_phase] = list(_gathered(of[edge.user_phase], edge, start, size))
    edges = tuple(
        replace(edge, value=_own(edge.value), spec=parts[edge.value]) if edge in cut else edge
        for edge in job.edges
    )
    stages = tuple(
        Stage(index, {phase: tuple(ops) for phase, ops in of.items()}) for index, of in programs.items()
    )
    return replace(job, stages=stages, edges=edges)


def _own(value: str) -> str:
    """The name of a rank's own part."""
    return f"{value}_own"


def _cut(op: Op, spec: TensorSpec, size: int) -> Iterator[Op]:
    """This rank's rows of what an op makes."""
    owner, name, rows = op.alias or op.name, op.name, rows_of(spec)
    if rows != spec:
        name = f"{op.name}_rows"
        yield Op(name, VIEW, (Ref(op.name), rows.shape), (), (rows,), owner, module=op.module)
    part = part_of(spec, size)
    yield Op(_own(op.name), CHUNK, (Ref(name), 0, AXIS, size), (), (part,), owner, module=op.module)


def _renamed(ops: Sequence[Op], edge: Edge, start: str) -> Iterator[Op]:
    """The receiver's ops, with what they read by its name there."""
    for op in ops:
        renamed = with_uses(op, lambda used: f"{used}_at_{edge.target}" if used == edge.value else used)
        yield replace(renamed, alias=start) if op.alias == edge.value else renamed


def _gathered(ops: Sequence[Op], edge: Edge, start: str, size: int) -> Iterator[Op]:
    """The receiver's ops, with the gather before the first that reads."""
    name = f"{edge.value}_at_{edge.target}"
    first = next(op for op in ops if name in op.uses)
    for op in ops:
        if op is first:
            for new in gather(start, _own(edge.value), name, edge.spec, AXIS, size):
                yield replace(new, module=op.module)
        yield op


LISTED = OfStep(120, messages_in_parts)
