"""Gradient reductions: what is reduced once a step, over which ranks, in which buckets (REDUCE_GRAD).

A gradient may have to be reduced for three reasons, in this order: its parts along an axis
(`Parameter.partial`), its copies on several pipeline ranks (ties), the data-parallel copies. Large gradients
are reduced by themselves, in place; small ones that are ready at about the same time share a bucket (Li et
al., "PyTorch Distributed", 2020); ties are reduced one by one.

    1. All reductions of a pipeline rank are the program of its first stage: rounds of starts, with what leads
       to them, and of waits, with what follows: gradients are put side by side in a flat tensor, and become
       parts of it. Reductions of one gradient are in one round after the other.
    2. Reductions that wait for no other are the first round, that of the loss before all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.action import Phase, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.flow import PHASES
from stretto.ir.plan import LOSS, Communicator
from stretto.ir.program import (
    FREE,
    GETITEM,
    GRAD,
    INDEX,
    STEP_LOSS,
    VIEW,
    WAIT,
    Const,
    Job,
    Op,
    Parameter,
    Ref,
    Shard,
    Stage,
    TensorSpec,
)
from stretto.ir.transfers import tied_ranks

LARGE_BYTES = 4 * 2**20
"""Gradients of at least so many bytes are reduced by themselves. Assumed: their transfer takes far longer
than a collective's latency on any link, and a copy into a bucket would cost memory and time. A bucket that
has grown to it is closed, for the same reason: more would only start later."""

TIED = "tied "
"""What the names of tied gradients' communicators begin with."""


@dataclass(slots=True)
class _TiedGroup:
    """A tied group on one pipeline rank."""

    parameter: Parameter
    home: int = 0
    ready: int = 0
    """Position in the backward of `home` of the op that makes its last partial gradient."""
    partial: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Parameters here that are tied to `parameter` and have gradients of their own."""


def with_reductions(job: Job, schedule: Schedule) -> Job:
    """The job whose stages, placed as in `schedule`, have the reductions of their pipeline ranks."""
    tied = tied_ranks(job, schedule.stage_ranks)
    stages = list(without_reductions(job).stages)
    for pp_rank in range(schedule.ranks):
        kept = schedule.stages_of(pp_rank)
        ops = tuple(_RankReductions(job, kept, pp_rank, tied, schedule.ranks).ops()) if kept else ()
        if ops:
            stages[kept[0]] = Stage(kept[0], {**stages[kept[0]].ops, Phase.REDUCE_GRAD: ops})
    return replace(job, stages=tuple(stages))


def without_reductions(job: Job) -> Job:
    """The job as it is captured, without the reductions that a plan adds."""
    if all(Phase.REDUCE_GRAD not in stage.ops for stage in job.stages):
        return job
    stages = (Stage(s.index, {phase: s.ops[phase] for phase in PHASES}) for s in job.stages)
    return replace(job, stages=tuple(stages))


def communicators_of(job: Job, schedule: Schedule) -> tuple[Communicator, ...]:
    """All communicators, in the one order in which every rank creates them: one for each pair of pipeline
    ranks and direction with messages, `loss` where ranks do not have all of it, one for each tied gradient,
    and one for each axis other than pp."""
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    result = [Communicator(f"pp {a}>{b}", (a, b)) for a, b in pairs if a != b]
    if reduces_loss(job, schedule.ranks):
        result.append(Communicator(LOSS, tuple(range(schedule.ranks)), (PIPELINE, *job.data_axes)))
    result += [
        Communicator(TIED + name, ranks)
        for name, ranks in sorted(tied_ranks(job, schedule.stage_ranks).items())
    ]
    result += [Communicator(axis, tuple(range(size)), (axis,)) for axis, size in job.axes if size > 1]
    return tuple(result)


def reduces_loss(job: Job, pp_ranks: int) -> bool:
    """Whether the step's loss has to be sent to other ranks."""
    return pp_ranks > 1 or bool(job.data_axes)


