"""Gradient reductions within the last backward: the orders of last runs that make the step shortest.

The last run of a window that completes gradients is a window of its own. `lower` gives it the order of the
other runs; here the orders of `stretto.order.window` are tried in a step: where a backward sends a
message, weight gradients that come first make another rank wait. The step of fewer microbatches
(`Step.short`) ends as the full one does, so orders are compared by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.ir.timeline import Timeline
from stretto.ir.transfers import collective_time
from stretto.order.depend import make_graph
from stretto.order.window import early_reductions
from stretto.passes.step import Context, Step
from stretto.planning.lower import lower
from stretto.planning.windows import as_short, lowered
from stretto.simulating import simulate


def reductions_within(step: Step, context: Context) -> Step:
    """The step with the orders of last runs, as they are or with reductions as early as can be or at the end,
    that take least."""
    plan = lowered(step, context)
    early = _reordered(plan)
    silent = {name: window for name, window in early.items() if not _sends(window)}
    late = _at_end(plan) if plan.costs.shared else {}
    tried: list[Mapping[str, Window]] = [{}]
    tried += [windows for windows in (early, silent, late) if windows and windows not in tried]
    if len(tried) == 1:
        return step
    short = lowered(as_short(step, context), context)
    best = min(tried, key=lambda windows: _step_us(_with(short, windows)))
    return replace(step, windows={**plan.windows, **best}) if best else step


def reduced_best(plan: Plan, than_us: float = inf) -> Timeline:
    """The step with reductions as they are, or at the end of last runs where that is faster: where
    collectives share network cards, a reduction takes its part of what compute waits for. than_us: of another
    step; the end is not tried where no reductions could make this one as fast. Raises PlanError for a plan
    whose ranks wait for each other forever."""
    timeline = simulate(plan)
    if not plan.costs.shared or timeline.step_us - _reductions_us(plan) >= than_us:
        return timeline
    late = _at_end(plan)
    if late:
        with suppress(PlanError):
            return min(timeline, simulate(_with(plan, late)), key=lambda one: one.step_us)
    return timeline


def _reductions_us(plan: Plan) -> float:
    """The longest that gradient reductions take on any rank, one after another."""

    def takes_us(rank: int) -> float:
        calls = [op.collective for op in plan.sums(rank) if op.collective is not None]
        return sum(
            collective_time(plan.costs, plan.job, plan.communicator(one.axis), one).us for one in calls
        )

    return max(takes_us(rank) for rank in range(plan.ranks))


def _at_end(plan: Plan) -> dict[str, Window]:
    """By name, windows in which reductions start, with these at their end."""
    result: dict[str, Window] = {}
    for name, window in plan.windows.items():
        items = tuple(sorted(window.items, key=lambda item: _reduces(window, item)))
        if items != window.items:
            result[name] = replace(window, items=items)
    return result


def _step_us(plan: Plan) -> float:
    """Infinite for a plan whose ranks wait for each other forever."""
    try:
        return simulate(plan).step_us
    except PlanError:
        return float("inf")


def _reordered(plan: Plan) -> dict[str, Window]:
    """By name, windows in which reductions start that have another order for it."""
    result: dict[str, Window] = {}
    for name, window in plan.windows.items():
        if len(window.actions) in (0, len(window.parts)):
            continue
        graph = make_graph(plan.job, plan.costs, window, plan.schedule.stage_ranks)
        items = tuple(graph.nodes[index].item for index in early_reductions(graph))
        if items != window.items:
            result[name] = replace(window, items=items)
    return result


def _reduces(window: Window, item: Item) -> bool:
    return window.parts[item.part][1] is Phase.REDUCE_GRAD


def _sends(window: Window) -> bool:
    return any(item.kind is ItemKind.SEND for item in window.items)


def _with(plan: Plan, windows: Mapping[str, Window]) -> Plan:
    """Lowered again, as receives are posted in the order of the sends."""
    windows = {**plan.windows, **windows}
    return lower(plan.job, plan.schedule, plan.costs, overlap=plan.overlap, windows=windows)
