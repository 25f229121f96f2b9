"""Which values differ between the ranks of an axis, read off the ops alone.

Ranks along an axis walk one program. What they read decides what differs: shards of parameters, their own
coordinate, their own chunk. Some communications give all the same again (`Kind.differs`).

Two things follow from it. The gradient of a parameter that all ranks hold whole, but use in parts, differs:
it is their part of a sum. And a random op on values that differ must draw differently on each rank, on equal
values the same. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stretto.ir.flow import PHASES
from stretto.ir.program import CHUNK, INDEX, Job, Op


def varying(ops: Iterable[Op], given: Collection[str], axis: str) -> set[str]:
    """Names of values that differ along `axis`; ops in the order of the program. given: names of external
    values that differ (`param/...` of sharded parameters)."""
    found: set[str] = set(given)
    for op in ops:
        if _differs(op, found, axis):
            found.add(op.name)
    return found


def varying_in_job(job: Job, axis: str) -> set[str]:
    """Names of values that differ along `axis` in a job's programs. Names mean the same in every stage."""
    size = job.size(axis)
    found = {
        f"param/{p.name}" for p in job.parameters if any(s.axis == axis and s.copies < size for s in p.shards)
    }
    programs = [stage.ops[phase] for phase in PHASES for stage in job.stages]
    while True:  # values may flow between stages either way
        before = len(found)
        for ops in programs:
            found = varying(ops, found, axis)
        if len(found) == before:
            return found


def _differs(op: Op, differing: Collection[str], axis: str) -> bool:
    if op.kind is not None and op.args[-2] == axis and op.kind.differs != "as given":
        return op.kind.differs == "always"
    if op.target in (INDEX, CHUNK) and op.args[-2] == axis:
        return True
    return any(name in differing for name in op.uses)
