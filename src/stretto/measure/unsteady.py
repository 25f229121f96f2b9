"""How ranks' speeds go up and down while they compute, from the rounds in which their ops were measured.

Processors that others share, or whose clock changes, are fast for a while and slow for a while. The mean of
that is in op times. Here is the rest (`stretto.ir.costs.Unsteady`); arithmetic only:

    1. Each rank's rounds are cut into pieces of about `PIECE_US`, the same in every round. A round in which
       something else had the processor (`MOST`) is left out.
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
from statistics import fmean, median

from stretto.ir.costs import Unsteady

PIECE_US = 10_000.0
"""Long enough for the clock and for what ops differ by themselves, short against spells. Speeds of shared
processors were seen to last for 50 to 130 ms."""

MOST = 2.0
"""A piece that took more than this many times the median: something else had the processor (as
`cost.profile.STOLEN`)."""

LEAST_ROUNDS = 4
"""Of fewer rounds nothing is said."""

LEAST_PIECES = 4
"""Of rounds of fewer pieces nothing is said: they vary nearly as their pieces do, whatever the spell is."""

LONGEST = 4.0
"""A spell is at most this many rounds; speeds that stay for longer differ from round to round, and what
rounds say of it is chance: 5 % of a variance are between spells of 4 rounds and of 8."""

Shares = Mapping[str, Sequence[float]]
"""By op, in the order in which they run: what it took in each round."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Step 1, for one rank. rounds: what its pieces took, as parts of their means, None of rounds that do
    not count; whole: the same of each round; us: how long a round is on average."""

    rounds: tuple[tuple[float, ...] | None, ...]
    whole: tuple[tuple[float] | None, ...]
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
        most = [MOST * median(piece) for piece in pieces]
        by_round = list(zip(*pieces, strict=True))
        counts = [all(us <= at_most for us, at_most in zip(of, most, strict=True)) for of in by_round]
        if sum(counts) < LEAST_ROUNDS or len(pieces) < LEAST_PIECES:
            return None
        means = [fmean(us for us, counted in zip(of, counts, strict=True) if counted) for of in pieces]
        parts = [tuple(us / mean for us, mean in zip(of, means, strict=True)) for of in by_round]
        whole_us = sum(means)
        whole = [(sum(of) / whole_us,) for of in by_round]
        return Pieces(
            tuple(part if counted else None for part, counted in zip(parts, counts, strict=True)),
            tuple(part if counted else None for part, counted in zip(whole, counts, strict=True)),
            whole_us,
        )


def unsteady_of(ranks: Sequence[Pieces]) -> Unsteady | None:
    """What the ranks of a step have together; None where there is nothing to tell it from."""
    if not ranks:
        return None
    piece = fmean(_variance(of.rounds) for of in ranks)
    whole = fmean(_variance(of.whole) for of in ranks)
    if piece <= 0.0:
        return None
    together = [_covariance(one.rounds, other.rounds) for one, other in combinations(ranks, 2)]
    common = fmean(together) / piece if together else 0.0
    spell_us = fmean(of.us for of in ranks) * _spell(whole / piece)
    return Unsteady(min(1.0, math.sqrt(piece)), spell_us, min(1.0, max(0.0, common)))


_Rounds = Sequence[Sequence[float] | None]


def _variance(rounds: _Rounds) -> float:
    """Step 2."""
    return _covariance(rounds, rounds)


def _covariance(one: _Rounds, other: _Rounds) -> float:
    """Step 4, of two ranks; 0 where no round and the next count on both."""
    found: list[float] = []
    for (before, after), (others, next_others) in zip(pairwise(one), pairwise(other), strict=False):
        if before is None or after is None or others is None or next_others is None:
            continue
        four = zip(before, after, others, next_others, strict=False)
        found += [(b - a) * (d - c) / 2.0 for a, b, c, d in four]
    return fmean(found) if found else 0.0


def _spell(part: float) -> float:
    """Step 3: the x at which whole rounds vary by this part of what pieces do; from 0.01 to `LONGEST`."""
    low, high = 0.01, LONGEST
    for _ in range(40):
        x = math.sqrt(low * high)
        if 2.0 * x * (1.0 + x * math.expm1(-1.0 / x)) < part:
            low = x
        else:
            high = x
    return math.sqrt(low * high)
