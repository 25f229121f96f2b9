"""What a rank has a part of crosses stages as its part: it is gathered by those who read it, not before.

A sequence that tensor-parallel ranks share is gathered for the next product. Where a stage ends between the
two, the stage before would gather it, and all of its ranks would send the whole.

    1. Take the values that other stages read and their own does not, and that are no results.
    2. Follow one back through what puts a gathered value in order, views and copies, as long as nothing else
       reads what is between, to an all-gather over the tensor-parallel axis of what the stage itself made.
    3. That is sent instead; each stage that reads the value gathers, by the same ops.

No number changes. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from stretto.ir.collectives import ALL_GATHER
from stretto.ir.flow import PHASES, results_of
from stretto.ir.gathered import KEEP_ORDER
from stretto.ir.program import VIEWS, WAIT, Edge, Job, Op, Stage
from stretto.parallelize.tensor import AXIS
from stretto.passes.rewrite import read_as, stage_of, with_uses

ORDERING = frozenset((*VIEWS, *KEEP_ORDER, "aten.reshape.default", "aten.permute.default"))
"""Ops of one tensor that a gathered value is put in order by."""


def gather_behind(job: Job) -> Job:
    """See the module. The job itself when nothing that crosses was gathered for others alone."""
    if job.size(AXIS) == 1:
        return job
    for value in dict.fromkeys(edge.value for edge in job.edges):
        edges = [edge for edge in job.edges if edge.value == value]
        chain = _chain(job, job.stages[edges[0].source], value)
        if chain:
            job = _behind(job, edges, chain)
    return job


def _chain(job: Job, stage: Stage, value: str) -> Sequence[Op]:
    """Step 2: the ops from the gather to the value, in order; none where it cannot be."""
    ops = {op.name: op for made in stage.ops.values() for op in made}
    readers: dict[str, int] = defaultdict(int)
    for op in ops.values():
        for name in op.uses:
            readers[name] += 1
    kept = {edge.value for edge in job.edges if edge.source == stage.index and edge.value != value}
    kept |= {name for phase in PHASES for name in results_of(job, stage.index, phase)}
    chain: list[Op] = []
    name = value
    while name in ops and name not in kept and readers[name] == (1 if chain else 0):
        op = ops[name]
        chain.append(op)
        if op.kind is not None:
            gathers = op.target == ALL_GATHER.target and op.lane == AXIS
            return chain[::-1] if gathers and op.args[0].name in ops else ()
        if len(op.uses) != 1 or op.target not in (*ORDERING, WAIT):
            return ()
        [name] = op.uses
    return ()


def _behind(job: Job, edges: Sequence[Edge], chain: Sequence[Op]) -> Job:
    """Step 3."""
    source = edges[0].source
    programs = {s.index: dict(s.ops) for s in job.stages if s.index in {source, *(e.target for e in edges)}}
    gone = {op.name for op in chain}
    part = chain[0].args[0].name
    phase, spec = next(
        (phase, op.outputs[0]) for phase in PHASES for op in programs[source][phase] if op.name == part
    )
    assert spec is not None
    for made in PHASES:
        programs[source][made] = tuple(op for op in programs[source][made] if op.name not in gone)
    for edge in edges:
        names = {name: f"{name}_at_{edge.target}" for name in gone}
        read_as(programs[edge.target], edge, names[edge.value], partial(_renamed, chain, names))
    carried: list[Edge] = []
    for edge in job.edges:
        if edge.value == edges[0].value:
            edge = replace(edge, value=part, phase=phase, spec=spec)
        before = next((one for one in carried if (one.value, one.target) == (edge.value, edge.target)), None)
        if before is None:
            carried.append(edge)
        else:
            # It is sent there for others as well.
            first = min((before.user_phase, edge.user_phase), key=PHASES.index)
            carried[carried.index(before)] = replace(before, user_phase=first)
    kept = tuple(replace(edge, index=index) for index, edge in enumerate(carried))
    stages = tuple(stage_of(s.index, programs[s.index]) if s.index in programs else s for s in job.stages)
    return replace(job, stages=stages, edges=kept)


def _renamed(chain: Sequence[Op], names: Mapping[str, str], module: str) -> list[Op]:
    return [
        replace(with_uses(op, lambda name: names.get(name, name)), name=names[op.name], module=module)
        for op in chain
    ]
