"""Orders for a step in which each rank has one window: where the search (`order.search`) begins, and how far
it goes.

    1. How urgent an op is: the longest path to the end of its microbatch, over all ranks and lanes, less part
       of the step for every microbatch before its own. Without that part all forwards come first; with much
       of it, microbatches follow one another as in 1F1B.
    2. That part (SLOPES) is tried, first equal for all ranks, then rank by rank, the best kept. Small
       ops are not placed by themselves (LITTLE): a move then changes more.
    3. The search goes on from there.

The search takes the time that the step is worth over its run (EFFORT), less where little is left above the
bound (WIDE), and shows how far it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from stretto.ir.action import Action, Overlap, Phase
from stretto.ir.costs import Costs
from stretto.ir.plan import Item, Plan, Window
from stretto.ir.program import Job
from stretto.order.depend import Role, make_graph
from stretto.order.rank_window import RankWindow, make_rank_window
from stretto.order.search import (
    OrderSearch,
    SearchPoint,
    SearchScope,
    WalkBudget,
)
from stretto.passes.step import Watch
from stretto.schedule.windows import make_window, window_name
from stretto.simulating.windows import make_ready

SLOPES = (0.2, 0.3, 0.4, 0.6, 1.0)
"""Parts of the bound of a microbatch by which it is less urgent than the one before. Assumed."""

EFFORT = 12.0
"""Items walked for each microsecond of what the step is worth (`passes.step`): of a run of 1,000 steps,
planning takes about as long as 50."""

FEWEST = 20
"""Walks that are worth a search: with fewer, step 2 does not come to single ranks. Assumed."""

WIDE = 0.1
"""Part of the bound by which the best of step 2 is above it where all of that time is taken; of less, less.
Assumed: a search gains 1 to 7 % of the step, and much of what is left above the bound no order can have."""

LITTLE = 0.003
"""Share of a microbatch's work on a rank up to which an op comes directly before its first user, as views do.
Measured on the tensor race of hidden 2048: the search comes to 1.133 of the bound, to 1.176 with 0.0005,
1.126 with 0.01, 1.138 with 0.02 and 1.157 with 0.04. Small GPTs take 15 to 20 % longer with 0.01."""

STALE_WALKS = 300
"""Walks without a gain that end the search. Assumed."""

CHANGE = 0.4
"""By how much urgencies are changed, in parts of a microbatch's part of the step. Assumed."""

CLOSE = 1.01
"""A step is not searched for within this factor of its bound. Assumed."""

Frees = Sequence[Sequence[tuple[int, int]]]
"""By rank, `frees` of `make_graph`."""

NodeKey = tuple[int, bool, Item]
"""An item of any microbatch: stage, whether of F, and the item as of part 0."""


def order_together(
    plan: Plan,
    bound_us: float,
    walks: int | None = None,
    frees: Frees = (),
    worth_us: float | None = None,
    watch: Watch | None = None,
) -> tuple[Mapping[str, Window], WalkBudget] | None:
    """The windows with the shortest step that the search finds in its time (EFFORT), and what it has spent.

    plan: each rank has one window, in the captured order. bound_us: no order is faster. walks: at most
    so many, instead. frees: by rank, which forwards begin when which backwards are done (`make_graph`).
    worth_us: of the step over its run; the bound without it. watch: takes lines of progress; at an interrupt
    that it takes, the best so far counts. None where no order lets all ranks reach their end.
    """
    items = sum(len(window.items) for window in plan.windows.values())
    allowed = walks or walks_allowed(items, bound_us if worth_us is None else worth_us)
    each_us = bound_us / plan.job.microbatches
    budget = WalkBudget(allowed, watch, bound_us)
    scope = SearchScope(rank_windows(plan, frees), CLOSE * bound_us, CHANGE * each_us, plan)
    search = OrderSearch(scope, budget)
    try:
        _begin(search, plan, each_us)
        if walks is None:
            budget.left = int(budget.left * _wide(search, bound_us))
        search.improve(STALE_WALKS)
    except KeyboardInterrupt as error:
        if search.best is None or watch is None:
            raise
        watch.stop(error)
    if search.best is None:
        return None
    windows = {
        of_rank.graph.window.name: replace(
            of_rank.graph.window, items=tuple(of_rank.graph.nodes[index].item for index in order)
        )
        for of_rank, order in zip(scope.windows, search.best.orders, strict=True)
    }
    return windows, budget


