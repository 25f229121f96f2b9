"""What ends a step's planning: when messages are waited for, and which order last runs have.

Lowering posts a receive a few messages before it is needed. Of one message a microbatch that is a few
microbatches; of a stage whose skips cross as well it is a part of one, and the next microbatch's messages
cannot begin before the work of this one ends. Posted earlier, they travel under that work, and their buffers
live longer. So:

    1. Lower the step, or the one of fewer microbatches by which steps are compared, with receives posted 0,
       1, ... `MOST` microbatches ahead. Where that changes nothing, as of one message a microbatch, the step
       stays as it is (and with one edge between any two ranks, none of it is done).
    2. The most buffers make the fastest step. Of those that take about as long (`WORTH`), the one with the
       fewest is taken, by simulations.
    3. Where it needs more than the step may, so do those with more buffers; step 2 is done for the others.

A receive that is posted earlier never makes a rank wait. A send is waited for before the run by which it has
left, so that buffers do not pile up and no wait is in the way.

The last run of a window has the order of the other runs from `lower`; here the orders of
`stretto.order.policies` are tried in a step: where a backward sends a message, weight gradients that come
first make another rank wait. The step of fewer microbatches (`Step.short`) ends as
the full one does, so orders are compared by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf

from stretto.errors import PlanError
from stretto.ir.action import AFTER, ONCE_PHASES
from stretto.ir.plan import InstructionKind, ItemKind, Plan, Window
from stretto.ir.timeline import SpanKind, Timeline
from stretto.order.depend import WindowGraph, make_graph
from stretto.order.last_runs import early_reductions
from stretto.order.policies import DEFAULT, captured_limit
from stretto.passes.step import Context, Step
from stretto.planning.lower import Message, lower
from stretto.planning.windows import as_short, lowered
from stretto.simulating import simulate
from stretto.verifying.memory import instruction_peaks, memory_faults

MOST = 3
"""As many microbatches as lowering posts ahead where each has one message (`planning.lower.LOOKAHEAD`)."""

WORTH = 0.995
"""Of a step's time, what it takes at most with more buffers. Assumed: less is within the error of costs, and
anyone who needs the memory for a larger model or batch gains more by it."""

SENT_MARGIN = 2.0
"""A send is waited for once this many times its predicted duration has gone by since its start. Assumed:
a message that is twice as slow as predicted still does not stop its sender."""


def receives_ahead(step: Step, context: Context) -> Step:
    """The step with the number of microbatches that receives are posted ahead. Raises PlanError for one whose
    ranks wait for each other forever."""
    ranks = step.schedule.stage_ranks
    pairs = Counter((ranks[edge.source], ranks[edge.target]) for edge in step.job.edges)
    if step.overlap == "off" or max(pairs.values(), default=0) < 2:
        return step
    tried: list[tuple[Step, Plan]] = []
    for ahead in range(MOST + 1):
        one = replace(step, ahead=ahead)
        draft = lowered(as_short(one, context), context)
        if not tried or draft.orders != tried[-1][1].orders:
            tried.append((one, draft))
    if len(tried) == 1:
        return step

    @cache
    def step_us(at: int) -> float:
        return simulate(tried[at][1]).step_us

    most = len(tried) - 1
    while most:
        chosen = next(at for at in range(most + 1) if step_us(at) <= step_us(most) / WORTH)
        if not chosen or _fits(tried[chosen][0], context):
            return tried[chosen][0]
        most = chosen - 1
    return step


def _fits(step: Step, context: Context) -> bool:
    """Step 3, with waits for sends where they will be."""
    if step.max_bytes is None or not memory_faults(lowered(step, context), step.max_bytes):
        return True
    return not memory_faults(lowered(sends_waited(step, context), context), step.max_bytes)


def sends_waited(step: Step, context: Context) -> Step:
    """The step with the run before which each send is waited for, by a simulation without. Raises PlanError
    for one whose ranks wait for each other forever."""
    draft = lowered(step, context)
    sends = any(i.kind is InstructionKind.SENT for order in draft.orders for i in order)
    if not sends or step.overlap == "off":
        return step
    return replace(step, sent_before=_sent_before(draft, simulate(draft)))


def _sent_before(plan: Plan, timeline: Timeline) -> Mapping[Message, int]:
    """Message -> the sender's run before which its send is waited for."""
    runs = {
        (action.stage, phase, action.microbatch): at
        for order in plan.schedule.orders
        for at, slot in enumerate(order)
        for action in slot.actions
        for phase in action.phase.programs
    }
    starts = [[inf] * len(order) for order in plan.schedule.orders]
    for span in timeline.spans:
        if span.kind is SpanKind.COMPUTE and span.phase is not None and span.phase not in ONCE_PHASES:
            assert span.stage is not None
            assert span.microbatch is not None
            at = runs[span.stage, span.phase.programs[0], span.microbatch]
            starts[span.rank][at] = min(starts[span.rank][at], span.start_us)
    for times in starts:
        # A run without ops takes no time and has no span: it begins when the one after it does.
        for at in reversed(range(len(times) - 1)):
            times[at] = min(times[at], times[at + 1])
    result: dict[Message, int] = {}
    for span in timeline.spans:
        if span.edge is not None:
            assert span.microbatch is not None
            assert span.sender is not None
            assert span.sent_us is not None
            safe = span.sent_us + SENT_MARGIN * (span.end_us - span.sent_us)
            sends = plan.job.edges[span.edge]
            first = runs[sends.source, sends.phase, span.microbatch] + 1
            later = (k for k in range(first, len(starts[span.sender])) if starts[span.sender][k] > safe)
            at_run = next(later, None)
            if at_run is not None:
                result[span.edge, span.microbatch] = at_run
    return result


