"""Proves what comes of the programs that run once a step: at the end gradients are made of those of their
tie, each once, and of no other, and parameters of what is kept of them. Along each axis ranks have equal
ones, partial sums or parts: the programs are placed as all others are (`stretto.ir.placements`), and at the
end a gradient is as what is kept of its parameter. What an update changes is made of itself and of the
gradients of its tie, each once, and placed as before. It changes all that ops read of what ranks keep. Of
all pipeline ranks together, the norm is made of one gradient of each tie.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from stretto.ir.axes import Sums, sums_of
from stretto.ir.flow import given_specs
from stretto.ir.kept import rows_shard, shard_spec
from stretto.ir.placement import EQUAL, LOCAL, SUM, Placement, PlacementError, part
from stretto.ir.placements import Placer
from stretto.ir.plan import LOSS, NORM, Plan
from stretto.ir.program import (
    FREE,
    GRAD,
    PARAM,
    SHARD,
    STEP_LOSS,
    STEP_NORM,
    Job,
    Op,
    Parameter,
    Ref,
    Shard,
    TensorSpec,
)
from stretto.ir.transfers import tied_ranks
from stretto.ir.updates import SQUARES, UPDATE, clipped_by, updated
from stretto.schedule.sums import TIED, reduces_loss
from stretto.verifying.buckets import BucketWalk
from stretto.verifying.fault import Fault
from stretto.verifying.pieces import Pieces, pieces_of, walked

SUM_IT = "Add a sum that has it, or take out what is too much; others wait"


def reduction_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ranks have along axes. The plan must have no other fault."""
    return [fault for rank in range(plan.ranks) for fault in _reduced(plan, rank)]


def made_of_faults(plan: Plan, rank: int) -> Iterator[Fault]:
    """Every fault of whom things are made of on a rank: by name, the pieces that lie in it side by side."""
    ties: dict[str, list[str]] = defaultdict(list)
    here = list(_trained(plan.job, plan.schedule.stages_of(rank)))
    for parameter in here:
        ties[parameter.kept_as].append(GRAD + parameter.name)
    job, specs, wrote = plan.job, given_specs(plan.job), dict[str, TensorSpec | None]()
    stages = plan.schedule.stages_of(rank)
    read = [p for p in job.parameters if p.is_made and any(stage in stages for stage in p.stages)]
    made: dict[str, Pieces] = {STEP_LOSS: ((STEP_LOSS,),)}
    made |= {name: ((name,),) for names in ties.values() for name in names}
    changed = _changed(job, stages)
    made |= {name: ((name,),) for name in (*changed, *(SHARD + p.kept_as for p in read))}
    buckets = BucketWalk(job, read, here)
    made |= dict(buckets.begin())
    kept = {name: [one for piece in made[name] for one in piece] for name in changed}
    values = specs | {op.name: op.spec for op in plan.once(rank)}
    lanes = {LOSS: [STEP_LOSS]} | {TIED + name: names for name, names in ties.items()}
    lanes[NORM] = [name for names in ties.values() for name in names]
    summed: set[tuple[str, str]] = set()
    norm = next((op.name for op in plan.once(rank) if STEP_NORM in op.writes), "")
    for op in walked(plan.once(rank), made, buckets.known):
        for name in op.uses:
            if name not in made:
                yield Fault(rank, op.name, f"reads {name}, which this rank does not have", "Take it out")
        if op.kind is not None and op.kind.sums and op.how != "sum":
            yield Fault(rank, op.name, f"takes the {op.how} of gradients, or of the loss", 'Write "sum"')
        if op.kind is not None:
            owners = {one for piece in pieces_of(op, made) for one in piece}
            if op.made.shape:  # and not the norm of all, a number
                summed.update((one, op.lane) for one in owners)
            axes = dict(job.axes)
            fits = owners <= {*lanes[op.lane]} if op.lane in lanes else op.lane in axes
            if not fits or (STEP_LOSS in owners and op.lane != LOSS):
                what = f"reduces {', '.join(sorted(owners))} on communicator {op.lane}, which is not for them"
                fix = f"Sum the loss on {LOSS}, copies of a tie on {TIED}<its name>, others on an axis"
                yield Fault(rank, op.name, what, fix)
        yield from buckets.faults(rank, op, made, values)
        if op.target == SQUARES:
            yield from _copies(rank, op, job)
        elif op.target == UPDATE:
            yield from _alike(rank, op, specs | wrote)
            if clipped_by(op) != (None if job.clip_norm is None else (Ref(norm), job.clip_norm)):
                what = f"does not scale as clip_norm = {job.clip_norm} asks"
                yield Fault(rank, op.name, what, f"Scale by {norm or 'nothing'}")
        elif op.target != FREE:
            wrote.update(dict.fromkeys(op.writes, op.spec))
            values.update(dict.fromkeys(op.writes, op.spec))
        else:
            wrote = {name: spec for name, spec in wrote.items() if name not in op.writes}
    yield from buckets.left(rank)
    ends = specs | {GRAD + p.name: shard_spec(job, p) for p in job.parameters if p.kept}
    for name, spec in wrote.items():
        given = ends.get(name)
        if given is None or spec is None or (spec.shape, spec.dtype) != (given.shape, given.dtype):
            what = f"is {spec or 'no tensor'} in the end, instead of {given or 'nothing'}"
            yield Fault(rank, name, what, "Write what has its shape and dtype")
    for p in read:
        if PARAM + p.name in wrote and made.get(PARAM + p.name, ()) not in ((), ((SHARD + p.tied_to,),)):
            yield Fault(rank, PARAM + p.name, "is made of another parameter", "Make it of its own")
    once = "Reduce each gradient once, into its own name"
    ends_as = [([STEP_LOSS], [STEP_LOSS], once)]
    for names in ties.values():
        ends_as.append((names, [], "Free it behind its update") if job.updates else (names, names, once))
    update = "Update each parameter once, by its own gradient"
    ends_as += [([name], [*kept[name], *ties[p.kept_as]], update) for name, p in changed.items()]
    for names, wanted, fix in ends_as:
        left = [one for name in names for piece in made.get(name, ()) for one in piece]
        if sorted(left) != sorted(wanted):
            is_of, of = (", ".join(one) or "nothing" for one in (left, wanted))
            yield Fault(rank, names[0], f"is made of {is_of} at the end, instead of {of}", fix)
    for parameter in _trained(plan.job, plan.schedule.stages_of(rank)):
        for shard in parameter.shards:
            name, shared = GRAD + parameter.name, shard.copies > 1 and shard.axis in parameter.partial
            if shared and (name, shard.axis) not in summed:
                yield Fault(rank, name, f"is never summed over {shard.axis}", SUM_IT)


