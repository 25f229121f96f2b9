"""Proves what runs once a step: that it reads what it is to read, whatever the order; that gradients and the
loss are reduced over all ranks that have partial sums of them; and that ranks start what joins them in one
order.

1. Every op of these programs runs once, on the rank whose program it is in.
2. What lives over the step has a history: what was added, and which ops have written it. By itself one
   program runs before all actions and the other behind them, and each op reads some history, ops of actions
   too. In the plan's order each must read the same one: so no reduction begins before the last addition, and
   nothing is read that is not there yet, or no longer. Memory in which a collective works is left alone until
   its wait.
3. At the end gradients are made of those of their tie, each once, and of no other, and parameters of what
   is kept of them. Along each axis ranks have equal ones, partial sums or parts: the programs are placed as all
   others are (`stretto.ir.placements`), and at the end a gradient is as what is kept of its parameter.
4. Pipeline ranks start the collectives that join them in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from stretto.ir.action import AFTER, BEFORE, ONCE, ONCE_PHASES
from stretto.ir.axes import Sums, sums_of
from stretto.ir.flow import OVER_STEP, PHASES, given_specs, made_parameters
from stretto.ir.kept import shard_spec
from stretto.ir.placement import EQUAL, LOCAL, SUM, Placement, PlacementError, part
from stretto.ir.placements import Placer
from stretto.ir.plan import LOSS, ItemKind, Plan
from stretto.ir.program import (
    FREE,
    GETITEM,
    GRAD,
    PARAM,
    SHARD,
    STEP_LOSS,
    WAIT,
    Job,
    Op,
    Parameter,
    TensorSpec,
)
from stretto.ir.transfers import tied_ranks
from stretto.schedule.sums import TIED, reduces_loss
from stretto.verifying.fault import Fault
from stretto.verifying.pieces import Pieces, pieces_of, walked
from stretto.verifying.trace import EventKind, trace_of

SUM_IT = "Add a sum that has it, or take out what is too much; others wait"


def over_step_faults(plan: Plan) -> list[Fault]:
    """Every fault of what runs once a step, but those along axes. References must be sound."""
    result: list[Fault] = []
    for rank in range(plan.ranks):
        result += _in_place(plan, rank)
        result += _History(plan, rank).faults()
        result += _own(plan, rank)
    result += _one_order(plan)
    return result


def reduction_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ranks have along axes (step 3). The plan must have no other fault."""
    return [fault for rank in range(plan.ranks) for fault in _reduced(plan, rank)]


def _in_place(plan: Plan, rank: int) -> Iterator[Fault]:
    """What runs of these programs name: ops alone, of this rank, once a step."""
    own = min(plan.schedule.stages_of(rank), default=-1)
    for stage in plan.schedule.stages_of(rank):
        if stage != own and any(plan.job.stages[stage].ops.get(phase) for phase in ONCE_PHASES):
            what = f"stage {stage} is not the first of its rank"
            yield Fault(rank, f"what stage {stage} does once a step", what, "Put it into the first stage")
    for instruction in plan.orders[rank]:
        window = plan.windows.get(str(instruction.ref))
        for part_at, (stage, phase) in enumerate(window.parts if window is not None else ()):
            if phase not in ONCE_PHASES or window is None:
                continue
            if plan.rank_of(stage) != rank:
                what = f"runs what rank {plan.rank_of(stage)} does once a step"
                yield Fault(rank, str(instruction), what, "Run its own")
            elif instruction.microbatches[part_at] != ONCE:
                what = "binds what runs once a step to a microbatch"
                yield Fault(rank, str(instruction), what, f"Bind it to {ONCE}")
            elif any(item.part == part_at and item.kind is not ItemKind.OP for item in window.items):
                yield Fault(rank, str(instruction), f"has messages in {phase}", "Move them to an action")


Position = tuple[int, int]
"""(instruction of the rank's order, item of its window)."""


@dataclass(slots=True)
class _Contents:
    """By name, what has happened to it. Of additions only the last counts: ops read what is complete."""

    of: dict[str, int] = field(default_factory=dict)

    def complete(self, name: str) -> None:
        self.of[name] = hash((name, self.of.get(name)))

    def run(self, op: Op) -> None:
        made = hash((op.name, *(self.of.get(name) for name in op.uses)))
        self.of[op.name] = made
        if op.writes is not None:
            self.of[op.writes] = 0 if op.target == FREE else made


