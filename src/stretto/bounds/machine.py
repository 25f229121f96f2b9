"""The one-machine bound: how soon a machine that does one thing at a time can be done with its work.

Numbers only: knows nothing of plans. The steps:

1. For any set S of the work on a machine, a step lasts at least the least head in S, plus the time of S, plus
   the least tail in S. The sets tried are all {head >= a and tail >= b}. This is the preemptive one-machine
   bound of Jackson's rule (Carlier, "The one-machine sequencing problem", 1982).
2. Work with head < a may be done before a, but where another machine feeds this one, no more of it than
   `bounds.fed` allows, and of no more microbatches than `bounds.kth` does. So all the work
   with tail >= b, less the most that can be done before a, lies between a and the last b, and may be more
   than S. The same holds at the end of the step, and at both ends.
3. Step 2 needs a and the last b not to overlap: pairs with a + b <= the bound of step 1. Where one end alone
   is looked at, those are sure, too, of which something is left inside: if the last b had begun by a, all
   would have been done before a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.bounds.fed import (
    ROUNDING,
    Array,
    Feeder,
    Indices,
    evenly_of,
    most_done,
    sums_above,
    thresholds,
)

TURNS = "the turns of microbatches"
"""What holds a machine up if the k-th microbatch is not there yet, in words."""

SOME = 1e-9
"""Share of a machine's work that is more than a rounding. Assumed."""

TRIED = 64
"""Heads, and tails, of k-th microbatches that are tried beside those of the first. Assumed."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Other work that takes a machine from its jobs: `us` of it, at most `share` of the machine's speed at
    any time, nothing of it before `head_us` or in the last `tail_us` of the step."""

    us: float
    share: float
    head_us: float = 0.0
    tail_us: float = 0.0

    def inside_us(self, firsts: Array, lasts: Array) -> Array:
        """For each pair of (first, last): the least of it between `first` and `last` before the end."""
        before = np.maximum(0.0, firsts - self.head_us)[:, None]
        behind = np.maximum(0.0, lasts - self.tail_us)[None, :]
        found: Array = np.maximum(0.0, self.us - self.share * (before + behind))
        return found


@dataclass(slots=True)
class Work:
    """What a machine has to do: jobs, each once a microbatch or once a step. Microseconds.

    outside: other work, of which what cannot fit before the head and after the tail is added; its shares
        are at most 1 together.
    before_us: time of the jobs that may lie before their head.
    ahead_us: by how much the jobs that are done in any stretch of time may exceed it.
    feeders: machines that hold this one up.
    turns: of how many microbatches each of `kth_head` and `kth_tail` is a bound (`bound_kth.Turns`).
    """

    feeders: tuple[Feeder, ...] = ()
    heads: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    each_us: list[float] = field(default_factory=list)
    once_us: list[float] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    needs_us: list[Sequence[float] | Array] = field(default_factory=list)
    feeds_us: list[Sequence[float] | Array] = field(default_factory=list)
    kth_heads: list[Array | None] = field(default_factory=list)
    kth_tails: list[Array | None] = field(default_factory=list)
    outside: tuple[Outside, ...] = ()
    before_us: float = 0.0
    ahead_us: float = 0.0
    turns: Array = field(default_factory=lambda: np.zeros(0))

    def add(
        self,
        head_us: float,
        tail_us: float,
        each_us: float = 0.0,
        once_us: float = 0.0,
        *,
        stage: int = 0,
        needs_us: Sequence[float] | Array = (),
        feeds_us: Sequence[float] | Array = (),
        kth_head: Array | None = None,
        kth_tail: Array | None = None,
    ) -> None:
        """One job. needs_us, feeds_us: by feeder, its time that must have passed for the same microbatch in
        the same stage before the job begins; that cannot begin before the job has ended; 0 by default.
        kth_head, kth_tail: by turn, the head and tail of a microbatch's; the same for all by default."""
        self.heads.append(head_us)
        self.tails.append(tail_us)
        self.each_us.append(each_us)
        self.once_us.append(once_us)
        self.stages.append(stage)
        self.needs_us.append(needs_us if len(needs_us) else (0.0,) * len(self.feeders))
        self.feeds_us.append(feeds_us if len(feeds_us) else (0.0,) * len(self.feeders))
        self.kth_heads.append(kth_head)
        self.kth_tails.append(kth_tail)


