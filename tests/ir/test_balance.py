"""Cuts of a chain are the best of all cuts, and ranks with several parts come out even."""

from __future__ import annotations

import math
import random
from itertools import accumulate, combinations, pairwise

import pytest

from stretto.ir.balance import cut_chain, even_ranks
from stretto.ir.stage_maps import loop, v


def chain(seed: int) -> tuple[list[float], list[float]]:
    """(work before each place, what a cut at each place costs) of up to nine pieces."""
    draw = random.Random(seed)
    work = [draw.choice([0.0, 1.0, 2.0, 5.0, draw.random()]) for _ in range(draw.randint(3, 9))]
    return [*accumulate(work, initial=0.0)], [0.0, *(draw.choice([0.1, 0.5]) for _ in work[1:]), 0.0]


@pytest.mark.parametrize("seed", range(60))
def test_the_most_expensive_part_is_the_least_of_all_cuts_and_then_the_squares_are(seed: int) -> None:
    until, border = chain(seed)
    parts = random.Random(seed).randint(1, len(until) - 1)
    refused = seed % 4  # a part that may not have two pieces

    def cost(first: int, end: int, part: int) -> float:
        if part == refused and end - first > 1:
            return math.inf
        return until[end] - until[first] + border[first] + border[end]

    def score(cuts: tuple[int, ...]) -> tuple[float, float]:
        costs = [cost(a, b, k) for k, (a, b) in enumerate(pairwise([0, *cuts, len(until) - 1]))]
        return max(costs), sum(one * one for one in costs)

    every = [score(cuts) for cuts in combinations(range(1, len(until) - 1), parts - 1)]
    most = min(one for one, _ in every)
    found = cut_chain(until, parts, cost)
    if most == math.inf:
        assert found is None
    else:
        assert found is not None
        squares = min(squares for one, squares in every if one <= most * (1 + 1e-9))
        assert score(tuple(found)) == pytest.approx((most, squares))


@pytest.mark.parametrize(
    ("layers", "ranks", "each", "least"), [(80, 8, 4, 0.97), (80, 8, 2, 0.94), (126, 16, 2, 0.95)]
)
def test_ranks_with_several_stages_have_even_work(layers: int, ranks: int, each: int, least: float) -> None:
    """A language model: an embedding of no work, blocks of attention and MLP, a head of 1.2 blocks."""
    until = [*accumulate([0.01, *[0.3, 0.7] * layers, 1.2], initial=0.0)]
    stages = loop(ranks, each)
    begins = cut_chain(until, len(stages), lambda first, end, _: until[end] - until[first])
    assert begins is not None

    def loads(cuts: list[int]) -> list[float]:
        sums = [0.0] * ranks
        for rank, (first, end) in zip(stages, pairwise([0, *cuts, len(until) - 1]), strict=True):
            sums[rank] += until[end] - until[first]
        return sums

    even = loads(even_ranks(begins, until, [0.0] * len(until), stages))
    assert sum(even) / ranks >= least * max(even)
    assert max(even) <= max(loads(begins))


def test_borders_move_only_to_places_where_no_more_crosses() -> None:
    until = [*accumulate([1.0] * 12, initial=0.0)]
    border = [0.0, *(0.1 if place % 3 == 0 else 5.0 for place in range(1, 12)), 0.0]
    moved = even_ranks([3, 6, 9], until, border, v(2, 2))
    assert moved == [3, 6, 9]
    assert even_ranks([3, 6], until, border, (0, 1, 0)) == [3, 9]
    assert even_ranks([], until, border, (0,)) == []
