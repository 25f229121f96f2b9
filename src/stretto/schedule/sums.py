"""Gradient reductions: what is reduced once a step, over which ranks, in which buckets (REDUCE_GRAD).

A gradient may have to be reduced for several reasons, in this order: each rank keeps some of its rows
(`Parameter.kept`), and all have partial sums of them; its parts along an axis (`Parameter.partial`); its
copies on several pipeline ranks (ties); the data-parallel copies. Large gradients are reduced by themselves,
where they are; small ones that are ready at about the same time share a bucket (Li et al., "PyTorch
Distributed", 2020; Rajbhandari et al., "ZeRO", 2020); ties are reduced one by one.

    1. All reductions of a pipeline rank are the program of its first stage: rounds of starts, with what leads
       to them, and of waits, with what follows: gradients are put side by side in a flat tensor, and become
       parts of it. Reductions of one gradient are in one round after the other.
    2. Reductions that wait for no other are the first round, that of the loss before all.
    3. Where updates are ops of the step, they follow (`stretto.schedule.updates`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.action import Phase, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_REDUCE, KINDS, REDUCE_SCATTER, Kind
from stretto.ir.kept import added_spec, rows_shape
from stretto.ir.plan import LOSS
from stretto.ir.program import (
    FREE,
    GRAD,
    INDEX,
    STEP_LOSS,
    WAIT,
    Const,
    Job,
    Op,
    Parameter,
    Ref,
    Shard,
    TensorSpec,
)
from stretto.passes.flat import (
    ADD,
    Moved,
    in_buckets,
    is_large,
    scattered,
    side_by_side,
    taken_apart,
    viewed,
    with_rows,
)
from stretto.passes.owners import scattered_bucket
from stretto.schedule.updates import updates_of

TIED = "tied "
"""What the names of tied gradients' communicators begin with."""


_Step = tuple[str, str]
"""(kind of collective, axis or `TIED`) by which a gradient is reduced."""


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


def reductions_of(
    job: Job, schedule: Schedule, pp_rank: int, tied: Mapping[str, tuple[int, ...]]
) -> Iterator[Op]:
    """The program of a pipeline rank. tied: groups of which several pipeline ranks have copies."""
    return _RankReductions(job, schedule, pp_rank, tied).ops()


def reduces_loss(job: Job, pp_ranks: int) -> bool:
    """Whether the step's loss has to be sent to other ranks."""
    return pp_ranks > 1 or bool(job.data_axes)


