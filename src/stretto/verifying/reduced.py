"""Proves what comes of the programs that run once a step: at the end gradients are made of those of their
tie, each once, and of no other, and parameters of what is kept of them. Along each axis ranks have equal
ones, partial sums or parts: the programs are placed as all others are (`stretto.ir.placements`), and at the
end a gradient is as what is kept of its parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from stretto.ir.axes import Sums, sums_of
from stretto.ir.flow import given_specs
from stretto.ir.kept import shard_spec
from stretto.ir.placement import EQUAL, LOCAL, SUM, Placement, PlacementError, part
from stretto.ir.placements import Placer
from stretto.ir.plan import LOSS, Plan
from stretto.ir.program import (
    FREE,
    GRAD,
    PARAM,
    SHARD,
    STEP_LOSS,
    Job,
    Parameter,
    TensorSpec,
)
from stretto.ir.transfers import tied_ranks
from stretto.schedule.sums import TIED, reduces_loss
from stretto.verifying.fault import Fault
from stretto.verifying.pieces import Pieces, pieces_of, walked

SUM_IT = "Add a sum that has it, or take out what is too much; others wait"


def reduction_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ranks have along axes. The plan must have no other fault."""
    return [fault for rank in range(plan.ranks) for fault in _reduced(plan, rank)]


def made_of_faults(plan: Plan, rank: int) -> Iterator[Fault]:
    """Every fault of whom things are made of on a rank: by name, the pieces that lie in it side by side."""
    ties: dict[str, list[str]] = defaultdict(list)
    for parameter in _trained(plan.job, plan.schedule.stages_of(rank)):
        ties[parameter.tied_to].append(GRAD + parameter.name)
    job, specs, wrote = plan.job, given_specs(plan.job), dict[str, TensorSpec | None]()
    stages = plan.schedule.stages_of(rank)
    read = [p for p in job.parameters if p.is_made and any(stage in stages for stage in p.stages)]
    made: dict[str, Pieces] = {STEP_LOSS: ((STEP_LOSS,),)}
    made |= {name: ((name,),) for names in ties.values() for name in names}
    made |= {SHARD + p.tied_to: ((SHARD + p.tied_to,),) for p in read}
    lanes = {LOSS: [STEP_LOSS]} | {TIED + name: names for name, names in ties.items()}
    summed: set[tuple[str, str]] = set()
    for op in walked(plan.once(rank), made):
        for name in op.uses:
            if name not in made:
                yield Fault(rank, op.name, f"reads {name}, which this rank does not have", "Take it out")
        if op.kind is not None and op.kind.sums and op.how != "sum":
            yield Fault(rank, op.name, f"takes the {op.how} of gradients, or of the loss", 'Write "sum"')
        if op.kind is not None:
            owners = {one for piece in pieces_of(op, made) for one in piece}
            summed.update((one, op.lane) for one in owners)
            axes = dict(job.axes)
            fits = owners <= {*lanes[op.lane]} if op.lane in lanes else op.lane in axes
            if not fits or (STEP_LOSS in owners and op.lane != LOSS):
                what = f"reduces {', '.join(sorted(owners))} on communicator {op.lane}, which is not for them"
                fix = f"Sum the loss on {LOSS}, copies of a tie on {TIED}<its name>, others on an axis"
                yield Fault(rank, op.name, what, fix)
        if op.writes is not None and op.target != FREE:
            wrote[op.writes] = op.spec
    ends = specs | {GRAD + p.name: shard_spec(job, p) for p in job.parameters if p.kept}
    for name, spec in wrote.items():
        given = ends.get(name)
        if given is None or spec is None or (spec.shape, spec.dtype) != (given.shape, given.dtype):
            what = f"is {spec or 'no tensor'} in the end, instead of {given or 'nothing'}"
            yield Fault(rank, name, what, "Write what has its shape and dtype")
    for p in read:
        if PARAM + p.name in wrote and made.get(PARAM + p.name, ()) not in ((), ((SHARD + p.tied_to,),)):
            yield Fault(rank, PARAM + p.name, "is made of another parameter", "Make it of its own")
    for names in ({STEP_LOSS: [STEP_LOSS]} | ties).values():
        left = [one for name in names for piece in made.get(name, ()) for one in piece]
        if sorted(left) != sorted(names):
            what = f"is made of {', '.join(left) or 'nothing'} at the end, instead of {', '.join(names)}"
            yield Fault(rank, names[0], what, "Reduce each gradient once, into its own name")
    for parameter in _trained(plan.job, plan.schedule.stages_of(rank)):
        for shard in parameter.shards:
            name, shared = GRAD + parameter.name, shard.copies > 1 and shard.axis in parameter.partial
            if shared and (name, shard.axis) not in summed:
                yield Fault(rank, name, f"is never summed over {shard.axis}", SUM_IT)


