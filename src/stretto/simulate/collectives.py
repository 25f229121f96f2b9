"""The collectives of the simulation: started by every member, then one after another on their lane.

Knows communicators and their times; nothing of windows or memory. The contract:

1. A communicator that joins places (the loss, a tied gradient's sum) has one lane; a collective is ready
   when its last member has started it. A communicator of another axis has a lane at every place, whose
   ranks walk one order and start together.
2. A lane carries one collective at a time, in the order of their starts.
3. A collective of an axis that shares network cards with messages uses both directions of its place's card
   for its time less its latency (`simulate.cards`); the latency follows. All others have links of
   their own; those over places are small, and come once a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Communicator, Plan
from stretto.ir.timeline import Span, SpanKind
from stretto.ir.transfers import CollectiveTime, bucket_bytes, bucket_time, loss_time
from stretto.simulate.cards import Cards, Transfer, nothing
from stretto.simulate.clock import Clock, Moment
from stretto.simulate.windows import Call

LOSS = "loss"


@dataclass(slots=True, eq=False)
class Collective:
    """One collective of one step. track: the communicator, whose lane the timeline shows; name: `<axis> ...`,
    as in the timeline; done_us: when `done` happened."""

    lane: Lane
    track: str
    name: str
    places: Sequence[int]
    nbytes: int
    time: CollectiveTime
    missing: set[int] = field(default_factory=set)
    done: Moment = field(default_factory=Moment)
    done_us: float = 0.0
    stage: int | None = None
    phase: Phase | None = None
    microbatch: int | None = None

    def why_missing(self) -> str:
        """Which ranks have not started it, in words."""
        ranks = ", ".join(f"rank {rank}" for rank in sorted(self.missing))
        return f"collective {self.name}, which {ranks} has not started"


@dataclass(slots=True, eq=False)
class Lane:
    """Step 2: the collectives of one communicator (at one place) that are ready, in order."""

    busy: bool = False
    waiting: deque[Collective] = field(default_factory=deque)


class Collectives:
    """All collectives of one step."""

    def __init__(self, plan: Plan, clock: Clock, cards: Cards, spans: list[Span]) -> None:
        self._plan = plan
        self._clock = clock
        self._cards = cards
        self._spans = spans
        self._shared = set(plan.costs.shared)
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._communicators = {found.name: found for found in plan.communicators}
        self._buckets = {bucket.name: bucket for bucket in plan.buckets}
        self._bucket_bytes = bucket_bytes(plan.job, plan.buckets)
        self._once: dict[tuple[str, int], Collective] = {}

    # --- step 1 -------------------------------------------------------------------------------------

    def start(self, call: Call, place: int, microbatch: int) -> Collective:
        """An op of a window starts a collective of its axis now."""
        lane = self._lane(call.axis, place)
        made = Collective(lane, call.axis, call.name, (place,), call.nbytes, call.time)
        made.stage, made.phase, made.microbatch = call.stage, call.phase, microbatch
        self._ready(made)
        return made

    def join(self, collective: Collective, place: int) -> None:
        """A member starts its part of the loss or of a bucket now."""
        collective.missing.discard(place)
        if not collective.missing:
            self._ready(collective)

    def loss(self, place: int) -> Collective:
        """The collective that tells the loss. Raises PlanError when the place has no part in it."""
        if (LOSS, 0) not in self._once:
            communicator = self._member(LOSS, place, "loss")
            time = loss_time(self._plan.costs, self._plan.job, communicator.ranks)
            axis = communicator.axes[0] if len(communicator.ranks) > 1 else communicator.axes[-1]
            made = Collective(self._lane(LOSS, 0), LOSS, f"{axis} loss", communicator.ranks, 0, time)
            made.missing = set(communicator.ranks)
            self._once[LOSS, 0] = made
        self._member(LOSS, place, "loss")
        return self._once[LOSS, 0]

    def bucket(self, name: str, place: int) -> Collective:
        """The sum of a bucket of gradients. Raises PlanError when the place has no part in it."""
        bucket = self._buckets.get(name)
        if bucket is None:
            fault = f"rank {place}: `reduce {name}` needs a bucket {name!r}; the plan has none of that name"
            raise PlanError("cannot simulate the plan", [fault])
        communicator = self._member(bucket.communicator, place, f"reduce {name}")
        joins = communicator.joins_places
        key = (name, 0 if joins else place)
        if key not in self._once:
            places = communicator.ranks if joins else (place,)
            nbytes = self._bucket_bytes[name]
            time = bucket_time(self._plan.costs, communicator, nbytes)
            label = f"pp {communicator.name}" if joins else name
            lane = self._lane(communicator.name, key[1])
            made = Collective(lane, communicator.name, label, places, nbytes, time)
            made.missing = set(places)
            self._once[key] = made
        return self._once[key]

    def _member(self, name: str, place: int, what: str) -> Communicator:
        found = self._communicators.get(name)
        if found is None or (found.joins_places and place not in found.ranks):
            fault = f"rank {place}: `{what}` needs a communicator {name!r} that holds the rank"
            raise PlanError("cannot simulate the plan", [fault])
        return found

    def _lane(self, communicator: str, place: int) -> Lane:
        key = (communicator, place)
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes[key] = Lane()
        return found

    # --- steps 2 and 3 ------------------------------------------------------------------------------

    def _ready(self, collective: Collective) -> None:
        """All members have started it."""
        collective.done.begun_us = self._clock.now_us
        if collective.lane.busy:
            collective.lane.waiting.append(collective)
        else:
            self._begin(collective)

    def _begin(self, collective: Collective) -> None:
        lane, time = collective.lane, collective.time
        lane.busy = True
        start_us = self._clock.now_us

        def finish() -> None:
            self._draw(collective, start_us)
            if lane.waiting:
                self._begin(lane.waiting.popleft())
            else:
                lane.busy = False
            collective.done_us = self._clock.now_us
            collective.done.happen(self._clock)

        places = collective.places
        shares = collective.track in self._shared
        busy_us = time.us - time.latency_us if shares else time.us
        self._cards.begin(
            Transfer(
                busy_us,
                time.us - busy_us,
                [(place, out) for place in places for out in (True, False)] if shares else (),
                places,
                time.processor,
                time.slowdown,
                nothing if shares else finish,
                finish if shares else nothing,
                True,
            )
        )

    def _draw(self, collective: Collective, start_us: float) -> None:
        for place in collective.places:
            self._spans.append(
                Span(
                    place,
                    collective.track,
                    SpanKind.MESSAGE,
                    collective.name,
                    start_us,
                    self._clock.now_us,
                    collective.stage,
                    collective.phase,
                    collective.microbatch,
                    collective.nbytes,
                )
            )