def norm_faults(plan: Plan) -> Iterator[Fault]:
    """Every fault of whose gradients the norm is made of: of all trained ties, each once."""
    job, fix = plan.job, "Count each gradient once, on one pipeline rank"
    ties = {GRAD + parameter.name: parameter.tied_to for parameter in job.parameters}
    ranks: dict[str, list[int]] = {p.tied_to: [] for p in job.parameters if p.grads}
    for rank in range(plan.ranks) if job.clip_norm is not None else ():
        here = [GRAD + p.name for p in _trained(job, plan.schedule.stages_of(rank))]
        made: dict[str, Pieces] = {name: ((name,),) for name in here}
        of_norm: Pieces = ()
        for op in walked(plan.once(rank), made, {}):
            of_norm = of_norm if STEP_NORM not in op.writes else pieces_of(op, made)
        counted = Counter(one for piece in of_norm for one in piece)
        of_ties: dict[str, list[int]] = defaultdict(list)
        for name in dict.fromkeys((*here, *counted)):  # of a tie, what all uses here add is one gradient
            of_ties[ties.get(name, name)].append(counted[name])
        for tie, times in of_ties.items():
            ranks.setdefault(tie, []).extend([rank] * times[0])
            if len({*times}) > 1:
                what = f"has what uses of the parameter add {', '.join(map(str, times))} times"
                yield Fault(rank, f"{STEP_NORM}, {GRAD}{tie}", what, fix)
    for tie, counting in ranks.items() if job.clip_norm is not None else ():
        if len(counting) != 1:
            on = f"on ranks {', '.join(map(str, counting))}" if counting else "on no rank"
            where = f"{STEP_NORM}, {GRAD}{tie}"
            yield Fault(next(iter(counting), None), where, f"is counted {len(counting)} times, {on}", fix)


def _reduced(plan: Plan, rank: int) -> Iterator[Fault]:
    """Of one rank, along each axis."""
    job, program = plan.job, plan.once(rank)
    stages = plan.schedule.stages_of(rank)
    here, changed = list(_trained(job, stages)), _changed(job, stages)
    tied = [name for name, ranks in tied_ranks(job, plan.schedule.stage_ranks).items() if rank in ranks]
    freed = {name for op in program if op.target == FREE for name in op.writes}  # several become one
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
            for name, spec in op.written:
                kept = placer.of(op.name)
                as_row = name in in_rows and name in end and _in_parts(kept, end[name])
                placer.values[name] = end[name] if as_row else kept
                now[name] = spec
        for name, want in end.items():
            kept = placer.of(name)
            right = _in_parts(kept, want) or (not _in_parts(want) and kept.is_full)
            if name not in freed and not right:
                what = f"is never summed over {said}" if kept == SUM else f"is {kept} along {said} at the end"
                yield Fault(rank, name, what, SUM_IT)

    in_rows = {GRAD + p.name for p in here if p.slot is not None and p.leads}  # no part's dims are theirs
    written = {name for op in program for name in op.writes}
    made = [p for p in job.parameters if p.is_made and any(s in stages for s in p.stages)]
    for axis, size in job.axes:
        if size > 1:
            begin = {GRAD + p.name: _before(p, axis, size) for p in here}
            begin |= {SHARD + p.kept_as: _as_kept(job, p, axis, size) for p in made}
            end = {GRAD + p.name: _as_kept(job, p, axis, size) for p in here}
            read = {PARAM + p.name: p.shards for p in made if PARAM + p.name in written}
            end |= {name: _as_sharded(shards, axis, size) for name, shards in read.items()}
            kept = {name: _as_kept(job, p, axis, size) for name, p in changed.items()}
            yield from proved(axis, size, begin | kept, end | kept, axis)
    for name in tied:
        copies = {GRAD + p.name: SUM for p in here if p.tied_to == name}
        end = dict.fromkeys((*copies, *(n for n, p in changed.items() if p.tied_to == name)), EQUAL)
        yield from proved(TIED + name, 2, copies, end, "the ranks that have a copy")
    if job.clip_norm is not None and plan.ranks > 1:
        own = dict.fromkeys((*(GRAD + p.name for p in here), *changed), LOCAL)
        yield from proved(NORM, 2, own, {STEP_NORM: EQUAL}, "pipeline ranks")
    if reduces_loss(job, plan.ranks):
        yield from proved(LOSS, 2, {STEP_LOSS: SUM}, {STEP_LOSS: EQUAL}, "all ranks")


