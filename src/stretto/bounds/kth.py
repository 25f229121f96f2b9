"""Heads and tails of the k-th microbatch: stages send one message after another, and need work for each.

A head (`bounds.reach`) is what must come
before an op of the first microbatch; the second cannot be there as soon. The theorem:

1. Let k microbatches' messages along an edge have left. Then each machine of the sender's stage (compute, the
   lane of an axis, the network card) has done what k of them need: least head + k times that work + the least
   that follows it until the message leaves. This holds for every part of the work, as in
   `bounds.machine`. On the card the message itself counts, until it has arrived.
2. A message leaves no sooner than those that it needs have arrived. So if the k-th to arrive does so no
   sooner than r, the k-th to leave does so no sooner than r and what lies between, whichever
   microbatches these are.
3. So for every op there is a time before which no more than k - 1 microbatches have begun it: its k-th head.
4. The same holds backward from the end of the step: of the k messages that arrive last along an edge, the
   first is followed by k times what needs them.
5. Before time a, an op has begun for no more microbatches than have a k-th head below a; their time is the
   most that a machine can have done (`bounds.machine`).

Cost is linear in edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from stretto.bounds.fed import Array, sums_above, thresholds
from stretto.bounds.reach import Reach, StageReach
from stretto.bounds.stage import NEVER, Mask
from stretto.ir.costs import Costs
from stretto.ir.program import Edge, Job
from stretto.ir.transfers import occupancy_us
from stretto.processor.pace import STEADY, Pace

TURNS = 32
"""Of more microbatches than this, the bounds of so many stand for those that come after each, up to the next.
Assumed."""

THRESHOLDS = 64
"""Heads and tails tried for each machine. Assumed."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What is known of the k-th message along each edge, for some k, ascending from 1; microseconds.

    k: these. count: of how many microbatches each is a bound: of the k-th and all before the next k.
    leaves_us, arrives_us: by edge, the least time by which k messages have left, or arrived. rests_us,
    follows_us: what must pass, at least, from when the first of the last k has left, or arrived.
    """

    k: Array
    count: Array
    leaves_us: Sequence[Array]
    arrives_us: Sequence[Array]
    rests_us: Sequence[Array]
    follows_us: Sequence[Array]

    def heads_us(self, stage: StageReach) -> Array | None:
        """Step 3: by turn and op, the k-th head; None where nothing arrives: all microbatches are alike."""
        heads: Array | None = None
        for edge, found in zip(stage.edges_in, stage.distances.from_arrival, strict=True):
            comes_us = self.arrives_us[edge.index][:, None] + (found - stage.time_us)
            heads = np.maximum(stage.head_us if heads is None else heads, comes_us)
        return heads

    def tails_us(self, stage: StageReach) -> Array | None:
        """Step 4: by turn and op, the k-th tail; None where nothing leaves."""
        tails: Array | None = None
        for edge, to_sink in zip(stage.edges_out, _leaving(stage, stage.distances.to_sink), strict=True):
            goes_us = self.rests_us[edge.index][:, None] + (to_sink - stage.time_us)
            tails = np.maximum(stage.tail_us if tails is None else tails, goes_us)
        return tails


T = TypeVar("T")


def _leaving(stage: StageReach, of_sinks: Sequence[T]) -> Sequence[T]:
    """Of what is known of a stage's sinks, that of its messages."""
    return of_sinks[: len(stage.edges_out)]


@dataclass(frozen=True, slots=True)
class _Jobs:
    """What one microbatch needs of a machine: the time of each job, from the first event that counts to its
    begin, and from its end to the last."""

    heads_us: Array
    tails_us: Array
    times_us: Array
    pace: Pace = field(default=STEADY, kw_only=True)

    def least_us(self, k: Array) -> Array:
        """Step 1: the least time in which k microbatches' work can be done, heads and tails included."""
        busy = self.times_us > 0
        if not busy.any():
            return np.zeros(len(k))
        firsts, at_head = thresholds(self.heads_us[busy], most=THRESHOLDS)
        lasts, at_tail = thresholds(self.tails_us[busy], most=THRESHOLDS)
        each = sums_above((len(firsts), len(lasts)), at_head, at_tail, self.times_us[busy])
        around = np.where(each > 0, firsts[:, None] + lasts[None, :], NEVER)
        found = np.zeros(len(k))
        # What is largest at some k is a bound for all; of these few, one is close to the largest.
        for of in np.union1d(2.0 ** np.floor(np.log2(k)), k[-1:]):
            best = int(np.argmax(around + self.pace.least_us(of * each)))
            found = np.maximum(found, around.flat[best] + self.pace.least_us(k * each.flat[best]))
        return found


def find_turns(job: Job, stage_ranks: Sequence[int], costs: Costs, reach: Reach) -> Turns:
    """The k-th messages of every edge."""
    return _Finder(job, stage_ranks, costs, reach).find()