class _RankReductions:
    """The reductions of one pipeline rank."""

    def __init__(
        self,
        job: Job,
        stages: Sequence[int],
        pp_rank: int,
        tied: Mapping[str, tuple[int, ...]],
        pp_ranks: int,
    ) -> None:
        self._job = job
        self._place = pp_rank
        self._places = pp_ranks
        self._groups = _groups(job, stages)
        self._tied = {name: tied[name] for name in sorted(tied) if name in self._groups}
        self._numbers: Counter[str] = Counter()
        self._merged: set[str] = set()

    def ops(self) -> Iterator[Op]:
        """Starts with what leads to them, and waits with what follows, round by round."""
        for reductions in self._rounds():
            for reduction in reductions:
                yield from reduction.lead
            for reduction in reductions:
                yield from reduction.tail

    def _rounds(self) -> Iterator[list[Reduction]]:
        groups, tied = self._groups, self._tied
        # Over the first of several axes as soon as it can be, and then over one after the other.
        firsts: dict[str, list[str]] = defaultdict(list)
        more: dict[str, list[str]] = defaultdict(list)
        for name, group in groups.items():
            for k, axis in enumerate(sorted(group.partial)):
                (more if k else firsts)[axis].append(name)
        early = list(self._of_loss())
        early += [self._of_ties(name) for name in tied if not groups[name].partial]
        for axis in sorted(firsts):
            early += self._over(axis, firsts[axis])
        late = [self._over(axis, more[axis]) for axis in sorted(more)]
        late.append([self._of_ties(name) for name in tied if groups[name].partial])
        waiting = [name for name, group in groups.items() if name in tied or group.partial]
        for axis in self._job.data_axes:
            summed = [name for name in groups if not groups[name].parameter.is_sharded(axis)]
            early += self._over(axis, (name for name in summed if name not in waiting))
            late.append(self._over(axis, [name for name in waiting if name in summed]))
            waiting = list(dict.fromkeys((*waiting, *summed)))
        return iter([early, *late])

    def _of_loss(self) -> Iterator[Reduction]:
        if reduces_loss(self._job, self._places):
            axes = self._job.data_axes
            size = self._places * math.prod(self._job.size(axis) for axis in axes)
            first = PIPELINE if self._places > 1 else axes[-1]
            yield _in_place(f"{first}.loss", STEP_LOSS, self._job.loss_spec, LOSS, size)

    def _of_ties(self, name: str) -> Reduction:
        return self._reduction(f"{PIPELINE}.tied.{name}", TIED + name, len(self._tied[name]), [name])

    def _over(self, axis: str, names: Iterable[str]) -> list[Reduction]:
        """Reductions of some gradients over an axis."""
        small: dict[tuple[int, str], list[str]] = defaultdict(list)
        result: list[Reduction] = []

        def add(together: Sequence[str]) -> None:
            name = f"{axis}.{self._place}.{self._numbers[axis]}"
            self._numbers[axis] += 1
            result.append(self._reduction(name, axis, self._job.size(axis), together))

        for name in names:
            group = self._groups[name]
            if group.parameter.grad_nbytes >= LARGE_BYTES:
                add([name])
            else:
                small[group.home, group.parameter.grad_dtype].append(name)
        for alike in small.values():
            alike.sort(key=lambda name: self._groups[name].ready)
            first = total = 0
            for at, name in enumerate(alike, 1):
                total += self._groups[name].parameter.grad_nbytes
                if total >= LARGE_BYTES or at == len(alike):
                    add(alike[first:at])
                    first, total = at, 0
        return result

    def _reduction(self, name: str, lane: str, size: int, names: Sequence[str]) -> Reduction:
        groups = [self._groups[one] for one in names]
        merging = [op for one, group in zip(names, groups, strict=True) for op in self._merge(one, group)]
        made = _reduction_of(self._job, name, lane, size, [group.parameter for group in groups])
        return Reduction([*merging, *made.lead], made.tail)

    def _merge(self, name: str, group: _TiedGroup) -> Iterator[Op]:
        """The gradients of tied parameters become that of the first, once."""
        if name not in self._merged:
            self._merged.add(name)
            first = total = GRAD + group.parameter.name
            spec = group.parameter.grad_spec
            for other in group.others:
                made = f"{PIPELINE}.merged.{other}"
                yield Op(made, ADD, (Ref(total), Ref(GRAD + other)), (), (spec,), writes=first)
                yield Op(f"{PIPELINE}.free.{other}", FREE, (), writes=GRAD + other)
                total = made