@dataclass(frozen=True, slots=True)
class Held:
    """At one end of the step no more than `done_us` of the work can be done, because of a feeder, or of the
    turns of microbatches."""

    feeder: str
    done_us: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The binding set: us = head + microbatches * each + once + extra + tail, less what is done at the ends.

    at_first, at_last: what can be done of the set before the head, or after the tail has begun, where
    something holds it up; None where nothing of the set lies there.
    """

    us: float
    head_us: float
    each_us: float
    once_us: float
    tail_us: float
    extra_us: float = 0.0
    at_first: Held | None = None
    at_last: Held | None = None


def one_machine(work: Work, microbatches: int) -> Machine | None:
    """The best of all sets; None for a machine with nothing to do."""
    if not work.heads:
        return None
    kth_heads, kth_tails = _kth(work.heads, work.kth_heads), _kth(work.tails, work.kth_tails)
    firsts, at_head = thresholds(np.array(work.heads), _tried(kth_heads))
    lasts, at_tail = thresholds(np.array(work.tails), _tried(kth_tails))

    def sums(values: list[float] | Array) -> Array:
        """For each pair of thresholds, the sum over jobs that lie in both."""
        return sums_above((len(firsts), len(lasts)), at_head, at_tail, values)

    each, once = sums(work.each_us), sums(work.once_us)
    weight = microbatches * each + once
    around = firsts[:, None] + lasts[None, :]
    extra = np.zeros_like(around)
    for outside in work.outside:
        extra += outside.inside_us(firsts, lasts)
    early = work.ahead_us + np.where(firsts[:, None] > 0, work.before_us, 0.0)
    # 1. Sets of which all lies after the head and before the tail.
    filled = sums(np.ones(len(work.heads))) > 0
    best = _best(np.where(filled, around + weight + extra - early, -np.inf))
    # 2. Sets that reach before the head, and after the tail.
    first = _held(work, firsts, at_head, weight[0, 0] - weight[:, 0], microbatches, kth_heads, at_end=False)
    last = _held(work, lasts, at_tail, weight[0, 0] - weight[0, :], microbatches, kth_tails, at_end=True)
    # 3. The two ends apart.
    apart = around <= best[0]
    nothing = np.zeros(len(firsts)), np.zeros(len(lasts))
    at_first: _Done | None = None
    at_last: _Done | None = None
    for one, other in ((first, None), (None, last), (first, last)):
        if one is None and other is None:
            continue
        reached = weight[:1] if one else weight
        reached = reached[:, :1] if other else reached
        before = one.most_us if one else nothing[0]
        behind = other.most_us if other else nothing[1]
        inside = reached - before[:, None] - behind[None, :]
        # Had the last b begun by a, all that is reached would be done before a.
        left = inside > early + SOME * weight[0, 0]
        sure = apart | left if one is None or other is None else apart
        found = _best(np.where(sure & (reached > 0), around + inside + extra - early, -np.inf))
        if found[0] > best[0] * (1 + ROUNDING):
            best, at_first, at_last = found, one, other
    us, row, column = best
    inside_at = (0 if at_first else row, 0 if at_last else column)
    return Machine(
        us,
        float(firsts[row]),
        float(each[inside_at]),
        float(once[inside_at]),
        float(lasts[column]),
        float(extra[row, column]),
        at_first.held(row) if at_first else None,
        at_last.held(column) if at_last else None,
    )


@dataclass(frozen=True, slots=True)
class _Done:
    """At one end of the step, by threshold: the most that can be done there, and the feeder that says so."""

    most_us: Array
    feeders: list[str]

    def held(self, at: int) -> Held:
        return Held(self.feeders[at], float(self.most_us[at]))


def _best(total: Array) -> tuple[float, int, int]:
    """The largest total, its row and column. Of equal sets the first, which is the largest, says best what
    binds."""
    at = int(np.argmax(total >= total.max() * (1 - ROUNDING)))
    row, column = np.unravel_index(at, total.shape)
    return float(total[row, column]), int(row), int(column)


def _held(
    work: Work, times_us: Array, at: Indices, all_us: Array, m: int, kth: Array | None, *, at_end: bool
) -> _Done | None:
    """Step 2 at one end of the step: for each time before which (or, at the end, since when) to count, the
    most that can be done there, and what holds it to that, a feeder or the turns of microbatches. None where
    nothing does.

    at: by job, the last time that is not above its head (tail). all_us: the work with heads (tails) below.
    kth: as `_kth` gives them.
    """
    if not work.feeders and kth is None:
        return None
    each_us, stages = np.array(work.each_us), np.array(work.stages)
    given = work.feeds_us if at_end else work.needs_us
    needs_us = np.array(given) if work.feeders else np.zeros((len(given), 0))
    once_us = np.zeros(len(times_us) + 1)
    np.add.at(once_us, at + 1, work.once_us)
    done = []
    for k, feeder in enumerate(work.feeders):
        room_us = times_us - (feeder.tail_us if at_end else feeder.head_us) + feeder.ahead_us
        done.append(most_done(times_us, at, each_us, needs_us[:, k], stages, room_us, m))
    if kth is not None:
        done.append(_begun(times_us, kth, each_us, work.turns))
    least = np.argmin(done, axis=0)
    # Work of once a step is not held up.
    most = np.minimum(np.min(done, axis=0) + once_us[:-1].cumsum(), all_us)
    names = [*(feeder.name for feeder in work.feeders), TURNS]
    return _Done(most, [names[k] for k in least])


def _kth(first: Sequence[float], kth: Sequence[Array | None]) -> Array | None:
    """By job and turn, its head; None where all microbatches are alike. first: those of the first."""
    turns = next((len(of) for of in kth if of is not None), 0)
    if not turns:
        return None
    return np.array([np.full(turns, head) if of is None else of for head, of in zip(first, kth, strict=True)])


def _tried(kth: Array | None) -> Array | None:
    return None if kth is None else evenly_of(kth.ravel(), TRIED)


def _begun(times_us: Array, kth: Array, each_us: Array, turns: Array) -> Array:
    """For each time, the work of all microbatches that may have begun before it: `bound_kth`, step 5."""
    busy = each_us > 0
    after = np.searchsorted(times_us, kth[busy].ravel(), side="right")
    weights = (each_us[busy, None] * turns).ravel()
    most: Array = np.bincount(after, weights, len(times_us) + 1)[: len(times_us)].cumsum()
    return most