def reductions_within(step: Step, context: Context) -> Step:
    """The step with the orders of last runs, as they are or with reductions as early as can be or at the end,
    that take least and have the memory that they need. Where those that use all memory of a rank have not,
    as what windows do to gradients is not counted in them, those that need no more than the captured one."""
    plan = lowered(step, context)
    for max_bytes in dict.fromkeys((step.max_bytes, None)):
        tried = _last_orders(plan, max_bytes, search=context.order == DEFAULT)
        if len(tried) == 1:
            break
        short = lowered(as_short(step, context), context)
        took_us = [_step_us(_with(short, windows)) for windows in tried]
        faster = [at for at, us in enumerate(took_us) if us < took_us[0]]
        for at in sorted(faster, key=took_us.__getitem__):
            made = replace(step, windows={**plan.windows, **tried[at]})
            if _fits(made, context):
                return made
        if not faster:
            break
    return step


def _last_orders(plan: Plan, max_bytes: int | None, search: bool) -> list[Mapping[str, Window]]:
    """What is tried: by name, windows with another order."""
    early = _reordered(plan, max_bytes, search)
    silent = {
        name: window
        for name, window in early.items()
        if all(item.kind is not ItemKind.SEND for item in window.items)
    }
    late = _at_end(plan) if plan.costs.shared else {}
    tried: list[Mapping[str, Window]] = [{}]
    tried += [windows for windows in (early, silent, late) if windows and windows not in tried]
    return tried


def reduced_best(plan: Plan) -> Timeline:
    """The step with reductions as they are, or at the end of last runs where that is faster: where
    collectives share network cards, a reduction takes its part of what compute waits for. Raises PlanError
    for a plan whose ranks wait for each other forever."""
    timeline = simulate(plan)
    late = _at_end(plan) if plan.costs.shared else {}
    if late:
        with suppress(PlanError):
            return min(timeline, simulate(_with(plan, late)), key=lambda one: one.step_us)
    return timeline


def _at_end(plan: Plan) -> dict[str, Window]:
    """By name, windows in which reductions start, with these at their end."""
    result: dict[str, Window] = {}
    for name, window in plan.windows.items():
        last = {part for part, (_, phase) in enumerate(window.parts) if phase is AFTER}
        items = tuple(sorted(window.items, key=lambda item: item.part in last))
        if items != window.items:
            result[name] = replace(window, items=items)
    return result


def _step_us(plan: Plan) -> float:
    """Infinite for a plan whose ranks wait for each other forever."""
    try:
        return simulate(plan).step_us
    except PlanError:
        return inf


def _reordered(plan: Plan, max_bytes: int | None, search: bool) -> dict[str, Window]:
    """By name, windows in which reductions start that have another order for it. Equal windows share it."""
    orders: dict[object, tuple[int, ...]] = {}
    result: dict[str, Window] = {}
    for rank in range(plan.ranks):
        starting = [w for _, _, w in plan.runs(rank) if 0 < len(w.actions) < len(w.parts)]
        graphs = {w.name: make_graph(plan.job, plan.costs, w, plan.schedule.stage_ranks) for w in starting}
        limits = {} if max_bytes is None else _limits(plan, rank, graphs, max_bytes)
        for name, graph in graphs.items():
            key = graph.key(), limits.get(name)
            if key not in orders:
                orders[key] = early_reductions(graph, limits.get(name), search=search)
            items = tuple(graph.nodes[index].item for index in orders[key])
            if items != graph.window.items:
                result[name] = replace(graph.window, items=items)
    return result


def _limits(plan: Plan, rank: int, graphs: Mapping[str, WindowGraph], max_bytes: int) -> Mapping[str, int]:
    """By name of a window, the bytes above those at its begin that it may use on the rank, which has the rest
    for what is kept besides the window."""
    peaks = {instruction.ref: peak for peak, instruction in instruction_peaks(plan, rank)}
    return {name: captured_limit(graph) + max_bytes - peaks[name] for name, graph in graphs.items()}


def _with(plan: Plan, windows: Mapping[str, Window]) -> Plan:
    """Lowered again, as receives are posted in the order of the sends."""
    windows = {**plan.windows, **windows}
    return lower(plan.job, plan.schedule, plan.costs, overlap=plan.overlap, windows=windows)
