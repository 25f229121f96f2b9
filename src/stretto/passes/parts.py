"""Values that cross stages in parts: each rank of an axis sends its rows alone, and who reads gathers them.

Rows are what the last dim is not: [2, 8, 16] has 16 rows of 16. Which values, and how a sender gets its part
of one, is for `stretto.passes.scatter_borders` and `stretto.passes.messages_in_parts`. Touches `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from stretto.ir.collectives import ALL_GATHER
from stretto.ir.flow import PHASES, results_of
from stretto.ir.placed_programs import differing_in
from stretto.ir.program import CHUNK, VIEW, WAIT, Edge, Job, Op, Ref, TensorSpec
from stretto.parallelize.tensor import AXIS
from stretto.passes.rewrite import read_as, stage_of


def rows_of(spec: TensorSpec) -> TensorSpec:
    """The same elements as a matrix of rows. spec: of a tensor in one piece, of at least one dim."""
    return TensorSpec((spec.numel // spec.shape[-1], spec.shape[-1]), spec.dtype)


def part_of(spec: TensorSpec, size: int) -> TensorSpec:
    """One rank's rows."""
    rows = rows_of(spec)
    return TensorSpec((rows.shape[0] // size, rows.shape[1]), rows.dtype)


def divisible(job: Job, edges: Sequence[Edge]) -> list[str]:
    """Values of these edges that all ranks of the axis hold alike, in one piece, of rows that it divides, and
    that are no results of the step: those that may cross in parts."""
    if not edges:
        return []
    size = job.size(AXIS)
    results = {name for s in job.stages for phase in PHASES for name in results_of(job, s.index, phase)}
    stay = differing_in(job, AXIS) | results

    def fits(spec: TensorSpec) -> bool:
        whole = spec.stride is None and len(spec.shape) > 1 and spec.numel > 0
        return whole and rows_of(spec).shape[0] % size == 0

    return list(dict.fromkeys(e.value for e in edges if e.value not in stay and fits(e.spec)))


def in_parts(job: Job, edges: Sequence[Edge], own: Mapping[str, str]) -> Job:
    """The job in which edges carry a rank's rows of their values. own: value -> the name of these rows, which
    the sender's ops make already. A receiver gathers them before the first op that reads, and calls the whole
    by a name of its own."""
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
    found: list[Op] = []
    if rows != spec:
        found.append(Op(f"{name}_rows", VIEW, (Ref(value), rows.shape), (), (rows,), value, module=module))
        value = f"{name}_rows"
    part = part_of(rows, size)
    return [*found, Op(name, CHUNK, (Ref(value), 0, AXIS, size), (), (part,), value, module=module)]


def _gathered(edge: Edge, part: str, name: str, size: int, module: str) -> list[Op]:
    """The ops that make `name` of every rank's part."""
    rows, start = rows_of(edge.spec), f"{edge.value}_gather_{edge.target}"
    wait = name if rows == edge.spec else f"{start}_wait"
    found = [Op(start, ALL_GATHER.target, (Ref(part), AXIS, size), (), (rows,), module=module)]
    found.append(Op(wait, WAIT, (Ref(start),), (), (rows,), start, module=module))
    if wait != name:
        found.append(Op(name, VIEW, (Ref(wait), edge.spec.shape), (), (edge.spec,), start, module=module))
    return found