def walks_allowed(items: int, worth_us: float) -> int:
    """How often a step of so many items may be walked, at least once. worth_us: as in `order_together`."""
    return max(1, int(EFFORT * worth_us) // max(1, items))


def _begin(search: OrderSearch, plan: Plan, each_us: float) -> None:
    """Step 2. each_us: the bound of a microbatch."""
    windows = search.scope.windows
    known_us = tails_us(plan.job, plan.costs, plan.schedule.stage_ranks)
    best = (SLOPES[0],) * len(windows)

    def tries(slopes: tuple[float, ...]) -> bool:
        pairs = zip(windows, slopes, strict=True)
        urgency = tuple(_urgency(window, known_us, slope * each_us) for window, slope in pairs)
        return not search.ended and search.tried(SearchPoint(urgency))

    for slope in SLOPES:
        if tries((slope,) * len(windows)):
            best = (slope,) * len(windows)
    for rank in range(len(windows)):
        for slope in SLOPES:
            changed = (*best[:rank], slope, *best[rank + 1 :])
            if changed != best and tries(changed):
                best = changed


def _wide(search: OrderSearch, bound_us: float) -> float:
    """WIDE: which part of its time a search is worth, by where it has come."""
    return min(1.0, max(0.0, search.measure_us / bound_us - 1.0) / WIDE) if bound_us else 1.0


def _urgency(window: RankWindow, known_us: Mapping[NodeKey, float], later_us: float) -> list[float]:
    """Step 1, by node. known_us: `tails_us`; later_us: by how much a microbatch is less urgent than the one
    before."""
    result: list[float] = []
    for node in window.graph.nodes:
        stage, phase = window.graph.window.parts[node.item.part]
        us = known_us[stage, phase is Phase.F, replace(node.item, part=0)]
        result.append(us - later_us * window.microbatches[node.item.part])
    return result


def tails_us(job: Job, costs: Costs, stage_ranks: Sequence[int]) -> Mapping[NodeKey, float]:
    """The longest path from an item to the end of its microbatch, itself and lanes included."""
    nodes = {}
    after: dict[tuple[int, int], list[tuple[int, int]]] = {}
    receives: dict[int, tuple[int, int]] = {}
    for stage in range(len(job.stages)):
        slot = Overlap((Action(stage, Phase.F, 0), Action(stage, Phase.B, 0)))
        graph = make_graph(job, costs, make_window(job, slot), stage_ranks)
        for index, node in enumerate(graph.nodes):
            nodes[stage, index] = graph.window.parts[node.item.part][1], node
            after[stage, index] = [(stage, other) for other in graph.after[index]]
            if node.role is Role.RECEIVE:
                receives[int(node.item.ref)] = stage, index
    for key, (_, node) in nodes.items():
        if node.role is Role.SEND:
            after[key].append(receives[int(node.item.ref)])
    path_us: dict[tuple[int, int], float] = {}
    for key in TopologicalSorter(after).static_order():
        _, node = nodes[key]
        leads = node.role in (Role.START, Role.SEND) and after[key]
        behind_us = max((path_us[other] for other in after[key]), default=0.0)
        path_us[key] = node.work_us + (node.time_us if leads else 0.0) + behind_us
    return {
        (stage, nodes[stage, index][0] is Phase.F, replace(nodes[stage, index][1].item, part=0)): us
        for (stage, index), us in path_us.items()
    }


def rank_windows(plan: Plan, frees: Frees = (), little: float = LITTLE) -> tuple[RankWindow, ...]:
    """By rank, what is ordered. frees: by rank, as in `make_graph`; little: as in `make_rank_window`."""
    result: list[RankWindow] = []
    for rank, (slot,) in enumerate(plan.schedule.orders):
        window = plan.windows[window_name(slot)]
        microbatches = tuple(action.microbatch for action in slot.actions)
        own = frees[rank] if frees else ()
        graph = make_graph(plan.job, plan.costs, window, plan.schedule.stage_ranks, microbatches, own)
        calls = make_ready(plan, window.name).calls
        result.append(make_rank_window(graph, microbatches, calls, little))
    return tuple(result)
