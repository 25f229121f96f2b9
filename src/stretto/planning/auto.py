"""`auto`: the fastest plan with any schedule. Estimate all, try the best few, plan the best.

1. Estimate. What stages take and need in memory (`Loads`), and the ways to have several stages as one to a
   schedule: in equal numbers, and such that ranks are balanced by what stages take, which capturing could
   only guess. For each way, families and orders by the clock of schedules (`stretto.schedule.search`).
2. Try. The most promising are simulated as steps of this job over few microbatches, with windows in the
   order of a list. Where a rank needs more memory than it may, step 1 is done again with so much less.
3. Plan. The best few of these that fit become whole plans, a family among them, and the fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot
from stretto.ir.balance import cut_chain, even_ranks
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.plan import Plan
from stretto.ir.program import Edge, Job, Stage
from stretto.ir.stage_maps import loop, v
from stretto.ir.storage import makes, owner, reads
from stretto.ir.transfers import occupancy_us
from stretto.order.depend import make_graph
from stretto.order.follow import replay
from stretto.order.policies import DEFAULT
from stretto.order.window import list_order
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning.choose import (
    AHEAD,
    QUICK,
    ShortStep,
    Variants,
    begins,
    communicates,
    likely_ways,
    may_pair,
    short_steps,
)
from stretto.planning.messages import MOST, sends_waited
from stretto.planning.pair import Groups, equal_groups, of_stages, pair
from stretto.planning.schedules import ENOUGH, of_short, shorter
from stretto.planning.windows import lowered
from stretto.schedule.room import Room
from stretto.schedule.search import Found, Sought, search
from stretto.schedule.timing import PhaseTimes
from stretto.schedule.windows import make_window
from stretto.simulating import simulate

TRIED = 16
"""Orders that are simulated at most."""

PLANNED = 4
"""Orders that become whole plans at most."""

RUNS = 4_000_000
"""Runs of ops in simulations of orders, beyond the first two: some seconds of one core. A whole plan counts
as ten simulations. Assumed."""

ROUNDS = 3
"""How often memory is given up for what a simulation needed too much. Assumed."""


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

    def room(self, groups: Groups, stage_ranks: Sequence[int], limits: Sequence[float]) -> Room:
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
            fixed[stage] += parameter.held_nbytes
            if parameter.grads:
                fixed[stage] += parameter.grad_nbytes + parameter.state_nbytes(job.optimizer)
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
        links = [(costs.link(stage_ranks[e.source], stage_ranks[e.target]), e) for e in way]
        links = [(link, e) for link, e in links if stage_ranks[e.source] != stage_ranks[e.target]]
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


def balanced_groups(loads: Loads, ranks: int, limits: Sequence[float] | None) -> Groups | None:
    """One group for each rank, such that the longest is as short as can be; limits: bytes of each rank, which
    suffice for as many microbatches as 1F1B keeps there. None where they do not."""
    until = [*accumulate(loads.work_us, initial=0.0)]
    fixed = [*accumulate(loads.fixed_bytes, initial=0)]
    saved = [*accumulate(loads.saved_bytes, initial=0)]

    def longest(first: int, end: int, rank: int) -> float:
        needs = fixed[end] - fixed[first] + (ranks - rank) * (saved[end] - saved[first])
        return math.inf if limits is not None and needs > limits[rank] else until[end] - until[first]

    borders = cut_chain(until, ranks, longest)
    return None if borders is None else _between(borders, len(loads.forward_us))


def groups_on(loads: Loads, pp_ranks: Sequence[int]) -> Groups | None:
    """A group for each of these pipeline ranks, which have several groups each: ranks have as equal work as
    moves of borders find. None where there are fewer stages than groups."""
    until = [*accumulate(loads.work_us, initial=0.0)]
    borders = cut_chain(until, len(pp_ranks), lambda first, end, _: until[end] - until[first])
    if borders is None:
        return None
    return _between(even_ranks(borders, until, [0.0] * len(until), pp_ranks), len(loads.forward_us))


def _between(borders: Sequence[int], stages: int) -> Groups:
    return tuple(tuple(range(first, end)) for first, end in pairwise([0, *borders, stages]))


@dataclass(frozen=True, slots=True)
class _TriedOrder:
    """An order of the job's own stages. step_us: of the short step that was simulated; family: whether it is
    that of a family."""

    schedule: Schedule
    step_us: float
    family: bool


def fastest_schedule(variants: Variants, make: Callable[[Variants], Plan]) -> Plan:
    """The fastest plan with any schedule. variants: of a step with any one of its stages. make: a plan of one
    schedule's variants.

    Raises PlanError, the first one's, when all are refused.
    """
    first, context, watch = variants.first, variants.context, variants.context.watch
    quick = replace(context, order=QUICK) if context.order == DEFAULT else context
    count = max(1, min(PLANNED, RUNS // (10 * _runs(first.job))))
    tried = _tried(first, quick)
    made: list[Plan] = []
    refused: list[PlanError] = []
    try:
        for one in _worth_a_plan(first, quick, tried, count):
            if len(made) == count or (made and watch.stopped):
                break
            watch.tell(f"{one.schedule.family}: a whole plan")
            try:
                made.append(make(Variants(_with_schedule(first, one.schedule), context)))
            except PlanError as error:
                refused.append(error)
    except KeyboardInterrupt as error:
        if not made:
            raise
        watch.stop(error)
    if not made:
        raise refused[0] if refused else PlanError("auto finds no schedule", ["none can be simulated"])
    best = min(made, key=_predicted_us)
    return replace(best, schedule_why=_why(best, made, tried))


def _tried(step: Step, context: Context) -> list[_TriedOrder]:
    """Steps 1 and 2, the fastest first; where nothing fits the memory, what does not."""
    ranks = step.schedule.ranks
    job = _passed(step, context).job
    # Each border may become one between ranks.
    loads = loads_of(job, context.costs_of(job), tuple(stage % ranks for stage in range(len(job.stages))))
    limits = None if step.max_bytes is None else [float(step.max_bytes)] * ranks
    seen: dict[object, _TriedOrder] = {}
    for _ in range(ROUNDS):
        promising: dict[object, Found] = {}
        for groups in _ways(loads, ranks, limits):
            for one in _promising(step, loads, groups, limits):
                fine = replace(one, schedule=of_stages(one.schedule, groups))
                promising.setdefault(fine.schedule.orders, fine)
        if not promising:
            if seen:
                break
            limits = None  # the proof of a plan knows better what does not fit, and describes it
            continue
        fresh: list[_TriedOrder] = []
        for one in _enough(job, [*promising.values()]):
            made = seen.get(one.schedule.orders) or _simulated(
                _with_schedule(step, one.schedule), context, one
            )
            if made is not None:
                fresh.append(made)
                seen[one.schedule.orders] = made
        if limits is None or not fresh:
            break
        assert step.max_bytes is not None
        needs = _needs_bytes(step, context, min(fresh, key=_speed))
        over = [max(0, nbytes - step.max_bytes) for nbytes in needs]
        if not any(over):
            break
        limits = [limit - nbytes for limit, nbytes in zip(limits, over, strict=True)]
    return sorted(seen.values(), key=_speed)


def _ways(loads: Loads, ranks: int, limits: Sequence[float] | None) -> Iterator[Groups]:
    """Of ever more groups a rank, those that are equal, and those that balance the ranks better."""
    stages = len(loads.forward_us)
    for each in range(1, stages // ranks + 1):
        balanced: list[Groups | None] = (
            [balanced_groups(loads, ranks, limits)]
            if each == 1
            else [groups_on(loads, map_(ranks, each)) for map_ in ((loop, v) if each == 2 else (loop,))]
        )
        ways = (*balanced, equal_groups(stages, ranks * each))
        yield from dict.fromkeys(one for one in ways if one is not None)


def _promising(step: Step, loads: Loads, groups: Groups, limits: Sequence[float] | None) -> list[Found]:
    """Orders of these groups by the clock of schedules; none where no family fits."""
    ranks = step.schedule.ranks

    def room(stage_ranks: tuple[int, ...]) -> Room:
        assert limits is not None
        return loads.room(groups, stage_ranks, limits)

    sought = Sought(
        *(ranks, len(groups) // ranks, step.job.microbatches, loads.times(groups)),
        room=None if limits is None else room,
        max_live=step.job.max_live,
        group=step.job.microbatch_group,
        joined=tuple(partial(pair, ahead=ahead) for ahead in AHEAD) if may_pair(step) else (),
    )
    try:
        return list(search(sought).found)
    except UsageError:
        return []


def _enough(job: Job, promising: list[Found]) -> list[Found]:
    """Those that are simulated, the first family among them."""
    promising.sort(key=lambda one: (one.time, not one.family))
    some = promising[: max(2, min(TRIED, RUNS // _runs(job)))]
    family = next((one for one in promising if one.family), None)
    return some if family is None or family in some else [*some, family]


def _runs(job: Job) -> int:
    """Runs of ops in a step by which orders are compared."""
    ops = sum(len(ops) for stage in job.stages for ops in stage.ops.values())
    ranks = len(job.stages) if job.pp is None else job.pp
    return max(1, ops * min(job.microbatches, ENOUGH * ranks))


def _simulated(step: Step, context: Context, order: Found) -> _TriedOrder | None:
    """Step 2; None for an order that cannot be."""
    short = _shortest(step, context)
    if short is None:
        return None
    step_us = short.timeline.step_us
    context.watch.tell(f"{step.schedule.family}: {step_us / 1000:.1f} ms{of_short(step)}")
    return _TriedOrder(step.schedule, step_us, order.family)


def _shortest(step: Step, context: Context) -> ShortStep | None:
    try:
        before = _passed(step, context)
    except (LeftOutError, PlanError):
        return None
    # As early as any whole plan may post its receives.
    short = [
        one for one in short_steps(before, context, likely_ways(before), MOST) if isinstance(one, ShortStep)
    ]
    return min(short, key=lambda one: one.timeline.step_us, default=None)


def _needs_bytes(step: Step, context: Context, one: _TriedOrder) -> Sequence[int]:
    """Bytes of each rank, where sends are waited for as soon as they have left."""
    before = _passed(_with_schedule(step, one.schedule), context)
    made = replace(before, schedule=before.short)
    for apply in likely_ways(before)[-1]:
        made = apply(made, context)
    return simulate(lowered(sends_waited(made, context), context)).peak_bytes


def _worth_a_plan(step: Step, context: Context, tried: list[_TriedOrder], count: int) -> list[_TriedOrder]:
    """The fastest first, of those that fit: of one that needs more memory, only the variants that overlap
    less are left, and those are slower than it was. The fastest family in place of the last of several."""
    first = tried
    if step.max_bytes is not None:
        fits = [one for one in tried if max(_needs_bytes(step, context, one)) <= step.max_bytes]
        first = [*fits, *(one for one in tried if one not in fits)]
    family = next((one for one in first if one.family), None)
    if family is None or family in first[:count] or count == 1:
        return first
    rest = [one for one in first if one is not family]
    return [*rest[: count - 1], family, *rest[count - 1 :]]


def _why(best: Plan, made: Sequence[Plan], tried: Sequence[_TriedOrder]) -> str:
    """What it was chosen from."""
    others = [f"{one.schedule.family} {_predicted_us(one) / 1000:.1f} ms" for one in made if one is not best]
    planned = {one.schedule.family for one in made}
    slower: dict[str, float] = {}
    for one in tried:
        if one.schedule.family not in planned:
            slower.setdefault(one.schedule.family, one.step_us / tried[0].step_us)
    texts = ["auto", ", ".join(others)]
    if slower:
        texts.append(
            "times the fastest: " + ", ".join(f"{name} {times:.2f}" for name, times in slower.items())
        )
    return "; ".join(text for text in texts if text)


def _speed(one: _TriedOrder) -> tuple[float, bool]:
    return one.step_us, not one.family


def _predicted_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


def _with_schedule(step: Step, schedule: Schedule) -> Step:
    """The step, before any pass, with another schedule."""
    return replace(step, schedule=schedule, short=shorter(schedule))


def _passed(step: Step, context: Context) -> Step:
    """The step after the passes of a job. Those of stages on the same ranks are the same, and what is known
    of them is shared, unless recomputation is chosen for the memory that an order leaves."""

    def job() -> Job:
        return Variants(step, context).step(begins()[0]).job

    if isinstance(step.job.recompute, int):
        return replace(step, job=job())
    return replace(step, job=context.once(step.job, ("passed", step.schedule.stage_ranks), job))