@dataclass(slots=True)
class _Memory:
    """Where values lie, and which collectives are under way there."""

    lies_in: dict[str, str] = field(default_factory=dict)
    under_way: dict[str, Op] = field(default_factory=dict)
    """Memory -> the start."""

    def run(self, op: Op) -> Iterator[tuple[str, str]]:
        """Why the op may not run now."""
        # What lies side by side is apart.
        root = self._root(op.uses[0]) if op.alias is not None and op.target != GETITEM else op.name
        in_place = op.kind is not None and op.alias is not None
        if op.target == WAIT:
            self.under_way = {at: start for at, start in self.under_way.items() if start.name not in op.uses}
        for name in op.uses:
            start = self.under_way.get(self._root(name))
            if start is not None and (in_place or start.alias is not None):
                yield f"reads {name} while {start.name} is under way in its memory", "Move it after its wait"
        if op.kind is not None:
            self.under_way[self._root(op.uses[0])] = op
        self.lies_in[op.name] = root
        if op.writes is not None:
            self.lies_in[op.writes] = root

    def _root(self, name: str) -> str:
        return self.lies_in.get(name, name)


class _History:
    """Step 2 of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.last = _last_adds(plan, rank)
        self.program = plan.once(rank)
        self.expected: dict[str, dict[str, int | None]] = {}
        contents = _Contents()
        self._run(plan.once(rank, BEFORE), contents)
        self.made = {name: contents.of.get(name) for name in made_parameters(plan.job)}
        for name in self.last:
            contents.complete(name)
        self._run(plan.once(rank, AFTER), contents)
        self.ends = contents.of

    def _run(self, program: Sequence[Op], contents: _Contents) -> None:
        for op in program:
            self.expected[op.name] = {name: contents.of.get(name) for name in op.uses}
            contents.run(op)

    def _steps(self) -> list[tuple[Position, str | Op | _Reads]]:
        """In the plan's order: what is complete then, ops, and the first and last reads of parameters."""
        result: list[tuple[Position, str | Op | _Reads]] = [(at, name) for name, at in self.last.items()]
        result += _ends_of_reads(self.plan, self.rank, self.made)
        ops = {op.name: op for op in self.program}
        for at, instruction in enumerate(self.plan.orders[self.rank]):
            window = self.plan.windows.get(str(instruction.ref))
            if window is not None and len(window.actions) < len(window.parts):
                result += [
                    ((at, k), ops[str(item.ref)])
                    for k, item in enumerate(window.items)
                    if item.part not in window.actions and item.ref in ops
                ]
        return sorted(result, key=lambda step: step[0])

    def faults(self) -> Iterator[Fault]:
        contents, memory = _Contents(), _Memory()
        done: set[str] = set()
        sound = True
        for at, op in self._steps():
            if isinstance(op, str):
                contents.complete(op)
                continue
            if isinstance(op, _Reads):
                if contents.of.get(op.name) != self.made[op.name]:
                    yield self._fault(at, op.op, *self._wrong(op.name, at, done))
                continue
            if op.name in done:
                yield self._fault(at, op.name, "is there a second time", "Keep one")
                sound = False
                continue
            done.add(op.name)
            for name, content in self.expected[op.name].items():
                if contents.of.get(name) != content:
                    yield self._fault(at, op.name, *self._wrong(name, at, done))
                    sound = False
                    if content is not None:
                        contents.of[name] = content
            for wrong in memory.run(op):
                yield self._fault(at, op.name, *wrong)
            contents.run(op)
        for op in self.program:
            if op.name not in done:
                yield Fault(self.rank, op.name, "never runs", "Add it to a window")
                sound = False
        for name in sorted({op.writes for op in self.program if op.writes is not None and sound}):
            if contents.of[name] != self.ends[name]:
                what = "is something else at the end than what its program makes of it"
                yield Fault(self.rank, name, what, "Write it in the order of the program")

    def _wrong(self, name: str, at: Position, done: set[str]) -> tuple[str, str]:
        """Why an op reads something else than it should."""
        if not name.startswith(OVER_STEP) and name not in self.made:
            return f"reads {name}, which is not there yet", f"Move it after {name}"
        last = self.last.get(name, at)
        if last > at:
            does = f"`{self.plan.orders[self.rank][last[0]]}` has added its part of {name}"
            return f"reads {name} before {does}", "Move it after that"
        before = [op.name for op in self.program if op.writes == name]
        late = next((one for one in before if one not in done), None)
        if late is not None:
            return f"reads {name} before {late} has written it", f"Move it after {late}"
        if not before and name in self.made:
            return f"reads {name}, which no op makes", "Add one that does"
        return f"reads {name} after {before[-1] if before else 'it'} has changed it", "Move it before that"

    def _fault(self, at: Position, op: str, what: str, fix: str) -> Fault:
        window = self.plan.windows[str(self.plan.orders[self.rank][at[0]].ref)]
        return Fault(self.rank, f"window {window.name}, {op}", what, fix)


@dataclass(frozen=True, slots=True)
class _Reads:
    """An op of an action reads a parameter that is made."""

    op: str
    name: str