def _in_parts(*placements: Placement) -> bool:
    """Whether ranks have parts of all of these."""
    return all(placement.kind in ("part", "local") for placement in placements)


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


def _changed(job: Job, stages: Sequence[int]) -> dict[str, Parameter]:
    """What updates change on a rank with these stages: what it keeps, by all names that ops read."""
    if not job.updates:
        return {}
    trained = {parameter.tied_to: parameter for parameter in _trained(job, stages)}
    ops = [op for stage in stages for op in job.stages[stage].all_ops if op.target != UPDATE]
    read = {name for op in ops for name in op.uses}
    made = {name for op in ops for name in op.writes}
    changed: dict[str, Parameter] = {}
    for parameter in job.parameters:
        own, rows, tie = PARAM + parameter.name, SHARD + parameter.kept_as, parameter.tied_to
        there = own in read or any(stage in stages for stage in parameter.stages)
        if tie in trained and there:
            changed[rows if parameter.is_made or own in made or rows in read else own] = trained[tie]
    return changed


def _alike(rank: int, op: Op, specs: Mapping[str, TensorSpec | None]) -> Iterator[Fault]:
    """An update changes what has the shape and dtype of its gradient."""
    for gradient, names in updated(op):
        for name in names:
            one, other = (None if s is None else (s.shape, s.dtype) for s in map(specs.get, (gradient, name)))
            if one != other:
                what = f"changes {name}, {specs.get(name)}, by {gradient}, {specs.get(gradient)}"
                yield Fault(rank, op.name, what, "Use the gradient of its own rows")


def _copies(rank: int, op: Op, job: Job) -> Iterator[Fault]:
    """Squares of what several ranks have count once."""
    known = {GRAD + p.name: p for p in job.parameters}
    for name in op.uses:
        copies = _alike_over_axes(job, known[name]) if name in known else op.args[1]
        if copies != op.args[1]:
            what = f"counts {name} as if {op.args[1]} ranks had the same, and {copies} do"
            yield Fault(rank, op.name, what, f"Divide by {copies}")


def _alike_over_axes(job: Job, parameter: Parameter) -> int:
    """How many ranks have the same part of it, of those over which there are parts."""
    alike = 1
    for shard in parameter.shards:
        parts = {shard.part(coordinate) for coordinate in range(job.size(shard.axis))}
        alike *= job.size(shard.axis) // len(parts) if len(parts) > 1 else 1
    return alike


def _before(parameter: Parameter, axis: str, size: int) -> Placement:
    """What a rank has of a gradient before it is reduced."""
    if (sharded := _as_sharded(parameter.shards, axis, size)) != EQUAL:
        return sharded
    if parameter.scattered and axis in parameter.kept:
        return part(0)
    summed = axis in parameter.partial or (sums_of(axis) is Sums.ALL and not parameter.is_sharded(axis))
    return SUM if summed else EQUAL


def _as_sharded(shards: Iterable[Shard], axis: str, size: int) -> Placement:
    """What a rank has of what is sharded so."""
    shard = next((one for one in shards if one.axis == axis), None)
    if shard is None or shard.parts(size) == 1:
        return EQUAL
    return LOCAL if shard.copies > 1 else part(shard.dim, shard.blocks)


def _as_kept(job: Job, parameter: Parameter, axis: str, size: int) -> Placement:
    """What a rank keeps of a parameter."""
    if axis in parameter.kept:
        return part(0)
    if parameter.slot is not None:  # what lies in one row is cut along other dims
        return EQUAL if _as_sharded(parameter.shards, axis, size) == EQUAL else LOCAL
    return _as_sharded([rows_shard(job, parameter, shard) for shard in parameter.shards], axis, size)
