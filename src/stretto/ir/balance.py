"""A chain of work cut into consecutive parts of equal cost: layers into stages, stages into groups.

1. `cut_chain`: the most expensive part costs as little as possible; of all such cuts, the sum of squares is
   the least, so that no part is left small without need. Of equal ones, earlier parts are the smaller: the
   first stages of a pipeline have the most microbatches. Both by dynamic programming.
2. `even_ranks`: where ranks have several parts each, borders move until the ranks' own sums are even. A move
   takes a run of borders one place on, or one place back: a single border moves work between neighbours only.
   Moves that gain little (`WORTH`) in all are not made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Cost = Callable[[int, int, int], float]
"""(first place, end place, part) -> cost of the part between them; infinite where it may not be."""

WORTH = 0.02
"""Share of the busiest rank's work by which moves of borders must lower it: estimates are off by as much, and
uneven stages make their neighbours wait. Assumed, as where variants of a plan are compared."""

ROUNDING = 1e-9
"""Relative difference that floating-point sums make. Assumed."""


def cut_chain(until: Sequence[float], parts: int, cost: Cost) -> list[int] | None:
    """The places at which parts 1, 2, ... begin, ascending; None where no cut is allowed.

    until: work before each place, ascending; the first place is 0, the last is the end of the chain. No part
    costs less than the work in it, and none is empty.
    """
    most = _best(until, parts, cost, math.inf, max)
    if most is None:
        return None
    even = _best(until, parts, cost, most[0] * (1 + ROUNDING), lambda sums, part: sums + part * part)
    assert even is not None, "the cut with the least maximum is one of them"
    return even[1]


def _best(
    until: Sequence[float], parts: int, cost: Cost, limit: float, add: Callable[[float, float], float]
) -> tuple[float, list[int]] | None:
    """The cut with the least total, of parts that cost at most `limit`."""
    places = len(until)
    best = [0.0] + [math.inf] * (places - 1)
    chosen: list[list[int]] = []
    for part in range(parts):
        row, choice = [math.inf] * places, [0] * places
        for end in range(part + 1, places):
            for first in range(end - 1, part - 1, -1):
                work = until[end] - until[first]
                if work > limit or add(0.0, work) > row[end]:
                    break  # the part only grows from here on
                if best[first] <= row[end] and best[first] < math.inf:
                    here = cost(first, end, part)
                    total = add(best[first], here)
                    if here <= limit and here < math.inf and total <= row[end]:
                        row[end], choice[end] = total, first
        best = row
        chosen.append(choice)
    if best[-1] == math.inf:
        return None
    begins, end = [], places - 1
    for choice in reversed(chosen):
        end = choice[end]
        begins.append(end)
    return best[-1], begins[-2::-1]


def even_ranks(
    begins: Sequence[int], until: Sequence[float], border: Sequence[float], ranks: Sequence[int]
) -> list[int]:
    """Step 2: the places at which parts 1, 2, ... begin, from those of a cut.

    until: as of `cut_chain`. border: what a cut at each place costs the parts on both of its sides; a border
    moves only to places that cost no more. ranks: the rank of each part.
    """
    work, edge = np.asarray(until), np.asarray(border)
    places, parts = len(work), len(ranks)
    onward, back = np.arange(places), np.arange(places)
    for place in range(places):
        fits = np.flatnonzero(edge[1:-1] <= edge[place]) + 1
        onward[place] = min(fits[fits > place], default=place)
        back[place] = max(fits[fits < place], default=place)
    of_rank = np.eye(max(ranks) + 1)[list(ranks)]
    run = np.array(
        [
            [first <= at <= last for at in range(parts + 1)]
            for first in range(1, parts)
            for last in range(first, min(parts, first + max(ranks) + 1))
        ],
        dtype=bool,
    ).reshape(-1, parts + 1)

    def sums(cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        loads = (np.diff(work[cuts]) + edge[cuts][:, :-1] + edge[cuts][:, 1:]) @ of_rank
        return loads.max(axis=1), (loads * loads).sum(axis=1)

    now = np.array([0, *begins, places - 1])
    most, squares = (one[0] for one in sums(now[None]))
    enough = most * (1 - WORTH)
    while len(run):
        moved = np.concatenate([np.where(run, to[now], now) for to in (onward, back)])
        moved = moved[(np.diff(moved) > 0).all(axis=1)]
        if not len(moved):
            break
        mosts, all_squares = sums(moved)
        at = int(np.lexsort((all_squares, mosts))[0])
        lower = mosts[at] < most * (1 - ROUNDING)
        if not lower and (mosts[at] > most or all_squares[at] >= squares * (1 - ROUNDING)):
            break
        now, most, squares = moved[at], mosts[at], all_squares[at]
    return [int(place) for place in now[1:-1]] if most <= enough else list(begins)
