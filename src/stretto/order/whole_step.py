"""Orders for a step in which each rank has one window: where the search (`order.search`) begins, and how far
it goes.

    1. How urgent an op is: the longest path to the end of its microbatch (`order.graphs`), less part of
       the step for every microbatch before its own. Without that part all forwards come first; with much of
       it, microbatches follow one another as in 1F1B.
    2. That part (SLOPES) and the patience of each rank (`order.listing`) are tried: first equal for all
       ranks, then rank by rank, the best kept. This for each way to let messages leave in pairs
       (`order.pairs`), and without pairs, and with more and with fewer of the small ops placed for themselves
       (LITTLE): with fewer, a move changes more.
    3. The most promising go on by other urgencies, the best of these by pushes and single ops, and last the
       best of all, as long as there are walks.

The search takes the time that the step is worth over its run (EFFORT), less where little is left above the
bound (WIDE), and says how far it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.plan import Plan, Window
from stretto.order.graphs import Frees, Graphs
from stretto.order.moves import by_op, relisted
from stretto.order.pairs import MORE, Borders, borders, paired
from stretto.order.push import Pushing
from stretto.order.search import Budget, Point, Scope, Search
from stretto.order.walk import Chosen
from stretto.passes.watch import Watch

SLOPES = (0.2, 0.3, 0.4, 0.6, 1.0)
"""Parts of the bound of a microbatch by which it is less urgent than the one before. Assumed."""

PATIENCE = (0.0, 0.5, 1.0)
"""Tried for each rank. Assumed."""

EFFORT = 12.0
"""Items walked for each microsecond of what the step is worth (`passes.effort`): of a run of 1,000 steps,
planning takes about as long as 50."""

LEAST = 60_000
"""Items walked for even the shortest run. Measured: 0.25 s on one core."""

FEWEST = 20
"""Walks that are worth a search: with fewer, step 2 does not come to single ranks. Assumed."""

WIDE = 0.1
"""Above the bound, by which part of it the best of step 2 is where all of that time is taken; of less, less.
Assumed: a search gains 1 to 7 % of the step, and much of what is left above the bound no order can have."""

SEARCHING = 0.7
"""Part of them that step 2 and other urgencies may take; the rest is for the best of them. Assumed."""

MOST, STALE = 300, 150
"""Other urgencies from one beginning, at most, and walks without a gain that end them. Assumed."""

PUSHES, PUSHES_STALE = 300, 200
"""The same of pushes, which take two walks each. Measured on GPTs over pp=2 tp=2: 60 gain 1 to 7 % of what
the search before has found, in a second or two, and 300 up to another 2 %."""

MOVES, MOVES_STALE = 4_000, 1_000
"""The same of single ops."""

A_MOVE_US = 2_000.0
"""Of a step, what is worth moving an op once. A move takes some 10 ms, once, and the first thousand gain 1 %:
short steps would have to be run many times to pay for that. Assumed."""

CHANGE = 0.4
"""Of a microbatch's part of the step, by how much urgencies are changed. Assumed."""

LITTLE = (0.0005, 0.003, 0.01)
"""Of a microbatch's work on a rank, what ops take at most that are placed directly before their first user,
as views are. On GPTs over pp=2 tp=2 the first is five ops of six and 2 % of the time. Measured on the tensor
race of hidden 2048: the search comes to 1.176, 1.133 and 1.126 of the bound, to 1.138 with 0.02 and 1.157
with 0.04; when ops have been moved 1.146, 1.118 and 1.113 are left."""

PROMISING = 2
"""Ways to pair messages, for each of LITTLE, that are searched beyond slopes. Where a search ends is within
2 % a matter of luck. Measured on the tensor race of hidden 2048 over pp=2: of eight with other draws, 300
moves each, the worst came to 1.140 of the bound and the best to 1.121."""

FINALISTS = 3
"""Searches that go on by pushes and single ops, at most. Assumed."""

A_FINALIST_US = 1_000_000.0
"""Of a step, what is worth one finalist beyond the first: it takes some 20 s, once. Assumed."""

LONGER = 1_000
"""Other urgencies more for each of FINALISTS. On the same step these gain up to another 2 %."""

A_WALK_US = 10_000.0
"""Of a step, what is worth one of these. They take some 10 ms, once. Assumed."""

TRIAL = 0.25
"""Of the moves of single ops, those by which finalists are compared. Assumed."""

CLOSE = 1.01
"""A step this close to its bound needs no search. Assumed."""


@dataclass(frozen=True, slots=True)
class Found:
    """The windows with the shortest step that was found. walks: how many steps were walked for it; allowed:
    how many could have been."""

    windows: Mapping[str, Window]
    walks: int
    allowed: int

    @property
    def ended(self) -> bool:
        """Whether the search ended by itself, and not because its time was up."""
        return self.walks < self.allowed


