"""Orders for a step in which each rank has one window: where the search (`order.search`) begins, and how far
it goes.

    1. How urgent an op is: the longest path to the end of its microbatch, over all ranks and lanes, less part
       of the step for every microbatch before its own. Without that part all forwards come first; with much
       of it, microbatches follow one another as in 1F1B.
    2. That part (SLOPES) and the patience of each rank (`order.list_scheduler`) are tried: first equal for
       all ranks, then rank by rank, the best kept. This with more and with fewer of the small ops placed by
       themselves (LITTLE): with fewer, a move changes more.
    3. Each goes on by other urgencies, and the best of them by forward-backward improvement.

The search takes the time that the step is worth over its run (EFFORT), less where little is left above the
bound (WIDE), and shows how far it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from graphlib import TopologicalSorter

from stretto.ir.action import Action, Overlap, Phase
from stretto.ir.costs import Costs
from stretto.ir.plan import Item, Plan, Window
from stretto.ir.program import Job
from stretto.order.depend import Role, make_graph
from stretto.order.rank_window import RankWindow, make_rank_window
from stretto.order.search import (
    ForwardBackward,
    OrderSearch,
    SearchPoint,
    SearchScope,
    WalkBudget,
    new_urgencies,
)
from stretto.passes.step import Watch
from stretto.schedule.windows import make_window, window_name
from stretto.simulating.windows import make_ready

SLOPES = (0.2, 0.3, 0.4, 0.6, 1.0)
"""Parts of the bound of a microbatch by which it is less urgent than the one before. Assumed."""

PATIENCE = (0.0, 0.5, 1.0)
"""Tried for each rank, in parts of a collective's time. Assumed."""

EFFORT = 12.0
"""Items walked for each microsecond of what the step is worth (`passes.step`): of a run of 1,000 steps,
planning takes about as long as 50."""

FEWEST = 20
"""Walks that are worth a search: with fewer, step 2 does not come to single ranks. Assumed."""

WIDE = 0.1
"""Part of the bound by which the best of step 2 is above it where all of that time is taken; of less, less.
Assumed: a search gains 1 to 7 % of the step, and much of what is left above the bound no order can have."""

LITTLE = (0.003, 0.01)
"""Shares of a microbatch's work on a rank up to which an op comes directly before its first user, as views
do. Measured on the tensor race of hidden 2048: the search comes to 1.133 and 1.126 of the bound, to 1.176
with 0.0005, 1.138 with 0.02 and 1.157 with 0.04."""

URGENCIES = 0.5
"""Part of the walks that steps 2 and 3 may take before forward-backward improvement. Measured on the job
"pp2 tp2 eager-1f1b" of `benchmarks/grid.py`: the step is 2 % shorter than with 0.7, which is
also the noise of the search."""

MOVES = 600
"""Moves of a kind from one beginning, at most. Measured on GPTs over pp=2 tp=2: 60 of forward-backward
improvement gain 1 to 7 %, and 300 up to another 2 %."""

STALE_WALKS = 300
"""Walks without a gain that end a kind of moves. Assumed."""

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
    budget = WalkBudget(allowed, watch, bound_us)
    try:
        _search(plan, bound_us, budget, frees, walks is None)
    except KeyboardInterrupt as error:
        if budget.best is None or watch is None:
            raise
        watch.stop(error)
    if budget.best is None:
        return None
    windows = {
        of_rank.graph.window.name: replace(
            of_rank.graph.window, items=tuple(of_rank.graph.nodes[index].item for index in order)
        )
        for of_rank, order in zip(budget.best[0].windows, budget.best[1].orders, strict=True)
    }
    return windows, budget


