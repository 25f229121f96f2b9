"""What a job's stages take and need in memory, as the clock of schedules sees them, and several as one.

A job may be cut finer than its ranks need: consecutive stages of a rank are then one to a schedule. In equal
numbers, a job of four stages a rank can go by every family of one, two or four; in unequal ones, ranks are
balanced by what stages take and need, which capturing could only guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stretto.ir.action import Action, Overlap, Phase, Slot
from stretto.ir.balance import cut_chain, even_ranks
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.kept import gradient_nbytes, made_nbytes, parameter_nbytes, state_nbytes
from stretto.ir.program import Edge, Job, Stage
from stretto.ir.storage import makes, owner, reads
from stretto.ir.transfers import occupancy_us
from stretto.order.depend import make_graph
from stretto.order.policies import list_order
from stretto.order.walk import replay
from stretto.planning.choose import communicates
from stretto.planning.pair import Groups
from stretto.schedule.list_schedule import Room
from stretto.schedule.timing import PhaseTimes
from stretto.schedule.windows import make_window


@dataclass(frozen=True, slots=True)
class Loads:
    """By stage: what its phases take, in microseconds; the bytes that are always there, those that a
    microbatch keeps from F to I, and from I to W. hops_us: by border, what messages over it take.
    overlapped: what a forward takes that is ordered together with a backward, as a share of both apart."""

    forward_us: tuple[float, ...]
    into_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    hops_us: tuple[float, ...]
    fixed_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
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

    def room(self, groups: Groups, limits: Sequence[float], stage_ranks: Sequence[int]) -> Room:
        """Of groups that are on these ranks, each of which may use so many bytes in all."""
        saved, rest, fixed = (
            [sum(nbytes[stage] for stage in group) for group in groups]
            for nbytes in (self.saved_bytes, self.weight_bytes, self.fixed_bytes)
        )
        left = list(limits)
        for nbytes, rank in zip(fixed, stage_ranks, strict=True):
            left[rank] -= nbytes
        return Room(tuple(max(0.0, one) for one in left), tuple(map(float, saved)), tuple(map(float, rest)))


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
    # Of a stage in the middle, as its neighbours are like it.
    middle = len(job.stages) // 2
    both = Overlap((Action(middle, Phase.F, 1), Action(middle, Phase.B, 0)))
    apart_us = forward[middle] + takes_us(Action(middle, Phase.B, 0))
    overlapped = min(1.0, takes_us(both) / apart_us) if apart_us and communicates(job) else 1.0
    fixed = [0] * len(stages)
    for parameter in job.parameters:
        for stage in parameter.stages:
            fixed[stage] += parameter_nbytes(job, parameter) + made_nbytes(job, parameter)
            if parameter.grads:
                fixed[stage] += gradient_nbytes(job, parameter) + state_nbytes(job, parameter)
    kept = [_kept(stage, [edge for edge in job.edges if edge.target == stage.index]) for stage in job.stages]
    return Loads(
        *(forward, into, weight),
        tuple(_hop_us(job, costs, stage_ranks, border) for border in stages[:-1]),
        tuple(fixed),
        tuple(saved for saved, _ in kept),
        tuple(rest for _, rest in kept),
        overlapped,
    )


def _hop_us(job: Job, costs: Costs, stage_ranks: Sequence[int], border: int) -> float:
    """The longer of two ways: all that arrives behind the border, and all that comes back over it."""
    ways = (
        [edge for edge in job.edges if edge.source <= border < edge.target == border + 1],
        [edge for edge in job.edges if edge.target == border < edge.source],
    )
    times_us = [0.0]
    for way in ways:
        ends = [(stage_ranks[e.source], stage_ranks[e.target], e) for e in way]
        links = [(costs.link(a, b), e) for a, b, e in ends if a != b]
        if links:
            latency_us = max(link.latency_us for link, _ in links)
            times_us.append(latency_us + math.fsum(occupancy_us(link, e.spec.nbytes) for link, e in links))
    return max(times_us)


def _kept(stage: Stage, received: Sequence[Edge]) -> tuple[int, int]:
    """(from F to I, from I to W): bytes that a microbatch keeps of a stage between its programs."""
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
    saved = sum(size[one] for one, at in last.items() if one in size and made[one] == 0 < at)
    rest = sum(size[one] for one, at in last.items() if one in size and made[one] < 2 == at)
    return saved, rest


def balanced_groups(
    loads: Loads, pp_ranks: Sequence[int], limits: Sequence[float] | None = None
) -> Groups | None:
    """A group for each of these pipeline ranks, such that the longest is as short as can be, and ranks with
    several have as equal work as moves of borders find. limits: bytes of each rank that has one, which
    suffice for as many microbatches as 1F1B keeps there. None where they do not, and where there are fewer
    stages than groups."""
    until = [*accumulate(loads.work_us, initial=0.0)]
    fixed = [*accumulate(loads.fixed_bytes, initial=0)]
    saved = [*accumulate(loads.saved_bytes, initial=0)]

    def longest(first: int, end: int, rank: int) -> float:
        needs = fixed[end] - fixed[first] + (len(pp_ranks) - rank) * (saved[end] - saved[first])
        return math.inf if limits is not None and needs > limits[rank] else until[end] - until[first]

    borders = cut_chain(until, len(pp_ranks), longest)
    if borders is not None and len(set(pp_ranks)) < len(pp_ranks):
        borders = even_ranks(borders, until, [0.0] * len(until), pp_ranks)
    if borders is None:
        return None
    return tuple(tuple(range(first, end)) for first, end in pairwise([0, *borders, len(until) - 1]))