class _RankReductions:
    """The reductions of one pipeline rank."""

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        pp_rank: int,
        tied: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._job = job
        self._schedule = schedule
        self._place = pp_rank
        self._places = schedule.ranks
        self._groups = _groups(job, schedule.stages_of(pp_rank))
        self._tied = {name: tied[name] for name in sorted(tied) if name in self._groups}
        self._numbers: Counter[str] = Counter()
        self._merged: set[str] = set()
        self._last: dict[str, str] = {}
        self._specs = {name: added_spec(job, group.parameter) for name, group in self._groups.items()}

    def ops(self) -> Iterator[Op]:
        """Starts with what leads to them, and waits with what follows, round by round."""
        for reductions in self._rounds():
            for reduction in reductions:
                yield from reduction.lead
            for reduction in reductions:
                yield from reduction.tail
        if self._job.updates:
            for name, group in self._groups.items():
                yield from self._merge(name, group)
            trained = [group.parameter for group in self._groups.values() if group.parameter.leads]
            given = self._schedule, self._place, trained, self._last, self._tied
            yield from updates_of(self._job, *given)

    def _rounds(self) -> Iterator[list[Moved]]:
        """What each gradient is reduced by first; then one after the other what is left."""
        chains = {name: self._chain(name) for name, group in self._groups.items() if group.parameter.leads}
        firsts: dict[_Step, list[str]] = defaultdict(list)
        left: dict[_Step, list[str]] = defaultdict(list)
        for name, chain in chains.items():
            for turn, step in enumerate(chain):
                (left if turn else firsts)[step].append(name)
        early = list(self._of_loss())
        for step in sorted(firsts, key=lambda step: (step[1] != TIED, *self._turn(step))):
            early += self._by(step, firsts[step])
        yield early
        for step in sorted(left, key=self._turn):
            yield self._by(step, left[step])

    def _by(self, step: _Step, names: Sequence[str]) -> list[Moved]:
        kind, lane = step
        # Ties have one order on all ranks.
        return (
            [self._of_ties(name) for name in sorted(names)] if lane == TIED else self._over(kind, lane, names)
        )

    def _turn(self, step: _Step) -> tuple[int, str | int]:
        """Scatters, parts by axis, ties, copies of the data."""
        kind, lane = step
        axes, data = [axis for axis, _ in self._job.axes], self._job.data_axes
        if kind == REDUCE_SCATTER.name:
            return 0, -axes.index(lane)
        return (2, "") if lane == TIED else (3, data.index(lane)) if lane in data else (1, lane)

    def _chain(self, name: str) -> list[_Step]:
        """What a gradient is reduced by, in order: it is scattered first, so that all else is of parts."""
        parameter, partial = self._groups[name].parameter, self._groups[name].partial
        axes = [axis for axis in sorted(partial) if axis not in parameter.kept]
        kept = () if parameter.scattered else parameter.kept
        chain: list[_Step] = [(REDUCE_SCATTER.name, axis) for axis in kept]
        chain += [(ALL_REDUCE.name, axis) for axis in axes]
        chain += [(ALL_REDUCE.name, TIED)] if name in self._tied else []
        over = (*parameter.kept, *partial, *(shard.axis for shard in parameter.shards))
        return chain + [(ALL_REDUCE.name, axis) for axis in self._job.data_axes if axis not in over]

    def _of_loss(self) -> Iterator[Moved]:
        if reduces_loss(self._job, self._places):
            axes = self._job.data_axes
            size = self._places * math.prod(self._job.size(axis) for axis in axes)
            first = PIPELINE if self._places > 1 else axes[-1]
            yield _in_place(f"{first}.loss", STEP_LOSS, self._job.loss_spec, LOSS, size)

    def _of_ties(self, name: str) -> Moved:
        lane, size = TIED + name, len(self._tied[name])
        return self._reduction(f"{PIPELINE}.tied.{name}", ALL_REDUCE, lane, size, [name])

    def _over(self, kind: str, axis: str, names: Iterable[str]) -> list[Moved]:
        """Reductions of some gradients over an axis."""
        small: dict[tuple[object, ...], list[str]] = defaultdict(list)
        result: list[Moved] = []

        def add(together: Sequence[str]) -> None:
            name = f"{axis}.{self._place}.{self._numbers[axis]}"
            self._numbers[axis] += 1
            result.append(self._reduction(name, KINDS[kind], axis, self._job.size(axis), together))

        for name in names:
            group = self._groups[name]
            if is_large(self._specs[name].nbytes) or self._is_whole(name, axis):
                add([name])
            else:
                small[group.home, group.parameter.grad_dtype, group.parameter.kept].append(name)
        for alike in small.values():
            alike.sort(key=lambda name: self._groups[name].ready)
            for together in in_buckets(alike, lambda name: self._specs[name].nbytes):
                add(together)
        return result

    def _reduction(self, name: str, kind: Kind, lane: str, size: int, names: Sequence[str]) -> Moved:
        if self._is_whole(names[0], lane):
            return self._of_bucket(name, lane, names[0])
        groups = [self._groups[one] for one in names]
        self._last.update(dict.fromkeys(names, name))
        merging = [op for one, group in zip(names, groups, strict=True) for op in self._merge(one, group)]
        given = [(group.parameter, self._specs[one]) for one, group in zip(names, groups, strict=True)]
        if kind is ALL_REDUCE:
            made = _summed(name, lane, size, given)
        else:
            left = self._left(groups[0].parameter, lane)
            parts = math.prod(self._job.size(axis) for axis in left)
            grads = [GRAD + parameter.name for parameter, _ in given]
            specs = [spec for _, spec in given]
            first = left == groups[0].parameter.kept
            shapes = [rows_shape(self._job, p) if first else spec.shape for p, spec in given]
            made = scattered(name, lane, size, parts, grads, specs, shapes, [(grad,) for grad in grads])
            self._specs.update(zip(names, made.specs, strict=True))
        return Moved([*merging, *made.lead], made.tail)

    def _is_whole(self, name: str, axis: str) -> bool:
        """Whether what an axis scatters first are full gradients of a bucket."""
        parameter = self._groups[name].parameter
        return parameter.slot is not None and parameter.kept[0] == axis

    def _of_bucket(self, name: str, axis: str, bucket: str) -> Moved:
        self._last[bucket] = name
        groups = {n: g for n, g in self._groups.items() if g.parameter.kept_as == bucket}
        merging = [op for one, group in groups.items() for op in self._merge(one, group)]
        grads = {one: (group.parameter.name, self._specs[one]) for one, group in groups.items()}
        made = scattered_bucket(self._job, name, axis, bucket, grads)
        [self._specs[bucket]] = made.specs
        return Moved([*merging, *made.lead], made.tail)

    def _left(self, parameter: Parameter, axis: str) -> tuple[str, ...]:
        """The axes over which its gradient is yet to be scattered, this one and those after it."""
        return parameter.kept[parameter.kept.index(axis) :]

    def _merge(self, name: str, group: _TiedGroup) -> Iterator[Op]:
        """The gradients of tied parameters become that of the first, once."""
        if name not in self._merged:
            self._merged.add(name)
            first = total = GRAD + group.parameter.name
            spec = self._specs[name]
            for other in group.others:
                made = f"{PIPELINE}.merged.{other}"
                yield Op(made, ADD, (Ref(total), Ref(GRAD + other)), (), (spec,), writes=(first,))
                yield Op(f"{PIPELINE}.free.{other}", FREE, (), writes=(GRAD + other,))
                total = made


