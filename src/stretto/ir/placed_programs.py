"""Places the ops of all programs: what ranks along an axis have of every value (`stretto.ir.placements`).

Values cross stages either way, so each op is placed when its operands are known. An op that has no placement
is reported, and what it makes counts as the rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stretto.ir.flow import PHASES, given_specs
from stretto.ir.kept import rows_shard
from stretto.ir.placement import LOCAL, PlacementError, part
from stretto.ir.placements import Placer
from stretto.ir.program import PARAM, SHARD, Job, Op, Shard, TensorSpec


def placers_of(axis: str, size: int, shards: Mapping[str, Shard]) -> list[Placer]:
    """What places the ops of a program whose parameters are sharded so. shards: by `shards_of`.

    One, or where ranks share shards two: along the first the shards differ, along the second (`copies` ranks
    in a row) they are equal. Raises ValueError where different numbers of ranks share.
    """
    copies = sorted({shard.copies for shard in shards.values()} - {1})
    if len(copies) > 1:
        raise ValueError(
            f"parts are shared by {copies[0]} ranks in one module, and by {copies[1]} in another"
        )
    sizes = [size // copies[0], copies[0]] if copies else [size]
    return [
        Placer(
            axis,
            size,
            {
                name: part(shard.dim, shard.blocks)
                for name, shard in shards.items()
                if number == 0 or shard.copies == 1
            },
            along=along,
        )
        for number, along in enumerate(sizes)
        if along > 1  # else one part, which all ranks keep
    ]


def place_all(
    programs: Sequence[Sequence[Op]], placers: Sequence[Placer], specs: dict[str, TensorSpec]
) -> Iterator[tuple[int, Op, PlacementError]]:
    """Place all ops; yields each that has no placement, with the number of its program, and why.

    specs: of what no op makes; those of the values that are made come to it.
    """
    known = set(specs)
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for number, program in enumerate(programs):
            while at[number] < len(program) and known.issuperset(program[at[number]].uses):
                op = program[at[number]]
                for placer in placers:
                    try:
                        placer.place(op, specs)
                    except PlacementError as trouble:
                        placer.values[op.name] = LOCAL
                        yield number, op, trouble
                if op.spec is not None:
                    specs[op.name] = op.spec
                known.add(op.name)
                at[number] += 1
                moved = True


def programs_of(job: Job) -> list[tuple[int, Sequence[Op]]]:
    """All programs of a job, each with its stage."""
    return [(stage.index, list(_in_order(stage.ops[phase]))) for phase in PHASES for stage in job.stages]


def _in_order(ops: Sequence[Op]) -> Iterator[Op]:
    """Each op after those that it reads: windows say in which order ops run, a stage only which there are."""
    waiting = {op.name: op for op in ops}
    while waiting:
        before = len(waiting)
        for op in list(waiting.values()):
            if waiting.keys().isdisjoint(op.uses):
                yield waiting.pop(op.name)
        if len(waiting) == before:
            return  # a circle, which `stretto.verifying.windows` refuses


def differing_in(job: Job, axis: str) -> set[str]:
    """Names of values that ranks along an axis do not all have in full."""
    placers = placers_of(axis, job.size(axis), shards_of(job, axis))
    for _ in place_all([program for _, program in programs_of(job)], placers, given_specs(job)):
        pass  # who proves programs says so
    kept = (item for placer in placers for item in placer.values.items())
    return {name for name, placement in kept if not placement.is_full}


def shards_of(job: Job, axis: str) -> dict[str, Shard]:
    """Parameter (`param/a`, and `shard/a`, what is kept of it) -> how it is sharded along an axis, of those
    that are."""
    result: dict[str, Shard] = {}
    for parameter in job.parameters:
        for shard in parameter.shards:
            if shard.axis == axis:
                result[PARAM + parameter.name] = shard
                result[SHARD + parameter.tied_to] = rows_shard(job, parameter, shard)
        if axis in parameter.kept:
            result[SHARD + parameter.tied_to] = Shard(axis, 0)
    return result