def order_together(
    plan: Plan,
    bound_us: float,
    walks: int | None = None,
    frees: Frees = (),
    worth_us: float | None = None,
    watch: Watch | None = None,
) -> Found | None:
    """The windows with the shortest step that the search finds in its time (EFFORT).

    plan: each rank has one window, in the captured order. bound_us: no order is faster. walks: at most
    so many, instead. frees: by rank, which forwards begin when which backwards are done (`make_graph`).
    worth_us: of the step over its run; the bound without it. watch: is told how far it is; at an interrupt
    that it takes, the best so far counts. None where no order lets all ranks reach their end.
    """
    items = sum(len(window.items) for window in plan.windows.values())
    worth_us = bound_us if worth_us is None else worth_us
    allowed = walks or walks_allowed(items, worth_us)
    budget = Budget(allowed, watch, bound_us)
    try:
        last = _searched(plan, bound_us, budget, frees, worth_us, walks is None)
    except KeyboardInterrupt as error:
        last = budget.best
        if last is None or watch is None:
            raise
        watch.stop(error)
    if last is None:
        return None
    windows = {
        whole.graph.window.name: replace(
            whole.graph.window, items=tuple(whole.graph.nodes[index].item for index in order)
        )
        for whole, order in zip(last[0].wholes, last[1].orders, strict=True)
    }
    return Found(windows, budget.spent, allowed)


def walks_allowed(items: int, worth_us: float) -> int:
    """How often a step of so many items may be walked, at least once. worth_us: as in `order_together`."""
    return max(1, int(max(LEAST, EFFORT * worth_us)) // max(1, items))


def _searched(
    plan: Plan, bound_us: float, budget: Budget, frees: Frees, worth_us: float, less: bool
) -> tuple[Scope, Chosen] | None:
    """All steps: the best, and its scope. less: whether WIDE counts."""
    later = budget.keep(1.0 - SEARCHING)
    found = _begun(plan, bound_us, budget, frees, less)
    found.sort(key=_measure_us)
    if not found:
        return None
    budget.left += int(later * (_open(found[0], bound_us) if less else 1.0))
    finalists = found[: min(FINALISTS, 1 + int(worth_us / A_FINALIST_US))]
    ends = [_longer(search, worth_us) for search in budget.shared(finalists)]
    last = min(ends, key=_measure_us)
    return last.scope, by_op(last, _moves(worth_us, 1.0), MOVES_STALE)


def _open(search: Search, bound_us: float) -> float:
    """WIDE: which part of its time a search is given, by where it has come."""
    return min(1.0, max(0.0, search.measure_us / bound_us - 1.0) / WIDE) if bound_us else 1.0


def _measure_us(search: Search) -> float:
    return search.measure_us


def _begun(plan: Plan, bound_us: float, budget: Budget, frees: Frees, less: bool) -> list[Search]:
    """Step 2, and other urgencies; searches that let all ranks reach their end."""
    apart = borders(plan)
    ways = list(dict.fromkeys([apart, *(paired(plan, apart, more) for more in MORE)]))
    graphs = Graphs.of(plan, frees)
    each_us = bound_us / plan.job.microbatches
    found: list[Search] = []
    for little in budget.shared(LITTLE):
        scope = Scope(graphs.wholes(little), CLOSE * bound_us, CHANGE * each_us, plan)
        tried = [sloped(scope, graphs, each_us, budget, pairs) for pairs in ways if budget.left or not found]
        tried = [search for search in tried if search.best is not None]
        tried.sort(key=_measure_us)
        if less and tried:
            budget.left = int(budget.left * _open(tried[0], bound_us))
        found += [search.go(relisted, MOST, STALE) for search in tried[:PROMISING]]
        if any(search.close for search in found):
            break
    return found


def sloped(scope: Scope, graphs: Graphs, each_us: float, budget: Budget, pairs: Borders = ()) -> Search:
    """Step 2 of one scope, and of one way to let messages leave in pairs."""
    ranks = range(len(scope.wholes))
    search = Search(scope, budget)

    def tries(one: tuple[tuple[float, ...], tuple[float, ...]]) -> bool:
        return not search.ended and search.tried(point_of(scope, graphs, each_us, *one, pairs))

    equal = [((slope,) * len(ranks), (wait,) * len(ranks)) for slope in SLOPES for wait in PATIENCE[:2]]
    best = equal[0]
    for one in equal:
        best = one if tries(one) else best
    for rank in ranks:
        for slope in SLOPES:
            one = _with(best[0], rank, slope), best[1]
            best = one if one != best and tries(one) else best
        for wait in PATIENCE:
            one = best[0], _with(best[1], rank, wait)
            best = one if one != best and tries(one) else best
    return search


def _with(values: tuple[float, ...], rank: int, value: float) -> tuple[float, ...]:
    return (*values[:rank], value, *values[rank + 1 :])


def point_of(
    scope: Scope,
    graphs: Graphs,
    each_us: float,
    slopes: Sequence[float],
    patience: tuple[float, ...],
    pairs: Borders = (),
) -> Point:
    """Step 1. each_us: the bound of a microbatch."""
    urgency = tuple(
        tuple(
            us - slopes[rank] * each_us * whole.microbatches[node.item.part]
            for us, node in zip(graphs.tails_us[rank], whole.graph.nodes, strict=True)
        )
        for rank, whole in enumerate(scope.wholes)
    )
    return Point(urgency, patience, pairs)


def _longer(search: Search, worth_us: float) -> Search:
    """A finalist goes on."""
    search.go(relisted, min(LONGER, int(worth_us / A_WALK_US)), 2 * STALE)
    search.go(Pushing(search.scope.wholes), PUSHES, PUSHES_STALE)
    search.best = by_op(search, _moves(worth_us, TRIAL), MOVES_STALE)
    return search


def _moves(worth_us: float, share: float) -> int:
    """How many moves of single ops the step is worth."""
    return int(share * min(MOVES, worth_us / A_MOVE_US))
