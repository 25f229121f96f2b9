"""Which gradients are summed once a step, over which ranks, and how they are grouped.

The contract: a gradient may have to be summed for three reasons, in this order: its parts along an axis
(`Parameter.partial`), its copies on several places of the pipeline (ties), the data-parallel copies. Ties
are summed one by one. For the other two, large gradients have a bucket of their own, which is summed where
it is; small ones share buckets, so that they do not pay a latency each: those that are ready at about the
same time (Li et al., "PyTorch Distributed", 2020), so that their sum starts within the backward.

Buckets name parameters by their tied group, and belong to one place; the tied ones to all that hold a copy.
May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stretto.ir.action import Phase, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.plan import Bucket, Communicator
from stretto.ir.program import Job
from stretto.ir.transfers import tied_ranks

LARGE_BYTES = 4 * 2**20
"""Gradients of at least this size are summed alone. Assumed: their transfer takes far longer than a
collective's latency on any link, and a copy into a shared buffer would cost memory and time. A shared bucket
that has grown to it is closed, for the same reason: more would only start later."""


@dataclass(frozen=True, slots=True)
class Sums:
    """All buckets, and how each place sums them.

    early[place]: bucket name -> programs in whose last run on the place the sum can start.
    late[place]: rounds of buckets that start after all early ones have ended, one round after the other.
    """

    buckets: tuple[Bucket, ...]
    early: tuple[Mapping[str, frozenset[tuple[int, Phase]]], ...]
    late: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(slots=True)
class _Group:
    """A tied group on one place."""

    nbytes: int = 0
    home: int = 0
    ready: int = 0
    """Where the last of its addends stands in the backward of `home`."""
    partial: tuple[str, ...] = ()
    spread: set[str] = field(default_factory=set)
    """Axes of which each rank has a part of the parameter."""
    adds: set[tuple[int, Phase]] = field(default_factory=set)


def make_sums(job: Job, schedule: Schedule) -> Sums:
    """The buckets of a job whose stages are placed as in `schedule`."""
    tied = tied_ranks(job, schedule.stage_ranks)
    buckets: dict[str, Bucket] = {name: Bucket(name, f"tied {name}", (name,)) for name in sorted(tied)}
    early: list[dict[str, frozenset[tuple[int, Phase]]]] = []
    late: list[tuple[tuple[str, ...], ...]] = []
    for place in range(schedule.ranks):
        groups = _groups(job, schedule, place)
        starts: dict[str, frozenset[tuple[int, Phase]]] = {}
        rounds: list[tuple[str, ...]] = []

        # A gradient with parts along several axes is summed over the first of them as soon as it can be, and
        # then over one after the other: sums of one gradient write to the same memory.
        firsts: dict[str, list[str]] = defaultdict(list)
        more: dict[str, list[str]] = defaultdict(list)
        for name, group in groups.items():
            axes = sorted(group.partial)
            for axis in axes[:1]:
                firsts[axis].append(name)
            for axis in axes[1:]:
                more[axis].append(name)
        for axis in sorted(firsts):
            for name in _put(axis, place, groups, firsts[axis], buckets):
                starts[name] = _adding(groups, buckets[name])
        rounds += [_put(axis, place, groups, more[axis], buckets) for axis in sorted(more)]
        for name in tied:
            if name in groups and not groups[name].partial:
                starts[name] = frozenset(groups[name].adds)
        rounds.append(tuple(name for name in tied if name in groups and groups[name].partial))
        waiting = [n for n, g in groups.items() if n in tied or g.partial]
        for axis in job.data_axes:
            summed = {name: group for name, group in groups.items() if axis not in group.spread}
            now = (name for name in summed if name not in waiting)
            for name in _put(axis, place, groups, now, buckets):
                starts[name] = _adding(groups, buckets[name])
            rounds.append(_put(axis, place, groups, [n for n in waiting if n in summed], buckets))
            waiting = list(dict.fromkeys((*waiting, *summed)))
        early.append(starts)
        late.append(tuple(r for r in rounds if r))
    return Sums(tuple(buckets.values()), tuple(early), tuple(late))


def communicators_of(job: Job, schedule: Schedule) -> tuple[Communicator, ...]:
    """All communicators, in the one order in which every rank creates them."""
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    found = [Communicator(f"pp {a}>{b}", (a, b)) for a, b in pairs if a != b]
    if tells_loss(job, schedule.ranks):
        found.append(Communicator("loss", tuple(range(schedule.ranks)), (PIPELINE, *job.data_axes)))
    found += [
        Communicator(f"tied {name}", ranks)
        for name, ranks in sorted(tied_ranks(job, schedule.stage_ranks).items())
    ]
    found += [Communicator(axis, tuple(range(size)), (axis,)) for axis, size in job.axes if size > 1]
    return tuple(found)


def tells_loss(job: Job, places: int) -> bool:
    """Whether ranks have to be told the step's loss by others."""
    return places > 1 or bool(job.data_axes)


def _groups(job: Job, schedule: Schedule, place: int) -> dict[str, _Group]:
    """Tied groups with a gradient that the place holds, in the order of the job's parameters."""
    trained = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    found: dict[str, _Group] = {}
    made = {
        (stage, op.name): at
        for stage in schedule.stages_of(place)
        for at, op in enumerate((*job.stages[stage].ops[Phase.I], *job.stages[stage].ops[Phase.W]))
    }
    for parameter in job.parameters:
        here = [stage for stage in parameter.stages if schedule.stage_ranks[stage] == place]
        if not here or parameter.tied_to not in trained:
            continue
        group = found.setdefault(parameter.tied_to, _Group(home=min(here)))
        group.nbytes = parameter.grad_nbytes
        group.home = max(group.home, *here)
        group.partial = tuple(dict.fromkeys((*group.partial, *parameter.partial)))
        group.spread.update(shard.axis for shard in parameter.shards)
        group.adds.update((s, phase) for s, phase, _ in parameter.grads if schedule.stage_ranks[s] == place)
        ends = [made[s, value] for s, _, value in parameter.grads if s == group.home and (s, value) in made]
        group.ready = max([group.ready, *ends])
    return found


def _put(
    axis: str, place: int, groups: Mapping[str, _Group], names: Iterable[str], buckets: dict[str, Bucket]
) -> tuple[str, ...]:
    """Names of new buckets for some of a place's groups on an axis; adds them to `buckets`."""
    small: dict[int, list[str]] = defaultdict(list)
    members: list[tuple[str, ...]] = []
    for name in names:
        if groups[name].nbytes >= LARGE_BYTES:
            members.append((name,))
        else:
            small[groups[name].home].append(name)
    for of_stage in small.values():
        of_stage.sort(key=lambda name: groups[name].ready)
        first = total = 0
        for at, name in enumerate(of_stage, 1):
            total += groups[name].nbytes
            if total >= LARGE_BYTES or at == len(of_stage):
                members.append(tuple(of_stage[first:at]))
                first, total = at, 0
    before = sum(name.startswith(f"{axis} {place}.") for name in buckets)
    made = [Bucket(f"{axis} {place}.{before + k}", axis, parameters) for k, parameters in enumerate(members)]
    buckets.update((bucket.name, bucket) for bucket in made)
    return tuple(bucket.name for bucket in made)


def _adding(groups: Mapping[str, _Group], bucket: Bucket) -> frozenset[tuple[int, Phase]]:
    return frozenset(made for name in bucket.parameters for made in groups[name].adds)