@dataclass(frozen=True, slots=True)
class Reduction:
    """lead: ops that end with the start; tail: those that begin with the wait."""

    lead: list[Op]
    tail: list[Op]


ADD, CAT, SPLIT = "aten.add.Tensor", "aten._chunk_cat.default", "aten.split_with_sizes.default"
"""`_chunk_cat` puts tensors side by side in rows, as FSDP2 does (PyTorch #121081)."""


def _in_place(name: str, value: str, spec: TensorSpec, lane: str, size: int) -> Reduction:
    """The sum of what lives over the step."""
    start = Op(name, ALL_REDUCE.target, (Ref(value), "sum", lane, size), (), (spec,), value)
    return Reduction([start], [Op(f"{name}.sum", WAIT, (Ref(name),), (), (spec,), value, writes=value)])


def _reduction_of(job: Job, name: str, lane: str, size: int, kept: Sequence[Parameter]) -> Reduction:
    """The reduction of these parameters' gradients."""
    slots = [parameter.slots(lane, size) for parameter in kept]
    if len(kept) == 1 and slots == [1]:
        return _in_place(name, GRAD + kept[0].name, kept[0].grad_spec, lane, size)
    lead: list[Op] = []
    tail: list[Op] = []
    given: list[str] = []
    sizes = tuple(p.grad_spec.numel * n for p, n in zip(kept, slots, strict=True))
    dtype = kept[0].grad_dtype
    total, parts = f"{name}.sum", f"{name}.parts"
    rows = [TensorSpec((1, count), dtype) for count in sizes]
    for at, (parameter, count) in enumerate(zip(kept, slots, strict=True)):
        source, spec = GRAD + parameter.name, parameter.grad_spec
        here = f"{name}.{at}"
        tail.append(Op(here, GETITEM, (Ref(parts), at), (), (rows[at],), f"{name}.flat"))
        if count > 1:
            [shard] = [one for one in parameter.shards if one.axis == lane]
            lead += _in_slot(here, source, spec, shard, size)
            tail += _from_slot(here, source, spec, shard, size)
            given.append(f"{here}.slots")
        else:
            if not spec.shape:
                lead.append(_viewed(f"{here}.row", source, TensorSpec((1,), dtype), source))
                source = f"{here}.row"
            given.append(source)
            tail.append(_viewed(f"{here}.grad", here, spec, f"{name}.flat", writes=GRAD + parameter.name))
    flat = TensorSpec((1, sum(sizes)), dtype)
    lead += [
        Op(f"{name}.flat", CAT, (tuple(map(Ref, given)), 0, 1), (), (flat,)),
        Op(name, ALL_REDUCE.target, (Ref(f"{name}.flat"), "sum", lane, size), (), (flat,), f"{name}.flat"),
    ]
    waits = [
        Op(total, WAIT, (Ref(name),), (), (flat,), f"{name}.flat"),
        Op(parts, SPLIT, (Ref(total), sizes, 1), (), tuple(rows), f"{name}.flat"),
    ]
    return Reduction(lead, [*waits, *tail])


def _viewed(name: str, source: str, spec: TensorSpec, alias: str, writes: str | None = None) -> Op:
    return Op(name, VIEW, (Ref(source), spec.shape), (), (spec,), alias, writes=writes)


def _which(name: str, shard: Shard, size: int) -> list[Op]:
    """Which of the parts of a shard this rank has, in a row of one."""
    number = TensorSpec((), "int64")
    down = (("rounding_mode", "floor"),)
    return [
        Op(f"{name}.at", INDEX, (shard.axis, size), (), (number,)),
        Op(f"{name}.part", "aten.div.Tensor_mode", (Ref(f"{name}.at"), shard.copies), down, (number,)),
        _viewed(f"{name}.which", f"{name}.part", TensorSpec((1,), "int64"), f"{name}.part"),
    ]


