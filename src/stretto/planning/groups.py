"""Stages of a job as the clock of schedules sees them: their times, what they hold, and several as one.

A job may be cut finer than its ranks need: consecutive stages of a rank are then one to a schedule. In equal
numbers, a job of four stages a rank can go by every family of one, two or four; in unequal ones, ranks are
balanced by what stages take and hold, which capturing could only guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot
from stretto.ir.balance import cut_chain, even_ranks
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.program import Edge, Job, Stage
from stretto.ir.storage import makes, owner, reads
from stretto.ir.transfers import occupancy_us
from stretto.order.depend import make_graph
from stretto.order.walk import replay
from stretto.order.window import list_order
from stretto.planning.variants import communicates
from stretto.schedule.room import Room
from stretto.schedule.timing import PhaseTimes
from stretto.schedule.windows import make_window

Groups = tuple[tuple[int, ...], ...]
"""Stages that are one to a schedule, in order."""


@dataclass(frozen=True, slots=True)
class Loads:
    """By stage: what its phases take, in microseconds; the bytes that it always holds, those that a
    microbatch holds from F to I, and from I to W. hops_us: by border, what messages over it take.
    overlapped: what a forward takes that is ordered together with a backward, as a share of both alone."""

    forward_us: tuple[float, ...]
    into_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    hops_us: tuple[float, ...]
    fixed_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    overlapped: float = 1.0

    @property
    def work_us(self) -> list[float]:
        """Of each stage, all phases."""
        return [sum(of) for of in zip(self.forward_us, self.into_us, self.weight_us, strict=True)]

    def times(self, groups: Groups) -> PhaseTimes:
        """Of groups of stages."""
        forward, into, weight = (
            tuple(math.fsum(us[stage] for stage in group) for group in groups)
            for us in (self.forward_us, self.into_us, self.weight_us)
        )
        hops = tuple(self.hops_us[group[-1]] for group in groups[:-1])
        return PhaseTimes(forward, into, weight, hops, overlapped=self.overlapped)

    def room(self, groups: Groups, stage_ranks: Sequence[int], limits: Sequence[float]) -> Room:
        """Of groups that are on these ranks, each of which may hold so many bytes in all."""
        whole, rest, fixed = (
            [sum(nbytes[stage] for stage in group) for group in groups]
            for nbytes in (self.whole_bytes, self.weight_bytes, self.fixed_bytes)
        )
        left = list(limits)
        for held, rank in zip(fixed, stage_ranks, strict=True):
            left[rank] -= held
        return Room(tuple(max(0.0, one) for one in left), tuple(map(float, whole)), tuple(map(float, rest)))


def loads_of(job: Job, costs: Costs, stage_ranks: Sequence[int]) -> Loads:
    """What a job's stages take, with ops in the order of a list and messages between these ranks."""
    known: dict[object, float] = {}

    def takes_us(slot: Slot) -> float:
        graph = make_graph(job, costs, make_window(job, slot), stage_ranks)
        key = graph.key()
        if key not in known:
            order = list_order(graph) if graph.communicates else range(len(graph.nodes))
            known[key] = replay(graph, order).end_us
        return known[key] + costs.action_us

    stages = range(len(job.stages))
    forward, into, weight = (tuple(takes_us(Action(stage, phase, 0)) for stage in stages) for phase in PHASES)
    # Of a stage in the middle, as its neighbours are its like.
    middle = len(job.stages) // 2
    both = Overlap((Action(middle, Phase.F, 1), Action(middle, Phase.B, 0)))
    alone_us = forward[middle] + takes_us(Action(middle, Phase.B, 0))
    overlapped = min(1.0, takes_us(both) / alone_us) if alone_us and communicates(job) else 1.0
    fixed = [0] * len(stages)
    for parameter in job.parameters:
        for stage in parameter.stages:
            fixed[stage] += parameter.held_nbytes
            if parameter.grads:
                fixed[stage] += parameter.grad_nbytes + parameter.state_nbytes(job.optimizer)
    held = [_held(stage, [edge for edge in job.edges if edge.target == stage.index]) for stage in job.stages]
    return Loads(
        forward,
        into,
        weight,
        tuple(_hop_us(job, costs, stage_ranks, border) for border in stages[:-1]),
        tuple(fixed),
        tuple(whole for whole, _ in held),
        tuple(rest for _, rest in held),
        overlapped,
    )


