"""Sums of gradients within the last backward: the orders of last runs that make the step shortest.

The last run of a window that completes gradients is a window of its own. `lower` gives it the order of the
other runs; here the orders of `stretto.order.early_sums` are tried, as a whole step has it: where a backward
sends a message, weight gradients that come first make another rank wait.

May touch `stretto.ir`, `stretto.order`, `stretto.passes.step`, `stretto.simulate` and this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.order.depend import make_graph
from stretto.order.early_sums import early_sums
from stretto.passes.step import Context, Step
from stretto.planning.lower import lower
from stretto.planning.windows import lowered
from stretto.simulate import simulate


def sums_within(step: Step, context: Context) -> Step:
    """The step with the orders of last runs, as they are or with sums as early as can be or at the end, that
    take least."""
    plan = lowered(step, context)
    early = _reordered(plan)
    tried = [plan]
    if early:
        silent = {name: window for name, window in early.items() if not _sends(window)}
        tried.append(_with(plan, early))
        if silent and silent != early:
            tried.append(_with(plan, silent))
    if plan.costs.shared:
        tried.append(_with(plan, _at_end(plan)))
    best = min(tried, key=_step_us)
    return step if best is plan else replace(step, windows=best.windows)


def least_us(plan: Plan) -> float:
    """What the step takes with sums as they are, or at the end of last runs: where collectives share network
    cards, a sum takes its part of what compute waits for. Raises PlanError for a plan whose ranks wait for
    each other for ever."""
    step_us = simulate(plan).step_us
    late = _at_end(plan) if plan.costs.shared else {}
    return min(step_us, _step_us(_with(plan, late))) if late else step_us


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
