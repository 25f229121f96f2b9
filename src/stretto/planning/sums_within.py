"""Sums of gradients within the last backward: the orders of last runs that make the step shortest.

The last run of a window that completes gradients is a window of its own. `lower` gives it the order of the
other runs; here the orders of `stretto.order.early_sums` are tried, as a whole step has it: where a backward
sends a message, weight gradients that come first make another rank wait. The step of fewer microbatches
(`Step.short`) ends as the whole one does, so orders are compared by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.ir.transfers import collective_time
from stretto.order.depend import make_graph
from stretto.order.early_sums import early_sums
from stretto.passes.step import Context, Step
from stretto.planning.lower import lower
from stretto.planning.windows import as_short, lowered
from stretto.simulating import simulate


def sums_within(step: Step, context: Context) -> Step:
    """The step with the orders of last runs, as they are or with sums as early as can be or at the end, that
    take least."""
    plan = lowered(step, context)
    early = _reordered(plan)
    silent = {name: window for name, window in early.items() if not _sends(window)}
    late = _at_end(plan) if plan.costs.shared else {}
    tried: list[Mapping[str, Window]] = [{}]
    tried += [windows for windows in (early, silent, late) if windows and windows not in tried]
    if len(tried) == 1:
        return step
    brief = lowered(as_short(step, context), context)
    best = min(tried, key=lambda windows: _step_us(_with(brief, windows)))
    return replace(step, windows={**plan.windows, **best}) if best else step


def least_us(plan: Plan, than_us: float = inf) -> float:
    """What the step takes with sums as they are, or at the end of last runs: where collectives share network
    cards, a sum takes its part of what compute waits for. than_us: of another step; the end is not tried
    where no sums could make this one as fast. Raises PlanError for a plan whose ranks wait for each other for
    ever."""
    step_us = simulate(plan).step_us
    if not plan.costs.shared or step_us - _sums_us(plan) >= than_us:
        return step_us
    late = _at_end(plan)
    return min(step_us, _step_us(_with(plan, late))) if late else step_us


def _sums_us(plan: Plan) -> float:
    """The longest that sums of gradients take on any rank, one after another."""

    def takes_us(rank: int) -> float:
        found = [op.collective for op in plan.sums(rank) if op.collective is not None]
        return sum(
            collective_time(plan.costs, plan.job, plan.communicator(one.axis), one).us for one in found
        )

    return max(takes_us(rank) for rank in range(plan.ranks))


def _at_end(plan: Plan) -> dict[str, Window]:
    """By name, windows in which sums start, with these at their end."""
    found: dict[str, Window] = {}
    for name, window in plan.windows.items():
        items = tuple(sorted(window.items, key=lambda item: _sums(window, item)))
        if items != window.items:
            found[name] = replace(window, items=items)
    return found


def _step_us(plan: Plan) -> float:
    """Infinite for a plan whose ranks wait for each other for ever."""
    try:
        return simulate(plan).step_us
    except PlanError:
        return float("inf")


def _reordered(plan: Plan) -> dict[str, Window]:
    """By name, windows in which sums start that have another order for it."""
    found: dict[str, Window] = {}
    for name, window in plan.windows.items():
        if len(window.actions) in (0, len(window.parts)):
            continue
        graph = make_graph(plan.job, plan.costs, window, plan.schedule.stage_ranks)
        items = tuple(graph.nodes[index].item for index in early_sums(graph))
        if items != window.items:
            found[name] = replace(window, items=items)
    return found


def _sums(window: Window, item: Item) -> bool:
    return window.parts[item.part][1] is Phase.REDUCE_GRAD


def _sends(window: Window) -> bool:
    return any(item.kind is ItemKind.SEND for item in window.items)


def _with(plan: Plan, windows: Mapping[str, Window]) -> Plan:
    """Lowered again, as receives are posted in the order of the sends."""
    windows = {**plan.windows, **windows}
    return lower(plan.job, plan.schedule, plan.costs, overlap=plan.overlap, windows=windows)