def _hop_us(job: Job, costs: Costs, stage_ranks: Sequence[int], border: int) -> float:
    """The longer of two ways: all that arrives behind the border, and all that comes back over it."""
    ways = (
        [edge for edge in job.edges if edge.source <= border < edge.target == border + 1],
        [edge for edge in job.edges if edge.target == border < edge.source],
    )
    found = [0.0]
    for way in ways:
        links = [(costs.link(stage_ranks[e.source], stage_ranks[e.target]), e) for e in way]
        links = [(link, e) for link, e in links if stage_ranks[e.source] != stage_ranks[e.target]]
        if links:
            latency_us = max(link.latency_us for link, _ in links)
            found.append(latency_us + math.fsum(occupancy_us(link, e.spec.nbytes) for link, e in links))
    return max(found)


def _held(stage: Stage, received: Sequence[Edge]) -> tuple[int, int]:
    """(from F to I, from I to W): bytes that a microbatch holds of a stage between its programs."""
    size = {edge.value: edge.spec.nbytes for edge in received}
    made = {edge.value: PHASES.index(edge.user_phase) for edge in received}
    last: dict[str, int] = {}
    owners: dict[str, str] = {}
    for at, phase in enumerate(PHASES):
        for op in stage.ops[phase]:
            for storage, nbytes in makes(op):
                size[storage], made[storage] = nbytes, at
            owners[op.name] = owner(op)
            for name in reads(op):
                last[owners.get(name, name)] = at
    whole = sum(size[one] for one, at in last.items() if one in size and made[one] == 0 < at)
    rest = sum(size[one] for one, at in last.items() if one in size and made[one] < 2 == at)
    return whole, rest


def equal_groups(stages: int, count: int) -> Groups:
    """So many groups, none of which has two stages more than another."""
    ends = [at * stages // count for at in range(count + 1)]
    return tuple(tuple(range(first, end)) for first, end in pairwise(ends))


def balanced_groups(loads: Loads, ranks: int, limits: Sequence[float] | None) -> Groups | None:
    """One group for each rank, such that the longest is as short as can be; limits: bytes of each rank, which
    suffice for as many microbatches as 1F1B holds there. None where they do not."""
    until = [*accumulate(loads.work_us, initial=0.0)]
    fixed = [*accumulate(loads.fixed_bytes, initial=0)]
    held = [*accumulate(loads.whole_bytes, initial=0)]

    def longest(first: int, end: int, rank: int) -> float:
        holds = fixed[end] - fixed[first] + (ranks - rank) * (held[end] - held[first])
        return math.inf if limits is not None and holds > limits[rank] else until[end] - until[first]

    begins = cut_chain(until, ranks, longest)
    return None if begins is None else _between(begins, len(loads.forward_us))


def groups_on(loads: Loads, places: Sequence[int]) -> Groups | None:
    """A group for each of these pipeline ranks, which have several groups each: ranks have as equal work as
    moves of borders find. None where there are fewer stages than groups."""
    until = [*accumulate(loads.work_us, initial=0.0)]
    begins = cut_chain(until, len(places), lambda first, end, _: until[end] - until[first])
    if begins is None:
        return None
    return _between(even_ranks(begins, until, [0.0] * len(until), places), len(loads.forward_us))


def _between(begins: Sequence[int], stages: int) -> Groups:
    return tuple(tuple(range(first, end)) for first, end in pairwise([0, *begins, stages]))


def of_stages(schedule: Schedule, groups: Groups) -> Schedule:
    """A schedule of groups as one of their stages: forwards go up through a group, backwards down."""
    if all(len(group) == 1 for group in groups):
        return schedule

    def parts(action: Action) -> list[Action]:
        group = groups[action.stage]
        return [
            replace(action, stage=stage) for stage in (group if action.phase is Phase.F else reversed(group))
        ]

    def slots(slot: Slot) -> list[Slot]:
        if isinstance(slot, Overlap):
            return [Overlap(tuple(part for action in slot.actions for part in parts(action)))]
        return [*parts(slot)]

    return replace(
        schedule,
        stages=sum(map(len, groups)),
        stage_ranks=tuple(schedule.stage_ranks[at] for at, group in enumerate(groups) for _ in group),
        orders=tuple(tuple(one for slot in order for one in slots(slot)) for order in schedule.orders),
    )
