"""The collectives of the simulation: started by every member, then one after another on their lane.

Knows communicators and their times; nothing of windows or memory. The contract:

1. A communicator that joins pipeline ranks (the loss, a tied gradient's sum) has one lane; the n-th
   collective that each member starts there is one, and it is ready when the last has. A communicator of
   another axis has a lane at every pipeline rank, whose ranks walk one order and start together.
2. A lane carries one collective at a time, in the order of their starts.
3. A collective of an axis that shares network cards with messages uses both directions of its rank's card
   for its time less its latency (`simulating.cards`); the latency follows. All others have links of
   their own; those over pipeline ranks are small, and come once a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.ir.action import ONCE
from stretto.ir.plan import Plan
from stretto.ir.timeline import Span, SpanKind
from stretto.simulating.cards import Cards, Clock, Moment, Transfer, nothing
from stretto.simulating.windows import Call


@dataclass(slots=True, eq=False)
class RunningCollective:
    """One collective of one step. microbatch: None where it comes once."""

    lane: Lane
    call: Call
    pp_ranks: Sequence[int]
    missing: set[int]
    microbatch: int | None
    done: Moment = field(default_factory=Moment)


@dataclass(slots=True, eq=False)
class Lane:
    """Step 2: the collectives of one communicator (at one pipeline rank) that are ready, in order."""

    busy: bool = False
    waiting: deque[RunningCollective] = field(default_factory=deque)


class Collectives:
    """All collectives of one step."""

    def __init__(self, plan: Plan, clock: Clock, cards: Cards, spans: list[Span]) -> None:
        self._clock = clock
        self._cards = cards
        self._spans = spans
        self._shared = set(plan.costs.shared)
        self._lanes: dict[tuple[str, int], Lane] = defaultdict(Lane)
        self._joined: dict[str, list[RunningCollective]] = defaultdict(list)
        self._started: Counter[tuple[str, int]] = Counter()

    def start(self, call: Call, pp_rank: int, microbatch: int) -> RunningCollective:
        """An op of a window starts a collective, or its rank's part of one, now."""
        number = self._started[call.axis, pp_rank]
        self._started[call.axis, pp_rank] += 1
        joined = self._joined[call.axis]
        if call.pp_ranks and number < len(joined):
            made = joined[number]
        else:
            lane = self._lanes[call.axis, 0 if call.pp_ranks else pp_rank]
            pp_ranks = call.pp_ranks or (pp_rank,)
            made = RunningCollective(
                lane, call, pp_ranks, set(pp_ranks), None if microbatch == ONCE else microbatch
            )
            if call.pp_ranks:
                joined.append(made)
        made.missing.discard(pp_rank)
        if not made.missing:
            self._ready(made)
        return made

    def _ready(self, collective: RunningCollective) -> None:
        collective.done.begun_us = self._clock.now_us
        if collective.lane.busy:
            collective.lane.waiting.append(collective)
        else:
            self._begin(collective)

    def _begin(self, collective: RunningCollective) -> None:
        lane, time = collective.lane, collective.call.time
        lane.busy = True
        start_us = self._clock.now_us

        def finish() -> None:
            self._draw(collective, start_us)
            if lane.waiting:
                self._begin(lane.waiting.popleft())
            else:
                lane.busy = False
            collective.done.happen(self._clock)

        pp_ranks = collective.pp_ranks
        shares = collective.call.axis in self._shared
        busy_us = time.us - time.latency_us if shares else time.us
        self._cards.begin(
            Transfer(
                busy_us,
                time.us - busy_us,
                [(pp_rank, out) for pp_rank in pp_ranks for out in (True, False)] if shares else (),
                pp_ranks,
                time.processor,
                time.slowdown,
                nothing if shares else finish,
                finish if shares else nothing,
                True,
            )
        )

    def _draw(self, collective: RunningCollective, start_us: float) -> None:
        call, microbatch = collective.call, collective.microbatch
        stage, phase, _ = (None, None, None) if microbatch is None else call.key
        of = stage, phase, microbatch, call.nbytes
        end_us = self._clock.now_us
        for pp_rank in collective.pp_ranks:
            self._spans.append(Span(pp_rank, call.axis, SpanKind.MESSAGE, call.name, start_us, end_us, *of))