class _Finder:
    def __init__(self, job: Job, stage_ranks: Sequence[int], costs: Costs, reach: Reach) -> None:
        self._ranks = stage_ranks
        self._costs = costs
        self._reach = reach
        m = job.microbatches
        self._k = np.unique(np.linspace(1, m, min(m, TURNS)).astype(int)).astype(np.float64)
        self._leaves_us, self._arrives_us, self._rests_us, self._follows_us = (
            [np.zeros(len(self._k)) for _ in job.edges] for _ in range(4)
        )
        self._count = np.diff(self._k, append=m + 1.0)

    def find(self) -> Turns:
        for edge in self._reach.order:
            self._forward(edge)
        for edge in reversed(self._reach.order):
            self._backward(edge)
        return Turns(
            self._k, self._count, self._leaves_us, self._arrives_us, self._rests_us, self._follows_us
        )

    def _forward(self, edge: Edge) -> None:
        """Steps 1 and 2."""
        reach = self._reach
        stage = reach.stages[edge.source]
        at = stage.edges_out.index(edge)
        to_sink, before = stage.distances.to_sink[at], stage.distances.before_sink[at]
        leaves_us = np.full(len(self._k), reach.leaves_us[edge.index])
        for arriving, found in zip(stage.edges_in, stage.distances.from_arrival, strict=True):
            leaves_us = np.maximum(
                leaves_us, self._arrives_us[arriving.index] + stage.leaving_us(edge, found)
            )
        tails_us = to_sink - stage.time_us
        for jobs in self._machines(stage, before, stage.head_us, tails_us):
            leaves_us = np.maximum(leaves_us, jobs.least_us(self._k))
        arrives_us = leaves_us + reach.travel_us[edge.index]
        busy_us = self._busy_us(edge)
        if busy_us:
            late_us = reach.travel_us[edge.index] - busy_us
            message = _message(reach.leaves_us[edge.index], late_us, busy_us)
            card = self._card(stage, before, stage.head_us, tails_us, reach.travel_us[edge.index], message)
            arrives_us = np.maximum(arrives_us, card.least_us(self._k))
        self._leaves_us[edge.index], self._arrives_us[edge.index] = leaves_us, arrives_us

    def _backward(self, edge: Edge) -> None:
        """Step 4."""
        reach = self._reach
        stage = reach.stages[edge.target]
        inside = stage.distances
        since = inside.from_arrival[stage.edges_in.index(edge)]
        after = since > NEVER
        follows_us = np.full(len(self._k), reach.follows_us[edge.index])
        sinks = _leaving(stage, inside.to_sink), _leaving(stage, inside.before_sink)
        for out, to_sink, before in zip(stage.edges_out, *sinks, strict=True):
            both = after & before
            if both.any():
                passes_us = float((since[both] + to_sink[both] - inside.time_us[both]).max())
                follows_us = np.maximum(follows_us, passes_us + self._rests_us[out.index])
        heads_us = since - stage.time_us
        for jobs in self._machines(stage, after, heads_us, stage.tail_us):
            follows_us = np.maximum(follows_us, jobs.least_us(self._k))
        travel_us = reach.travel_us[edge.index]
        rests_us = follows_us + travel_us
        busy_us = self._busy_us(edge)
        if busy_us:
            late_us = travel_us - busy_us + reach.follows_us[edge.index]
            message = _message(0.0, late_us, busy_us)
            card = self._card(stage, after, heads_us + travel_us, stage.tail_us, 0.0, message)
            rests_us = np.maximum(rests_us, card.least_us(self._k))
        self._follows_us[edge.index], self._rests_us[edge.index] = follows_us, rests_us

    def _busy_us(self, edge: Edge) -> float:
        """How long a message has the card; 0 for one that stays on its rank."""
        a, b = self._ranks[edge.source], self._ranks[edge.target]
        return occupancy_us(self._costs.link(a, b), edge.spec.nbytes) if a != b else 0.0

    def _machines(self, stage: StageReach, ops: Mask, heads_us: Array, tails_us: Array) -> Iterator[_Jobs]:
        """The compute lane and the lanes of axes, with these ops of a stage; heads and tails without them."""
        yield _Jobs(heads_us[ops], tails_us[ops], stage.time_us[ops], pace=stage.distances.pace)
        for lane in dict.fromkeys(call.lane for call, _ in stage.calls):
            yield self._lane(stage, [lane], ops, heads_us, tails_us, 0.0, card=False)

    def _lane(
        self,
        stage: StageReach,
        lanes: Sequence[str],
        ops: Mask,
        heads_us: Array,
        tails_us: Array,
        rest_us: float,
        *,
        card: bool,
    ) -> _Jobs:
        """The collectives of lanes that start and end among these ops. On a card they are there without their
        latency; rest_us: what follows the last op."""
        jobs = []
        for call, time in stage.calls:
            if call.lane in lanes and ops[call.start] and ops[call.wait]:
                late_us = time.latency_us if card else 0.0
                tail_us = tails_us[call.wait] + stage.time_us[call.wait] + late_us + rest_us
                jobs.append((heads_us[call.start], tail_us, time.us - late_us))
        heads, tails, times = np.array(jobs, dtype=np.float64).reshape(-1, 3).T
        return _Jobs(heads, tails, times)

    def _card(
        self,
        stage: StageReach,
        ops: Mask,
        heads_us: Array,
        tails_us: Array,
        rest_us: float,
        message: _Jobs,
    ) -> _Jobs:
        """The card, with collectives that share it and the message."""
        shared = self._lane(stage, self._costs.shared, ops, heads_us, tails_us, rest_us, card=True)
        return _Jobs(
            np.concatenate([shared.heads_us, message.heads_us]),
            np.concatenate([shared.tails_us, message.tails_us]),
            np.concatenate([shared.times_us, message.times_us]),
        )


def _message(head_us: float, tail_us: float, busy_us: float) -> _Jobs:
    return _Jobs(np.array([head_us]), np.array([tail_us]), np.array([busy_us]))
