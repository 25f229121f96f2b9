"""How ranks' speeds go up and down while they compute, from the rounds in which their ops were measured.

Processors that others share, or whose clock changes, are fast for a while and slow for a while. The mean of
that is in op times. Here is the rest (`stretto.ir.costs.Unsteady`); arithmetic only:

    1. Each rank's rounds are cut into pieces of about `PIECE_US`, the same in every round.
    2. spread: how pieces differ from one round to the next. Squares of differences of neighbours, not of
       distances from the mean, so that a machine that is slower an hour later is not unsteady.
    3. spell_us: from how much less whole rounds differ. If a speed's correlation falls as exp(-t / spell),
       as it does when spells of random length follow each other, the variance of a mean over T is
       2 x (1 - x (1 - exp(-1 / x))) of a moment's, with x = spell / T.
    4. common: the covariance of different ranks' pieces of one number, which they do at about the same time,
       over the variance of pieces. Ranks of one place do the same pieces; those of others drift apart within
       a round, and look a little more as if each were by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean

from stretto.ir.costs import Unsteady

PIECE_US = 10_000.0
"""Long enough for the clock and for what ops differ by themselves, short against spells. Speeds of shared
processors were seen to last for 50 to 130 ms."""

MOST = 2.0
"""A piece that took more than this many times the mean counts as that: something else had the processor (as
`cost.profile.STOLEN`)."""

LEAST_ROUNDS = 4
"""Of fewer rounds nothing is said."""

Shares = Mapping[str, Sequence[float]]
"""By op, in the order in which they run: what it took in each round."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Step 1, for one rank. rounds: what its pieces took, as parts of their means; whole: the same of
    each round; us: how long a round is on average."""

    rounds: tuple[tuple[float, ...], ...]
    whole: tuple[float, ...]
    us: float

    @staticmethod
    def of(shares: Shares) -> Pieces | None:
        """None of too few rounds, or too short ones."""
        rounds = min(map(len, shares.values()), default=0)
        pieces: list[list[float]] = []
        current = [0.0] * rounds
        for took in shares.values():
            current = [a + b for a, b in zip(current, took, strict=False)]
            if current and fmean(current) >= PIECE_US:
                pieces.append(current)
                current = [0.0] * rounds
        if rounds < LEAST_ROUNDS or not pieces:
            return None
        means = [fmean(piece) for piece in pieces]
        parts = tuple(
            tuple(min(MOST, us / mean) for us, mean in zip(at_once, means, strict=True))
            for at_once in zip(*pieces, strict=True)
        )
        us = sum(means)
        whole = tuple(sum(a * b for a, b in zip(part, means, strict=True)) / us for part in parts)
        return Pieces(parts, whole, us)


def unsteady_of(ranks: Sequence[Pieces]) -> Unsteady | None:
    """What the ranks of a step have together; None where there is nothing to tell it from."""
    if not ranks:
        return None
    piece = fmean(_variance(of.rounds) for of in ranks)
    whole = fmean(_variance([(part,) for part in of.whole]) for of in ranks)
    if piece <= 0.0:
        return None
    together = [_covariance(one.rounds, other.rounds) for one, other in combinations(ranks, 2)]
    common = fmean(together) / piece if together else 0.0
    spell_us = fmean(of.us for of in ranks) * _spell(whole / piece)
    return Unsteady(min(1.0, math.sqrt(piece)), spell_us, min(1.0, max(0.0, common)))


def _variance(rounds: Sequence[Sequence[float]]) -> float:
    """Step 2."""
    return fmean(
        (b - a) ** 2 / 2.0 for one, after in pairwise(rounds) for a, b in zip(one, after, strict=True)
    )


def _covariance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Step 4, of two ranks."""
    rounds = zip(pairwise(one), pairwise(other), strict=False)
    pieces = (four for (a, b), (c, d) in rounds for four in zip(a, b, c, d, strict=False))
    return fmean((b - a) * (d - c) / 2.0 for a, b, c, d in pieces)


def _spell(part: float) -> float:
    """Step 3: the x at which whole rounds vary by this part of what pieces do; from 0.01 to 100."""
    low, high = 0.01, 100.0
    for _ in range(40):
        x = math.sqrt(low * high)
        if 2.0 * x * (1.0 + x * math.expm1(-1.0 / x)) < part:
            low = x
        else:
            high = x
    return math.sqrt(low * high)