def _reduced(plan: Plan, rank: int) -> Iterator[Fault]:
    """Of one rank, along each axis."""
    job, program = plan.job, plan.once(rank)
    stages = plan.schedule.stages_of(rank)
    here = list(_trained(job, stages))
    tied = [name for name, ranks in tied_ranks(job, plan.schedule.stage_ranks).items() if rank in ranks]
    freed = {op.writes for op in program if op.target == FREE}  # several of a tie become one
    specs = given_specs(job) | {op.name: op.spec for op in program if op.spec is not None}

    def proved(
        axis: str, size: int, begin: dict[str, Placement], end: dict[str, Placement], said: str
    ) -> Iterator[Fault]:
        placer, now = Placer(axis, size, begin), dict(specs)
        for op in program:
            try:
                placer.place(op, now)
            except PlacementError as trouble:
                yield Fault(rank, f"{op.name} ({op.target})", f"{trouble} (along {said})", trouble.fix)
                placer.values[op.name] = LOCAL
            if op.writes is not None and op.spec is not None:
                placer.values[op.writes] = placer.of(op.name)
                now[op.writes] = op.spec
        for name, want in end.items():
            kept, parts = placer.of(name), ("part", "local")
            right = kept.kind in parts if want.kind in parts else kept.is_full
            if name not in freed and not right:
                what = f"is never summed over {said}" if kept == SUM else f"is {kept} along {said} at the end"
                yield Fault(rank, name, what, SUM_IT)

    written = {op.writes for op in program}
    made = [p for p in job.parameters if p.is_made and any(s in stages for s in p.stages)]
    for axis, size in job.axes:
        if size > 1:
            begin = {GRAD + p.name: _before(p, axis, size) for p in here}
            begin |= {SHARD + p.tied_to: _as_kept(p, axis, size) for p in made}
            end = {GRAD + p.name: _as_kept(p, axis, size) for p in here}
            end |= {name: _as_sharded(p, axis, size) for p in made if (name := PARAM + p.name) in written}
            yield from proved(axis, size, begin, end, axis)
    for name in tied:
        copies = {GRAD + p.name: SUM for p in here if p.tied_to == name}
        yield from proved(TIED + name, 2, copies, dict.fromkeys(copies, EQUAL), "the ranks that have a copy")
    if reduces_loss(job, plan.ranks):
        yield from proved(LOSS, 2, {STEP_LOSS: SUM}, {STEP_LOSS: EQUAL}, "all ranks")


def _trained(job: Job, stages: Collection[int]) -> Iterator[Parameter]:
    """Parameters whose gradients these stages have; of a tie to which they add nothing, the first."""
    groups: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in job.parameters:
        if any(stage in stages for stage in parameter.stages):
            groups[parameter.tied_to].append(parameter)
    trained = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    for name, group in groups.items():
        if name in trained:
            adding = [p for p in group if any(stage in stages for stage, _, _ in p.grads)]
            yield from adding or group[:1]


def _before(parameter: Parameter, axis: str, size: int) -> Placement:
    """What a rank has of a gradient before it is reduced."""
    if (sharded := _as_sharded(parameter, axis, size)) != EQUAL:
        return sharded
    if parameter.scattered and axis in parameter.kept:
        return part(0)
    summed = axis in parameter.partial or (sums_of(axis) is Sums.ALL and not parameter.is_sharded(axis))
    return SUM if summed else EQUAL


def _as_sharded(parameter: Parameter, axis: str, size: int) -> Placement:
    """What a rank has of a parameter, as ops read it."""
    shard = next((one for one in parameter.shards if one.axis == axis), None)
    if shard is None or shard.parts(size) == 1:
        return EQUAL
    return LOCAL if shard.copies > 1 else part(shard.dim, shard.blocks)


def _as_kept(parameter: Parameter, axis: str, size: int) -> Placement:
    """What a rank keeps of a parameter."""
    return part(0) if axis in parameter.kept else _as_sharded(parameter, axis, size)
