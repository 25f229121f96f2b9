"""Passes that give windows the order of their items, and the plan of a step that has them.

One of them is in every variant.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from stretto.bounds.step import lower_bound
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.order.policies import CAPTURED, WindowOrders
from stretto.order.whole_step import FEWEST, Frees, order_together, walks_allowed
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning.lower import captured_windows, lower
from stretto.planning.pair import apart, frees
from stretto.schedule.once import with_once
from stretto.schedule.timing import peak_live
from stretto.simulating import simulate

BRIEF = 20
"""Steps walked to see whether one window a rank fits at all, where memory has a limit. Assumed."""

MOST_ITEMS = 100_000
"""Items of a step beyond which its windows are not searched together. Measured on a Llama of 70 billion
parameters over 512 devices with 32 microbatches: its search took 12 GB, and longer than ten minutes."""

MORE_LIVE = (2, 1)
"""For every rank, how many live microbatches more than in the schedule's own order one window a rank may
keep, where memory is short: the more, the more there is to choose from. Measured with ZB-V on the stack of
`benchmarks/braid.py`, two ranks: as few as in its order take 1.09 of STP's step, 1 more 1.04, 2 more 1.01,
any number 0.96; pairs take 1.03."""


def at_once(step: Step, context: Context) -> Step:
    """Everything is waited for as soon as it is started: the baseline that hides nothing."""
    windows = captured_windows(step.job, step.schedule, at_once=True)
    return replace(step, overlap="off", windows=windows)


def as_captured(step: Step, context: Context) -> Step:
    """Ops as captured, which sends messages early and waits late."""
    return replace(step, windows=captured_windows(step.job, step.schedule))


def ordered(step: Step, context: Context) -> Step:
    """Each window in the policy's order, but for those that have one."""

    def orders() -> WindowOrders:
        costs, share = context.costs_of(step.job), context.effort.part(_step_us(step, context))
        return WindowOrders(step.job, costs, step.schedule.stage_ranks, context.order, share=share)

    captured = captured_windows(step.job, step.schedule)
    windows = {name: step.windows.get(name, window) for name, window in captured.items()}
    if context.order != CAPTURED:
        plain = context.once(step.job, ("orders", context.order, step.schedule.stage_ranks), orders)
        windows |= {n: plain.ordered(one) for n, one in captured.items() if n not in step.windows}
    return replace(step, windows=windows)


def whole_step(step: Step, context: Context) -> Step:
    """One window a rank, all of them ordered together (`stretto.order.whole_step`).

    Any number of microbatches is live; where that is more than the job or a rank allows, some more than in
    the schedule's own order. Left out where a rank needs too much even so, so that other orders are searched
    for as well, and where the step has so many items that it is hardly ever walked in its time.
    """
    effort = context.effort
    items = step.job.microbatches * sum(1 for _ in step.job.all_ops)
    # First by what no step is worth, since the bound of a very long one takes long itself.
    if items > MOST_ITEMS or walks_allowed(items, effort.worth_us(inf)) < FEWEST:
        raise LeftOutError
    if walks_allowed(items, effort.worth_us(_step_us(step, context))) < FEWEST:
        raise LeftOutError
    most = step.job.max_live
    orders = step.schedule.orders
    if most is not None and max(peak_live(step.schedule)) > most:
        more = most - max(peak_live(apart(step.schedule)))
        return _together(step, context, [frees(order, more) for order in orders])
    why: LeftOutError | None = None
    for times in (None, *MORE_LIVE):
        kept = [] if times is None else [frees(order, times * len(orders)) for order in orders]
        if times is None or any(kept):
            try:
                return _together(step, context, kept)
            except _TooMuchMemoryError as error:
                why = why or error
                if context.watch.stopped:  # each is a search of its own
                    break
    assert why is not None
    raise why


class _TooMuchMemoryError(LeftOutError):
    """A rank needs more than it may."""


def _together(step: Step, context: Context, kept: Frees) -> Step:
    """kept: `frees` of `order_together`."""
    plain = as_captured(step, context)
    # Ordered as they are without the sums that start in them.
    captured = replace(lowered(plain, context), windows=plain.windows)
    bound_us = _step_us(step, context)
    made = step
    for walks in (None,) if step.max_bytes is None else (BRIEF, None):
        worth_us = context.effort.worth_us(bound_us)
        together = order_together(captured, bound_us, walks, kept, worth_us, context.watch)
        if together is None:
            raise LeftOutError
        windows, budget = together
        made = replace(step, windows=windows)
        if step.max_bytes is not None:
            peak = max(simulate(lowered(made, context)).peak_bytes)
            if peak > step.max_bytes:
                raise _TooMuchMemoryError(
                    f"one window a rank keeps {peak:,} bytes, and the limit is {step.max_bytes:,}"
                )
        if budget.spent < budget.allowed:  # the search ended by itself
            break
    return made


def short_bound_us(step: Step, context: Context) -> float:
    """No order of the step by which others are compared is faster."""
    short = replace(step.job, microbatches=step.short.microbatches)

    def bound_us() -> float:
        return lower_bound(short, step.short, context.costs_of(step.job)).us

    return context.once(step.job, ("bound", step.short), bound_us)


def _step_us(step: Step, context: Context) -> float:
    """What the step takes at least, by that of fewer microbatches; what a search is worth follows from it."""
    return short_bound_us(step, context) * step.job.microbatches / step.short.microbatches


def as_short(step: Step, context: Context) -> Step:
    """The step with the fewer microbatches by which steps are compared. What windows only that one has are
    in the policy's order."""
    return step if step.short is step.schedule else ordered(replace(step, schedule=step.short), context)


def job_with_once(step: Step, context: Context) -> Job:
    """The step's job with the programs that its ranks run once a step."""
    key = "once", step.schedule.stage_ranks
    return context.once(step.job, key, lambda: with_once(step.job, step.schedule))


def lowered(step: Step, context: Context) -> Plan:
    """The plan of a step that has its windows; neither proved nor simulated."""
    job = job_with_once(step, context)
    costs = context.costs_of(job)
    if job.microbatches != step.schedule.microbatches:
        job = replace(job, microbatches=step.schedule.microbatches)
    return lower(
        *(job, step.schedule, costs),
        overlap=step.overlap,
        windows=step.windows,
        sent_before=step.sent_before,
        ahead=step.ahead,
    )
