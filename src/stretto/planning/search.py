"""`auto`: the fastest plan with any schedule.

1. What stages take and hold (`stretto.planning.groups`), and the ways to have several as one: in equal
   numbers, and such that ranks are balanced.
2. For each way, families and orders by the clock of schedules (`stretto.schedule.search`).
3. The most promising are simulated as steps of this job, in a variant or two, over few microbatches
   (`Step.short`). Where a rank holds more than it may, step 2 is done again with so much less. Those
   that hold no more come first.
4. Those that are about as fast as the fastest of these become whole plans, and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stretto.errors import PlanError, UsageError
from stretto.files.say import Say
from stretto.ir.action import Schedule
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.stage_maps import loop, v
from stretto.order.policies import DEFAULT
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning.groups import (
    Groups,
    Loads,
    balanced_groups,
    equal_groups,
    groups_on,
    loads_of,
    of_stages,
)
from stretto.planning.pair import pair
from stretto.planning.receives import MOST
from stretto.planning.schedules import ENOUGH, of_short, shorter
from stretto.planning.sends import sends_waited
from stretto.planning.tries import Tries
from stretto.planning.variants import AHEAD, begins, brief_ways, may_pair
from stretto.planning.windows import lowered
from stretto.schedule.room import Room
from stretto.schedule.search import Found, Sought, search
from stretto.simulating import simulate

WITHIN = 1.15
"""Times the fastest by the clock of schedules, up to where an order is simulated: that clock knows no ops,
and a message that leaves early or late makes so much. Assumed."""

SIMULATED = 16
"""Orders that are simulated at most. Assumed."""

RUNS = 4_000_000
"""Runs of ops in simulations of orders, beyond the first two: some seconds of one core. Assumed."""

PLANNED = 400_000
"""Runs of ops in short steps of orders that become whole plans, beyond the first: a whole plan takes ten
times as long as a simulation. Of larger ones, one variant of an order is simulated. Assumed."""

WHOLE = 6
"""Orders that become whole plans at most. Assumed."""

CLOSE = 1.05
"""Times the fastest that was simulated, up to where an order becomes a whole plan beside it. Assumed: other
variants and waits for messages make less of a difference between two orders."""

ROUNDS = 3
"""How often memory is given up for what a simulation held too much. Assumed."""


@dataclass(frozen=True, slots=True)
class _Ranked:
    """An order of the job's own stages. step_us: of the short step that was simulated. family: whether it is
    that of a family."""

    schedule: Schedule
    step_us: float
    family: bool


def _with_schedule(step: Step, schedule: Schedule) -> Step:
    """The step, before any pass, with another schedule."""
    return replace(step, schedule=schedule, short=shorter(schedule))


def fastest_schedule(tries: Tries, make: Callable[[Tries], Plan]) -> Plan:
    """The fastest plan with any schedule. tries: of a step with any one of its stages. make: a plan of one
    schedule's tries.

    Raises PlanError, the first one's, when all are refused.
    """
    first, context, watch = tries.first, tries.context, tries.context.watch
    tell = watch.tell
    # To compare orders, windows need not be improved, which takes most of the time.
    brief = replace(context, order="list") if context.order == DEFAULT else context
    most = max(1, min(WHOLE, PLANNED // _runs(first.job)))
    found = _fitting(first, brief, _ranked(first, brief, tell), most)
    made: list[Plan] = []
    refused: list[PlanError] = []
    try:
        for one in _worth_a_plan(found, most):
            if len(made) == most or (made and one.step_us > CLOSE * found[0].step_us):
                break
            if made and watch.stopped:
                break
            tell(f"{one.schedule.family}: a whole plan")
            try:
                made.append(make(Tries(_with_schedule(first, one.schedule), context)))
            except PlanError as error:
                refused.append(error)
    except KeyboardInterrupt as error:
        if not made:
            raise
        watch.stop(error)
    if not made:
        raise refused[0] if refused else PlanError("auto finds no schedule", ["none can be simulated"])
    return _best(made, found)


def _best(made: Sequence[Plan], found: Sequence[_Ranked]) -> Plan:
    """The fastest, which says what it was chosen from."""
    best = min(made, key=_predicted_us)
    return replace(best, schedule_why=_why(best, made, found))


def _worth_a_plan(found: Sequence[_Ranked], count: int) -> list[_Ranked]:
    """The fastest first; the fastest family in place of the last of several."""
    family = next((one for one in found if one.family), None)
    if family is None or family in found[:count] or count == 1:
        return [*found]
    rest = [one for one in found if one is not family]
    return [*rest[: count - 1], family, *rest[count - 1 :]]


def _why(best: Plan, made: Sequence[Plan], found: Sequence[_Ranked]) -> str:
    """What it was chosen from."""
    others = [f"{one.schedule.family} {_predicted_us(one) / 1000:.1f} ms" for one in made if one is not best]
    planned = {one.schedule.family for one in made}
    rest: dict[str, float] = {}
    for one in found:
        if one.schedule.family not in planned and one.step_us >= found[0].step_us:
            rest.setdefault(one.schedule.family, one.step_us / found[0].step_us)
    slower = [f"{name} {times:.2f}" for name, times in rest.items()]
    told = [", ".join(others), "times the fastest: " + ", ".join(slower)]
    return "; ".join(["auto", *(text for text, any_ in zip(told, (others, slower), strict=True) if any_)])


def _predicted_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


def _ranked(step: Step, context: Context, tell: Say) -> list[_Ranked]:
    """Steps 1 to 3, the fastest first; where nothing fits the memory, what does not."""
    ranks = step.schedule.ranks
    job = _passed(step, context).job
    # Each border may become one between ranks.
    places = tuple(stage % ranks for stage in range(len(job.stages)))
    loads = loads_of(job, context.costs_of(job), places)
    limits = None if step.max_bytes is None else [float(step.max_bytes)] * ranks
    seen: dict[object, _Ranked] = {}
    for _ in range(ROUNDS):
        promising: dict[object, Found] = {}
        for groups in _ways(loads, ranks, limits):
            for one in _promising(step, loads, groups, limits):
                fine = replace(one, schedule=of_stages(one.schedule, groups))
                promising.setdefault(fine.schedule.orders, fine)
        if not promising:
            if seen:
                break
            limits = None  # the proof of a plan knows better what does not fit, and says it
            continue
        fresh: list[_Ranked] = []
        for one in _enough(job, [*promising.values()]):
            known = seen.get(one.schedule.orders)
            made = known or _simulated(_with_schedule(step, one.schedule), context, one.family)
            if made is not None:
                fresh.append(made)
                if known is None:
                    seen[one.schedule.orders] = made
                    of = of_short(_with_schedule(step, one.schedule))
                    tell(f"{one.schedule.family}: {made.step_us / 1000:.1f} ms{of}")
        if limits is None or not fresh:
            break
        assert step.max_bytes is not None
        most = step.max_bytes
        over = [max(0, held - most) for held in _holds(step, context, min(fresh, key=_speed))]
        if not any(over):
            break
        limits = [limit - held for limit, held in zip(limits, over, strict=True)]
    return sorted(seen.values(), key=_speed)


def _speed(one: _Ranked) -> tuple[float, bool]:
    return one.step_us, not one.family


def _fitting(step: Step, context: Context, order: list[_Ranked], count: int) -> list[_Ranked]:
    """The same with so many in front that hold no more than a rank may: of one that holds more, only the
    variants that overlap less are left, and those are slower than it was here."""
    if step.max_bytes is None:
        return order
    fitting: list[_Ranked] = []
    for one in order:
        if len(fitting) < count and max(_holds(step, context, one)) <= step.max_bytes:
            fitting.append(one)
    return [*fitting, *(one for one in order if one not in fitting)]


def _enough(job: Job, promising: list[Found]) -> list[Found]:
    """Those that are simulated: as many as are worth the time, the first family among them."""
    promising.sort(key=lambda one: (one.time, not one.family))
    near = [one for one in promising if one.time <= WITHIN * promising[0].time]
    some = near[: max(2, min(SIMULATED, RUNS // _runs(job)))]
    family = next((one for one in promising if one.family), None)
    return some if family is None or family in some else [*some, family]


def _runs(job: Job) -> int:
    """Runs of ops in a step by which orders are compared."""
    ops = sum(len(ops) for stage in job.stages for ops in stage.ops.values())
    ranks = len(job.stages) if job.pp is None else job.pp
    return max(1, ops * min(job.microbatches, ENOUGH * ranks))


def _holds(step: Step, context: Context, one: _Ranked) -> Sequence[int]:
    """Bytes of each rank, where sends are waited for as soon as they have left."""
    before = _passed(_with_schedule(step, one.schedule), context)
    way = brief_ways(before)[-1]
    made = replace(before, schedule=before.short)
    for apply in way:
        made = apply(made, context)
    return simulate(lowered(sends_waited(made, context), context)).peak_bytes


def _ways(loads: Loads, ranks: int, limits: Sequence[float] | None) -> Iterator[Groups]:
    """Step 1: of ever more groups a rank, those that are equal, and those that balance the ranks better."""
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
    """Step 2. Nothing where no family fits."""
    ranks = step.schedule.ranks

    def room(places: tuple[int, ...]) -> Room:
        assert limits is not None
        return loads.room(groups, places, limits)

    try:
        searched = search(
            Sought(
                *(ranks, len(groups) // ranks, step.job.microbatches, loads.times(groups)),
                room=None if limits is None else room,
                max_live=step.job.max_live,
                group=step.job.microbatch_group,
                joined=tuple(partial(pair, ahead=ahead) for ahead in AHEAD) if may_pair(step) else (),
            )
        )
    except UsageError:
        return []
    return list(searched.found)


def _passed(step: Step, context: Context) -> Step:
    """The step after the passes of a job. Those of stages on the same ranks are the same, and what is known
    of them is shared, unless recomputation is chosen for the memory that an order leaves."""

    def job() -> Job:
        return Tries(step, context).step(begins()[0]).job

    if isinstance(step.job.recompute, int):
        return replace(step, job=job())
    return replace(step, job=context.once(step.job, ("passed", step.schedule.stage_ranks), job))


def _simulated(step: Step, context: Context, family: bool) -> _Ranked | None:
    """Step 3; None for an order that cannot be."""
    try:
        before = _passed(step, context)
    except (LeftOutError, PlanError):
        return None
    short = replace(before, schedule=before.short)
    found: list[_Ranked] = []
    for way in brief_ways(short):
        try:
            made = short
            for one in way:
                made = one(made, context)
            # As early as any whole plan may post its receives.
            step_us = simulate(lowered(replace(made, ahead=MOST), context)).step_us
        except (LeftOutError, PlanError):
            continue
        found.append(_Ranked(step.schedule, step_us, family))
        if _runs(step.job) > PLANNED:
            break
    return min(found, key=lambda one: one.step_us, default=None)