def _ends_of_reads(plan: Plan, rank: int, made: Collection[str]) -> Iterator[tuple[Position, _Reads]]:
    """Of each parameter, where the rank reads it first and last."""
    if not made:
        return
    reads = {
        (stage.index, op.name): names
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if (names := [name for name in op.uses if name in made])
    }
    inside = {
        window.name: [
            (k, str(item.ref), name)
            for k, item in enumerate(window.items)
            if item.kind is ItemKind.OP
            for name in reads.get((window.parts[item.part][0], str(item.ref)), ())
        ]
        for window in plan.windows.values()
    }
    first: dict[str, tuple[Position, _Reads]] = {}
    last: dict[str, tuple[Position, _Reads]] = {}
    for at, run, _ in plan.runs(rank):
        for k, op, name in inside[str(run.ref)]:
            last[name] = (at, k), _Reads(op, name)
            first.setdefault(name, last[name])
    yield from (*first.values(), *last.values())


def _last_adds(plan: Plan, rank: int) -> dict[str, Position]:
    """What lives over the step -> where the rank adds to it last."""
    adds: dict[tuple[int, str | int], list[str]] = defaultdict(list)
    adds[plan.job.loss].append(STEP_LOSS)
    for parameter in plan.job.parameters:
        for stage, _, value in parameter.grads:
            adds[stage, value].append(GRAD + parameter.name)
    inside = {
        window.name: {
            name: at
            for at, item in enumerate(window.items)
            if item.kind is ItemKind.OP
            for name in adds.get((window.parts[item.part][0], item.ref), ())
        }
        for window in plan.windows.values()
    }
    result: dict[str, Position] = {}
    for at, run, _ in plan.runs(rank):
        result.update({name: (at, item) for name, item in inside[str(run.ref)].items()})
    return result


def _own(plan: Plan, rank: int) -> Iterator[Fault]:
    """Step 3 of one rank: of whom everything is made, by name the pieces that lie in it side by side."""
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
        if PARAM + p.name in wrote and made[PARAM + p.name] != ((SHARD + p.tied_to,),):
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
    """Step 3 of one rank, along each axis."""
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
            begin = {GRAD + p.name: _before(p, axis) for p in here}
            begin |= {SHARD + p.tied_to: part(0) if axis in p.kept else _as_sharded(p, axis) for p in made}
            end = {GRAD + p.name: part(0) if axis in p.kept else _as_sharded(p, axis) for p in here}
            end |= {name: _as_sharded(p, axis) for p in made if (name := PARAM + p.name) in written}
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


def _before(parameter: Parameter, axis: str) -> Placement:
    """What a rank has of a gradient before it is reduced."""
    if parameter.is_sharded(axis):
        return _as_sharded(parameter, axis)
    if parameter.scattered and axis in parameter.kept:
        return part(0)
    summed = axis in parameter.partial or sums_of(axis) is Sums.ALL
    return SUM if summed else EQUAL


def _as_sharded(parameter: Parameter, axis: str) -> Placement:
    """What a rank has of a parameter, as ops read it."""
    shard = next((one for one in parameter.shards if one.axis == axis), None)
    if shard is None:
        return EQUAL
    return LOCAL if shard.copies > 1 else part(shard.dim, shard.blocks)


def _one_order(plan: Plan) -> Iterator[Fault]:
    """Ranks start what joins them in one order: sums of ties, and that of the loss."""
    joined = {result.name: result.ranks for result in plan.communicators if result.joins_pp_ranks}
    starts = [_first_starts(plan, rank) for rank in range(plan.ranks)]
    for first in range(plan.ranks):
        for second in range(first + 1, plan.ranks):
            both = starts[first].keys() & starts[second].keys() & joined.keys()
            shared = {lane for lane in both if {first, second} <= {*joined[lane]}}
            here, there = ([lane for lane in starts[rank] if lane in shared] for rank in (first, second))
            if here != there:
                a, b = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
                yield Fault(
                    second,
                    f"window {starts[second][b]}, start on {b}",
                    f"starts before that on {a}, but rank {first}, window {starts[first][a]}, starts {a} "
                    f"first: the order here is {', '.join(there)}, that of rank {first} is "
                    f"{', '.join(here)}",
                    "Start sums of tied gradients, and of the loss, in the same order on all ranks",
                )


def _first_starts(plan: Plan, rank: int) -> dict[str, str]:
    """Communicator -> the window in which the rank starts the first collective of a program that runs once
    a step on it, in this order."""
    result: dict[str, str] = {}
    for event in trace_of(plan, rank):
        if event.kind is EventKind.START and event.op is not None:
            result.setdefault(event.op.lane, str(event.instruction.ref))
    return result
