"""The fastest of several plans: of the forms of a step, and of `auto`'s schedules.

A step may be had in several forms, in other numbers of chunks or of stages. The first is planned. Each other
is priced, and bounded: where no order of its ops comes to less than the fastest plan so far takes, it is not
planned. `auto`: estimate all schedules, try the best few, plan the best.

1. Estimate. What stages take and need in memory (`Loads`), and the ways to have several stages as one to a
   schedule: in equal numbers, and such that ranks are balanced by what stages take, which capturing could
   only guess. For each way, families and orders by the clock of schedules (`stretto.schedule.search`).
2. Try. The most promising are simulated as steps of this job over few microbatches, with windows in the
   order of a list. Where a rank needs more memory than it may, step 1 is done again with so much less.
3. Plan. The best few of these that fit become full plans, a family among them, and the fastest is taken.

An interrupt that ends a search (`stretto.passes.step`) ends these too, with what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Schedule
from stretto.ir.forms import differing, form, number
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.stage_maps import loop, v
from stretto.order.policies import DEFAULT
from stretto.passes.step import Context, LeftOutError, Step, Watch
from stretto.planning.choose import (
    AHEAD,
    QUICK,
    ShortStep,
    Variants,
    begins,
    likely_ways,
    may_pair,
    short_steps,
)
from stretto.planning.finish import MOST, sends_waited
from stretto.planning.loads import Loads, balanced_groups, loads_of
from stretto.planning.pair import Groups, equal_groups, of_stages, pair
from stretto.planning.schedules import ENOUGH, of_short, shorter
from stretto.planning.windows import lowered
from stretto.schedule.search import Sought, TimedOrder, search
from stretto.simulating import simulate

TRIED = 16
"""Orders that are simulated at most."""

PLANNED = 4
"""Orders that become full plans at most."""

RUNS = 4_000_000
"""Runs of ops in simulations of orders, beyond the first two: some seconds of one core. A full plan counts
as ten simulations. Assumed."""

ROUNDS = 3
"""How often memory is given up for what a simulation needed too much. Assumed."""


def fastest_schedule(variants: Variants, make: Callable[[Variants], Plan]) -> Plan:
    """The fastest plan with any schedule. variants: of a step with any one of its stages. make: a plan of one
    schedule's variants.

    Raises PlanError, the first one's, when all are refused.
    """
    first, context, watch = variants.first, variants.context, variants.context.watch
    quick = replace(context, order=QUICK) if context.order == DEFAULT else context
    count = max(1, min(PLANNED, RUNS // (10 * _runs(first.job))))
    tried = _tried(first, quick)
    refused: list[PlanError] = []

    def plans(made: list[Plan]) -> Iterator[Plan]:
        for one in _worth_a_plan(first, quick, tried, count):
            if len(made) == count or (made and watch.stopped):
                return
            watch.report(f"{one.schedule.family}: a full plan")
            try:
                yield make(Variants(_with_schedule(first, one.schedule), context))
            except PlanError as error:
                refused.append(error)

    made = _until_interrupted(plans, watch)
    if not made:
        raise refused[0] if refused else PlanError("auto finds no schedule", ["none can be simulated"])
    best = min(made, key=predicted_us)
    return replace(best, schedule_why=_why(best, made, tried))


def _until_interrupted(plans: Callable[[list[Plan]], Iterator[Plan]], watch: Watch) -> list[Plan]:
    """All plans, or at an interrupt those that there are. plans: gives them, by what is made so far."""
    made: list[Plan] = []
    try:
        for plan in plans(made):
            made.append(plan)
    except KeyboardInterrupt as error:
        if not made:
            raise
        watch.stop(error)
    return made


def fastest(
    begun: Sequence[Callable[[], Variants]],
    make: Callable[[Variants], Plan],
    watch: Watch,
    *,
    anywhere: bool = False,
) -> Plan:
    """The fastest plan of a step's forms, which describes what it was compared with. begun: the variants of
    each, made when their turn comes, the simplest first. anywhere: whether `make` may have stages on other
    ranks than the variants do.

    Raises PlanError, the first one's, when all are refused.
    """
    others: list[tuple[Job, str]] = []
    refused: list[tuple[Job, PlanError]] = []

    def plans(made: list[Plan]) -> Iterator[Plan]:
        for begin in begun:
            if made and watch.stopped:
                return
            variants = begin()
            try:
                if made and (least_us := variants.bound_us(anywhere)) >= min(map(predicted_us, made)):
                    others.append((variants.first.job, f"at least {_ms(least_us)}"))
                else:
                    yield make(variants)
            except PlanError as error:  # another form may keep less
                refused.append((variants.first.job, error))

    made = _until_interrupted(plans, watch)
    if not made:
        raise refused[0][1]
    best = min(made, key=predicted_us)
    if len(made) + len(others) + len(refused) == 1:
        return best
    others += [(one.job, _ms(predicted_us(one))) for one in made if one is not best]
    others.sort(key=lambda one: (len(one[0].stages), one[0].chunks))
    differ = differing([best.job, *(job for job, _ in others), *(job for job, _ in refused)])
    compared: list[str] = []
    for job, us in others:
        name = number(job, differ)
        compared.append(f"{name} {'takes' if name == '1' else 'take'} {us}")
    compared += [f"{number(job, differ)} cannot be ({error.faults[0]})" for job, error in refused]
    why = f"{form(best.job, differ)}, {_ms(predicted_us(best))}, as {', '.join(compared)}"
    if "stages" in differ:
        return replace(best, schedule_why=f"{best.schedule_why}; {why}")
    return replace(best, overlap_why="; ".join(text for text in (best.overlap_why, why) if text))


def _ms(us: float) -> str:
    return f"{us / 1000:.1f} ms"


def _tried(step: Step, context: Context) -> list[TimedOrder]:
    """Steps 1 and 2: orders of the job's own stages with the short steps that were simulated, microseconds,
    the fastest first; where nothing fits the memory, what does not."""
    ranks = step.schedule.ranks
    job = _passed(step, context).job
    # Each border may become one between ranks.
    loads = loads_of(job, context.costs_of(job), tuple(stage % ranks for stage in range(len(job.stages))))
    limits = None if step.max_bytes is None else [float(step.max_bytes)] * ranks
    seen: dict[object, TimedOrder] = {}
    for _ in range(ROUNDS):
        promising: dict[object, TimedOrder] = {}
        for groups in _ways(loads, ranks, limits):
            for one in _promising(step, loads, groups, limits):
                fine = replace(one, schedule=of_stages(one.schedule, groups))
                promising.setdefault(fine.schedule.orders, fine)
        if not promising:
            if seen:
                break
            limits = None  # the proof of a plan knows better what does not fit, and describes it
            continue
        fresh: list[TimedOrder] = []
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
        maps = (loop, v) if each == 2 else (loop,)
        limit = limits if each == 1 else None
        balanced = [balanced_groups(loads, map_(ranks, each), limit) for map_ in maps]
        ways = (*balanced, equal_groups(stages, ranks * each))
        yield from dict.fromkeys(one for one in ways if one is not None)


def _promising(step: Step, loads: Loads, groups: Groups, limits: Sequence[float] | None) -> list[TimedOrder]:
    """Orders of these groups by the clock of schedules; none where no family fits."""
    ranks = step.schedule.ranks
    sought = Sought(
        *(ranks, len(groups) // ranks, step.job.microbatches, loads.times(groups)),
        room=None if limits is None else partial(loads.room, groups, limits),
        max_live=step.job.max_live,
        group=step.job.microbatch_group,
        joined=tuple(partial(pair, ahead=ahead) for ahead in AHEAD) if may_pair(step) else (),
    )
    try:
        return list(search(sought).found)
    except UsageError:
        return []


def _enough(job: Job, promising: list[TimedOrder]) -> list[TimedOrder]:
    """Those that are simulated, the first family among them."""
    promising.sort(key=_speed)
    some = promising[: max(2, min(TRIED, RUNS // _runs(job)))]
    family = next((one for one in promising if one.family), None)
    return some if family is None or family in some else [*some, family]


def _runs(job: Job) -> int:
    """Runs of ops in a step by which orders are compared."""
    ranks = len(job.stages) if job.pp is None else job.pp
    return max(1, sum(1 for _ in job.all_ops) * min(job.microbatches, ENOUGH * ranks))


def _simulated(step: Step, context: Context, order: TimedOrder) -> TimedOrder | None:
    """Step 2; None for an order that cannot be."""
    try:
        before = _passed(step, context)
    except (LeftOutError, PlanError):
        return None
    # As early as any full plan may post its receives.
    tried = short_steps(before, context, likely_ways(before), MOST)
    steps_us = [one.timeline.step_us for one in tried if isinstance(one, ShortStep)]
    if not steps_us:
        return None
    context.watch.report(f"{step.schedule.family}: {min(steps_us) / 1000:.1f} ms{of_short(step)}")
    return TimedOrder(step.schedule, min(steps_us), order.family)


def _needs_bytes(step: Step, context: Context, one: TimedOrder) -> Sequence[int]:
    """Bytes of each rank, where sends are waited for as soon as they have left."""
    before = _passed(_with_schedule(step, one.schedule), context)
    made = replace(before, schedule=before.short)
    for apply in likely_ways(before)[-1]:
        made = apply(made, context)
    return simulate(lowered(sends_waited(made, context), context)).peak_bytes


def _worth_a_plan(step: Step, context: Context, tried: list[TimedOrder], count: int) -> list[TimedOrder]:
    """The fastest first, of those that fit: where an order needs more memory, only the variants that overlap
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


def _why(best: Plan, made: Sequence[Plan], tried: Sequence[TimedOrder]) -> str:
    """What it was chosen from."""
    others = [f"{one.schedule.family} {predicted_us(one) / 1000:.1f} ms" for one in made if one is not best]
    planned = {one.schedule.family for one in made}
    slower: dict[str, float] = {}
    for one in tried:
        if one.schedule.family not in planned:
            slower.setdefault(one.schedule.family, one.time / tried[0].time)
    texts = ["auto", ", ".join(others)]
    if slower:
        texts.append(
            "times the fastest: " + ", ".join(f"{name} {times:.2f}" for name, times in slower.items())
        )
    return "; ".join(text for text in texts if text)


def _speed(one: TimedOrder) -> tuple[float, bool]:
    return one.time, not one.family


def predicted_us(plan: Plan) -> float:
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
