"""Orders for a step in which each rank has one window: the best found over urgencies of its ops.

    1. How urgent an op is: the longest path to the end of its microbatch (`whole_step.graphs`), less part of
       the step for every microbatch before its own. Without that part all forwards come first; with much of
       it, microbatches follow one another as in 1F1B.
    2. That part (SLOPES) and the patience of each rank (`order.listing`) are tried: first equal for all
       ranks, then rank by rank, the best kept. This for each way to let messages leave in pairs
       (`whole_step.pairs`), and without pairs; the most promising go on.
    3. Then rounds, each with another urgency of one or two stretches, or of some actions, or another
       patience, or a message paired otherwise; what does not make the step longer is kept.
    4. All this with more and with fewer of the small ops placed for themselves (LITTLE): with fewer, a round
       changes more. The best of these go on.
    5. Then the steps are pushed to their end and back (`whole_step.justify`), and single ops are moved
       (`whole_step.moves`): a few for each, many for the best.

The search takes the time that the step is worth (EFFORT) and says how far it came. Steps walked are counted,
not timed, and draws have a fixed seed, so equal jobs get equal plans on every machine. May touch `stretto.ir`
and this room.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.ir.plan import Plan, Window
from stretto.order.scope import Whole
from stretto.order.walk import Chosen
from stretto.order.whole_step.budget import Budget
from stretto.order.whole_step.choose import choose
from stretto.order.whole_step.graphs import Graphs, Ready
from stretto.order.whole_step.justify import justify
from stretto.order.whole_step.moves import move_ops
from stretto.order.whole_step.pairs import MORE, Borders, borders, paired

SLOPES = (0.2, 0.3, 0.4, 0.6, 1.0)
"""Parts of the bound of a microbatch by which it is less urgent than the one before. Assumed."""

PATIENCE = (0.0, 0.5, 1.0)
"""Tried for each rank. Assumed."""

MOST = 300
"""Steps walked by one search, in steps 2 and 3."""

EFFORT = 12.0
"""Items walked for each microsecond of the step: planning takes about as long as 50 of its steps, once."""

LEAST, LARGEST = 1_200_000, 30_000_000
"""Items walked for even the shortest step, and for the longest. Measured: 5 s and 120 s on one core."""

SEARCHING = 0.7
"""Part of them that steps 2 to 4 may take; the rest is for the best of them. Assumed."""

STALE = 150
"""So many steps without a gain end the search. Assumed."""

GAIN = 0.0005
"""Share of a step that counts as a gain. Assumed."""

LITTLE = (0.0005, 0.003, 0.01)
"""Of a microbatch's work on a rank, what ops take at most that are placed directly before their first user,
as views are. On GPTs over pp=2 tp=2 the first is five ops of six and 2 % of the time. Measured on the tensor
race of hidden 2048: the search comes to 1.176, 1.133 and 1.126 of the bound, to 1.138 with 0.02 and 1.157
with 0.04; when ops have been moved 1.146, 1.118 and 1.113 are left."""

PAIRING = 0.1
"""Share of the rounds that pair a message otherwise. Assumed."""

PROMISING = 2
"""Ways to pair messages, for each of LITTLE, that are searched beyond slopes. Where a search ends is within
2 % a matter of luck. Measured on the tensor race of hidden 2048 over pp=2: of eight with other draws, 300
rounds each, the worst came to 1.140 of the bound and the best to 1.121."""

FINALISTS = 3
"""Searches that go on, whose steps are pushed, and whose ops are moved, at most. Assumed."""

A_FINALIST_US = 1_000_000.0
"""Of a step, what is worth one finalist beyond the first: it takes some 20 s, once. Assumed."""

LONGER = 1_000
"""Rounds more for each of FINALISTS. On the same step these gain up to another 2 %."""

A_WALK_US = 10_000.0
"""Of a step, what is worth one of these rounds. They take some 10 ms, once. Assumed."""

TRIAL = 0.25
"""Of the moves for one job, those by which finalists are compared. Assumed."""

CLOSE = 1.01
"""A step this close to its bound needs no search. Assumed."""


@dataclass(frozen=True, slots=True)
class Found:
    """The windows with the shortest step that was found. walks: how many steps were walked for it; ended:
    whether the search ended by itself, and not because its time was up."""

    windows: dict[str, Window]
    walks: int
    ended: bool


def order_together(plan: Plan, bound_us: float, walks: int | None = None) -> Found | None:
    """The windows with the shortest step that the search finds in its time (EFFORT).

    plan: each rank has one window, in the captured order. bound_us: no order is faster. walks: at most
    so many, instead. None where no order lets all ranks reach their end.
    """
    items = sum(len(window.items) for window in plan.windows.values())
    budget = Budget(walks or max(1, int(min(LARGEST, max(LEAST, EFFORT * bound_us))) // items))
    later = budget.keep(1.0 - SEARCHING)
    searches = _searches(plan, bound_us, budget)
    # 5.
    budget.left += later
    enough_us = CLOSE * bound_us
    found: list[tuple[Chosen, Sequence[Whole]]] = []
    finalists = min(FINALISTS, 1 + int(searches[0].step_us / A_FINALIST_US)) if searches[0].best else 0
    for behind, search in reversed(list(enumerate(searches[:finalists]))):
        if search.best is not None:
            later = budget.keep(behind / (behind + 1))
            search.go_on(min(LONGER, int(search.step_us / A_WALK_US)))
            pushed = justify(plan, search.wholes, search.best, enough_us, budget, search.pairs)
            moved = move_ops(plan, search.wholes, pushed, enough_us, budget, share=TRIAL)
            found.append((moved, search.wholes))
            budget.left += later
    if not found:
        return None
    best, wholes = min(found, key=lambda one: one[0].measure_us)
    best = move_ops(plan, wholes, best, enough_us, budget)
    windows = {
        whole.graph.window.name: replace(
            whole.graph.window, items=tuple(whole.graph.nodes[index].item for index in order)
        )
        for whole, order in zip(wholes, best.orders, strict=True)
    }
    return Found(windows, budget.spent, budget.left > 0)


def _searches(plan: Plan, bound_us: float, budget: Budget) -> list[_Search]:
    """Steps 2 to 4, the best first."""
    apart = borders(plan)
    ways = list(dict.fromkeys([apart, *(paired(plan, apart, more) for more in MORE)]))
    graphs = Graphs.of(plan)
    found: list[_Search] = []
    for behind, little in reversed(list(enumerate(reversed(LITTLE)))):
        later = budget.keep(behind / (behind + 1))
        ready = graphs.ready(little)
        searches = []
        for pairs in ways:
            if budget.left or not found:
                searches.append(_Search(plan, bound_us, budget, ready, pairs))
                searches[-1].slopes()
        searches.sort(key=lambda search: search.step_us)
        for search in searches[:PROMISING]:
            search.rounds()
        found += searches[:PROMISING]
        budget.left += later
    return sorted(found, key=lambda search: search.step_us)


@dataclass(frozen=True, slots=True)
class _Point:
    """Where the search stands: by rank, the urgency of nodes, and patience; messages that leave together."""

    urgency: tuple[tuple[float, ...], ...]
    patience: tuple[float, ...]
    pairs: Borders = ()


class _Search:
    def __init__(
        self, plan: Plan, bound_us: float, budget: Budget, ready: Ready, pairs: Borders = ()
    ) -> None:
        self._plan = plan
        self._bound_us = bound_us
        self._budget = budget
        self._left = MOST
        self._stale = 0
        self._enough_stale = STALE
        self._mark_us = float("inf")
        self._ready = ready
        self.wholes = ready.wholes
        self._point = _Point((), (), pairs)
        self._draw = random.Random(0)
        self.best: Chosen | None = None

    @property
    def step_us(self) -> float:
        """Of the best step so far."""
        return float("inf") if self.best is None else self.best.step_us

    @property
    def pairs(self) -> Borders:
        """Messages that leave together in it."""
        return self._point.pairs

    def _try(self, point: _Point) -> bool:
        """Walk the step, and keep the point if the step does not get longer."""
        self._left -= 1
        self._stale += 1
        self._budget.spend()
        found = choose(self._plan, self.wholes, point.urgency, point.patience, point.pairs)
        if found is None or (self.best is not None and found.step_us > self.best.step_us):
            return False
        if found.step_us < self._mark_us * (1.0 - GAIN):
            self._mark_us, self._stale = found.step_us, 0
        self.best, self._point = found, point
        return True

    def _enough(self) -> bool:
        if self._left <= 0 or not self._budget.left or self._stale >= self._enough_stale:
            return True
        return self.best is not None and self.best.step_us <= CLOSE * self._bound_us

    # --- step 2 -------------------------------------------------------------------------------------

    def slopes(self) -> None:
        ranks = range(len(self.wholes))
        tried = [((slope,) * len(ranks), (wait,) * len(ranks)) for slope in SLOPES for wait in PATIENCE[:2]]
        best = tried[0]
        for one in tried:
            if not self._enough() and self._try(self._sloped(*one)):
                best = one
        for rank in ranks:
            for slope in SLOPES:
                best = self._other(best, rank, slope, best[1][rank])
            for wait in PATIENCE:
                best = self._other(best, rank, best[0][rank], wait)

    def _other(
        self, best: tuple[tuple[float, ...], tuple[float, ...]], rank: int, slope: float, wait: float
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The best so far, or it with these of one rank."""
        slopes = (*best[0][:rank], slope, *best[0][rank + 1 :])
        waits = (*best[1][:rank], wait, *best[1][rank + 1 :])
        if (slopes, waits) == best or self._enough() or not self._try(self._sloped(slopes, waits)):
            return best
        return slopes, waits

    def _sloped(self, slopes: Sequence[float], patience: tuple[float, ...]) -> _Point:
        each_us = self._bound_us / self._plan.job.microbatches
        return _Point(
            tuple(
                tuple(
                    us - slopes[rank] * each_us * whole.microbatches[node.item.part]
                    for us, node in zip(self._ready.tails_us[rank], whole.graph.nodes, strict=True)
                )
                for rank, whole in enumerate(self.wholes)
            ),
            patience,
            self._point.pairs,
        )

    # --- step 3 -------------------------------------------------------------------------------------

    def go_on(self, rounds: int) -> None:
        """So many rounds more, at most."""
        self._left, self._stale, self._enough_stale = rounds, 0, 2 * STALE
        self.rounds()

    def rounds(self) -> None:
        if self.best is None or not self._ready.groups:
            return
        draw = self._draw
        each_us = self._bound_us / self._plan.job.microbatches
        while not self._enough():
            urgency = [list(of) for of in self._point.urgency]
            patience = list(self._point.patience)
            pairs = list(self._point.pairs)
            kind = draw.random()
            if pairs and draw.random() < PAIRING:
                at = draw.randrange(len(pairs))
                pairs[at] = pairs[at].moved(draw)
            elif kind < 0.5:
                for _ in range(draw.choice((1, 1, 2, 3))):
                    rank, group = draw.choice(self._ready.groups)
                    change_us = draw.gauss(0.0, 0.4) * each_us
                    for index in group:
                        urgency[rank][index] += change_us
            elif kind < 0.92:
                for _ in range(draw.choice((1, 1, 2))):
                    rank = draw.randrange(len(self.wholes))
                    part = draw.randrange(len(self.wholes[rank].microbatches))
                    change_us = draw.gauss(0.0, draw.choice((0.1, 0.5))) * each_us
                    for index, node in enumerate(self.wholes[rank].graph.nodes):
                        if node.item.part == part:
                            urgency[rank][index] += change_us
            else:
                patience[draw.randrange(len(patience))] = draw.choice((0.0, 0.25, 0.5, 0.75, 1.0, 1.5))
            self._try(_Point(tuple(map(tuple, urgency)), tuple(patience), tuple(pairs)))