Given = Sequence[tuple[Parameter, TensorSpec]]
"""Parameters, and what their gradients are by now."""


def _in_place(name: str, value: str, spec: TensorSpec, lane: str, size: int) -> Moved:
    """The sum of what lives over the step."""
    start = Op(name, ALL_REDUCE.target, (Ref(value), "sum", lane, size), (), (spec,), value)
    return Moved([start], [Op(f"{name}.sum", WAIT, (Ref(name),), (), (spec,), value, writes=(value,))])


def _summed(name: str, lane: str, size: int, given: Given) -> Moved:
    """The sum of these parameters' gradients over a communicator."""
    slots = [parameter.slots(lane, size) for parameter, _ in given]
    if slots == [1]:
        [(parameter, spec)] = given
        return _in_place(name, GRAD + parameter.name, spec, lane, size)
    lead: list[Op] = []
    tail: list[Op] = []
    sources: list[str] = []
    sizes = [spec.numel * n for (_, spec), n in zip(given, slots, strict=True)]
    flat, total = f"{name}.flat", f"{name}.sum"
    for at, ((parameter, spec), count) in enumerate(zip(given, slots, strict=True)):
        source, here = GRAD + parameter.name, f"{name}.{at}"
        if count > 1:
            [shard] = [one for one in parameter.shards if one.axis == lane]
            lead += _in_slot(here, source, spec, shard, size)
            tail += _from_slot(here, source, spec, shard, size)
            sources.append(f"{here}.slots")
        else:
            rows = with_rows(here, source, spec, spec.shape or (1,))
            lead += rows
            sources.append(rows[-1].name if rows else source)
            tail.append(viewed(f"{here}.grad", here, spec, flat, writes=(source,)))
    row = TensorSpec((1, sum(sizes)), given[0][1].dtype)
    lead.append(side_by_side(flat, sources, 1, row))
    lead.append(Op(name, ALL_REDUCE.target, (Ref(flat), "sum", lane, size), (), (row,), flat))
    waits = [Op(total, WAIT, (Ref(name),), (), (row,), flat), *taken_apart(name, total, row, sizes, flat)]
    return Moved(lead, [*waits, *tail])


def _which(name: str, shard: Shard, size: int) -> list[Op]:
    """Which of the parts of a shard this rank has, in a row of one."""
    number = TensorSpec((), "int64")
    down = (("rounding_mode", "floor"),)
    return [
        Op(f"{name}.at", INDEX, (shard.axis, size), (), (number,)),
        Op(f"{name}.part", "aten.div.Tensor_mode", (Ref(f"{name}.at"), shard.copies), down, (number,)),
        viewed(f"{name}.which", f"{name}.part", TensorSpec((1,), "int64"), f"{name}.part"),
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
        viewed(f"{name}.mask", f"{name}.is", rows, f"{name}.is"),
        viewed(f"{name}.row", source, row, source),
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
        viewed(f"{name}.rows", name, made, f"{name.rpartition('.')[0]}.flat"),
        Op(
            f"{name}.own",
            "aten.index_select.default",
            (Ref(f"{name}.rows"), 0, Ref(f"{name}.in.which")),
            (),
            (row,),
        ),
        viewed(f"{name}.grad", f"{name}.own", spec, f"{name}.own", writes=(grad,)),
    ]


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
