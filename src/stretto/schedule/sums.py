"""Gradient reductions: what is reduced once a step, over which ranks, in which buckets (REDUCE_GRAD).

A gradient may have to be reduced for three reasons, in this order: its parts along an axis
(`Parameter.partial`), its copies on several pipeline ranks (ties), the data-parallel copies. Large gradients
are reduced by themselves, in place; small ones that are ready at about the same time share a bucket (Li et
al., "PyTorch Distributed", 2020); ties are reduced one by one.

    1. All reductions of a pipeline rank are the program of its first stage: rounds of starts and their waits.
       Reductions of one gradient are in one round after the other, as they write to the same memory.
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
    DTYPE_BYTES,
    GRAD,
    STEP_LOSS,
    WAIT,
    Job,
    Op,
    Parameter,
    Ref,
    Stage,
    TensorSpec,
)
from stretto.ir.transfers import reduced_bytes, tied_ranks

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

    def ops(self) -> Iterator[Op]:
        """Starts and waits, round by round."""
        for starts in self._rounds():
            yield from starts
            for op in starts:
                yield Op(f"{op.name}.sum", WAIT, (Ref(op.name),), (), op.outputs, op.name)

    def _rounds(self) -> Iterator[list[Op]]:
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

    def _of_loss(self) -> Iterator[Op]:
        if reduces_loss(self._job, self._places):
            axes = self._job.data_axes
            size = self._places * math.prod(self._job.size(axis) for axis in axes)
            first = PIPELINE if self._places > 1 else axes[-1]
            args = ((Ref(STEP_LOSS),), "sum", LOSS, size)
            yield Op(f"{first}.loss", ALL_REDUCE.target, args, (), (self._job.loss_spec,), STEP_LOSS)

    def _of_ties(self, name: str) -> Op:
        return self._start(f"tied.{name}", TIED + name, len(self._tied[name]), [name])

    def _over(self, axis: str, names: Iterable[str]) -> list[Op]:
        """Reductions of some gradients over an axis."""
        small: dict[tuple[int, str], list[str]] = defaultdict(list)
        result: list[Op] = []

        def add(together: Sequence[str]) -> None:
            name = f"{axis}.{self._place}.{self._numbers[axis]}"
            self._numbers[axis] += 1
            result.append(self._start(name, axis, self._job.size(axis), together))

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

    def _start(self, name: str, lane: str, size: int, groups: Sequence[str]) -> Op:
        return reduction(self._job, name, lane, size, [self._groups[group].parameter for group in groups])


def reduction(job: Job, name: str, lane: str, size: int, kept: Sequence[Parameter]) -> Op:
    """The start of a reduction of these parameters' gradients, each one of a tied group."""
    nbytes = sum(reduced_bytes(job, parameter, lane) for parameter in kept)
    dtype = kept[0].grad_dtype
    spec = TensorSpec((nbytes // DTYPE_BYTES[dtype],), dtype)
    reads = tuple(Ref(GRAD + parameter.tied_to) for parameter in kept)
    alone = len(kept) == 1 and nbytes == kept[0].grad_nbytes
    alias = reads[0].name if alone else None
    return Op(name, ALL_REDUCE.target, (reads, "sum", lane, size), (), (spec,), alias)


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
        group.home = max(group.home, *here)
        group.partial = tuple(dict.fromkeys((*group.partial, *parameter.partial)))
        ends = [made[s, value] for s, _, value in parameter.grads if s == group.home and (s, value) in made]
        group.ready = max([group.ready, *ends])
    return result