def walks_allowed(items: int, worth_us: float) -> int:
    """How often a step of so many items may be walked, at least once. worth_us: as in `order_together`."""
    return max(1, int(EFFORT * worth_us) // max(1, items))


def _search(plan: Plan, bound_us: float, budget: WalkBudget, frees: Frees, less: bool) -> None:
    """Steps 2 and 3; the budget keeps the best. less: whether WIDE counts."""
    graphs = StepGraphs.of(plan, frees)
    each_us = bound_us / plan.job.microbatches
    aside = budget.set_aside(1.0 - URGENCIES)
    searches: list[OrderSearch] = []
    for little in budget.shared(LITTLE):
        scope = SearchScope(graphs.rank_windows(little), CLOSE * bound_us, CHANGE * each_us, plan)
        search = begin_search(scope, graphs, each_us, budget)
        if less:
            budget.left = int(budget.left * _wide(search, bound_us))
        searches.append(search.go(new_urgencies, MOVES, STALE_WALKS))
        if search.close:
            break
    best = min(searches, key=lambda search: search.measure_us)
    budget.left += int(aside * (_wide(best, bound_us) if less else 1.0))
    best.go(ForwardBackward(best.scope.windows), MOVES, STALE_WALKS)


def _wide(search: OrderSearch, bound_us: float) -> float:
    """WIDE: which part of its time a search is worth, by where it has come."""
    return min(1.0, max(0.0, search.measure_us / bound_us - 1.0) / WIDE) if bound_us else 1.0


def begin_search(scope: SearchScope, graphs: StepGraphs, each_us: float, budget: WalkBudget) -> OrderSearch:
    """Step 2 of one scope. each_us: the bound of a microbatch."""
    ranks = range(len(scope.windows))
    search = OrderSearch(scope, budget)

    def tries(slopes: tuple[float, ...], patience: tuple[float, ...]) -> bool:
        return not search.ended and search.tried(point_of(scope, graphs, each_us, slopes, patience))

    equal = [((slope,) * len(ranks), (wait,) * len(ranks)) for slope in SLOPES for wait in PATIENCE[:2]]
    slopes, patience = equal[0]
    for candidate in equal:
        if tries(*candidate):
            slopes, patience = candidate
    for rank in ranks:
        for slope in SLOPES:
            changed = _with(slopes, rank, slope)
            if changed != slopes and tries(changed, patience):
                slopes = changed
        for wait in PATIENCE:
            changed = _with(patience, rank, wait)
            if changed != patience and tries(slopes, changed):
                patience = changed
    return search


def _with(values: tuple[float, ...], rank: int, value: float) -> tuple[float, ...]:
    return (*values[:rank], value, *values[rank + 1 :])


def point_of(
    scope: SearchScope,
    graphs: StepGraphs,
    each_us: float,
    slopes: Sequence[float],
    patience: tuple[float, ...],
) -> SearchPoint:
    """Step 1. each_us: the bound of a microbatch."""
    urgency = tuple(
        tuple(
            us - slopes[rank] * each_us * window.microbatches[node.item.part]
            for us, node in zip(graphs.tails_us[rank], window.graph.nodes, strict=True)
        )
        for rank, window in enumerate(scope.windows)
    )
    return SearchPoint(urgency, patience)


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


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """What does not depend on which ops are placed by themselves. By rank: what makes a window, and by node
    `tails_us`."""

    makers: tuple[Callable[..., RankWindow], ...]
    tails_us: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(plan: Plan, frees: Frees = ()) -> StepGraphs:
        """frees: by rank, as in `make_graph`."""
        job, costs, ranks = plan.job, plan.costs, plan.schedule.stage_ranks
        known_us = tails_us(job, costs, ranks)
        makers: list[Callable[..., RankWindow]] = []
        tails: list[tuple[float, ...]] = []
        for rank, (slot,) in enumerate(plan.schedule.orders):
            window = plan.windows[window_name(slot)]
            microbatches = tuple(action.microbatch for action in slot.actions)
            graph = make_graph(job, costs, window, ranks, microbatches, frees[rank] if frees else ())
            calls = make_ready(plan, window.name).calls
            makers.append(partial(make_rank_window, graph, microbatches, calls))
            of_nodes = [(*window.parts[node.item.part], replace(node.item, part=0)) for node in graph.nodes]
            tails.append(tuple(known_us[stage, phase is Phase.F, item] for stage, phase, item in of_nodes))
        return StepGraphs(tuple(makers), tuple(tails))

    def rank_windows(self, little: float) -> tuple[RankWindow, ...]:
        """By rank, with one size of ops that are placed by themselves."""
        return tuple(make(little=little) for make in self.makers)