def _in_slot(name: str, source: str, spec: TensorSpec, shard: Shard, size: int) -> list[Op]:
    """A gradient of which ranks have different parts: in this rank's row, beside rows of zeros."""
    slots = shard.parts(size)
    numbers, made = TensorSpec((slots,), "int64"), TensorSpec((slots, spec.numel), spec.dtype)
    rows, row = TensorSpec((slots, 1), "bool"), TensorSpec((1, spec.numel), spec.dtype)
    device = (("device", Const("device", "job")), ("pin_memory", False))
    return [
        *_which(f"{name}.in", shard, size),
        Op(f"{name}.all", "aten.arange.default", (slots,), device, (numbers,)),
        Op(
            f"{name}.is",
            "aten.eq.Tensor",
            (Ref(f"{name}.all"), Ref(f"{name}.in.which")),
            (),
            (replace(numbers, dtype="bool"),),
        ),
        _viewed(f"{name}.mask", f"{name}.is", rows, f"{name}.is"),
        _viewed(f"{name}.row", source, row, source),
        Op(
            f"{name}.slots",
            "aten.where.ScalarOther",
            (Ref(f"{name}.mask"), Ref(f"{name}.row"), 0.0),
            (),
            (made,),
        ),
    ]


def _from_slot(name: str, grad: str, spec: TensorSpec, shard: Shard, size: int) -> list[Op]:
    """This rank's row again, of what `_in_slot` has made and was summed."""
    slots = shard.parts(size)
    made, row = TensorSpec((slots, spec.numel), spec.dtype), TensorSpec((1, spec.numel), spec.dtype)
    return [
        _viewed(f"{name}.rows", name, made, f"{name.rpartition('.')[0]}.flat"),
        Op(
            f"{name}.own",
            "aten.index_select.default",
            (Ref(f"{name}.rows"), 0, Ref(f"{name}.in.which")),
            (),
            (row,),
        ),
        _viewed(f"{name}.grad", f"{name}.own", spec, f"{name}.own", writes=grad),
    ]


def around_starts(program: Sequence[Op]) -> tuple[dict[str, list[Op]], dict[str, list[Op]]]:
    """Start -> the ops before it that no other start has, itself last; and its wait with what reads it."""
    leads: dict[str, list[Op]] = {}
    tails: dict[str, list[Op]] = {}
    tail_of: dict[str, str] = {}
    open_ops: list[Op] = []
    for op in program:
        waited = next((tail_of[name] for name in op.uses if name in tail_of), None)
        if op.target == WAIT:
            waited = op.uses[0]
        if waited is not None:
            tail_of[op.name] = waited
            tails.setdefault(waited, []).append(op)
            continue
        open_ops.append(op)
        if op.kind is not None:
            leads[op.name], open_ops = open_ops, []
    return leads, tails


def _groups(job: Job, stages: Sequence[int]) -> dict[str, _TiedGroup]:
    """Tied groups with a gradient on a pipeline rank that has these stages, in the order of parameters."""
    trained = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    result: dict[str, _TiedGroup] = {}
    made = {
        (stage, op.name): at
        for stage in stages
        for at, op in enumerate((*job.stages[stage].ops[Phase.I], *job.stages[stage].ops[Phase.W]))
    }
    for parameter in job.parameters:
        here = [stage for stage in parameter.stages if stage in stages]
        if not here or parameter.tied_to not in trained:
            continue
        group = result.setdefault(parameter.tied_to, _TiedGroup(parameter, min(here)))
        if any(s in stages for s, _, _ in parameter.grads):
            if not any(s in stages for s, _, _ in group.parameter.grads):
                group.parameter = parameter
            elif parameter is not group.parameter:
                group.others += (parameter.name,)
        group.home = max(group.home, *here)
        group.partial = tuple(dict.fromkeys((*group.partial, *parameter.partial)))
        ends = [made[s, value] for s, _, value in parameter.grads if s == group.home and (s, value) in made]
        group.ready = max([group.ready, *ends])
    return result
