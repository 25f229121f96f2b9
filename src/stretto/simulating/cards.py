"""The clock of the simulation, and what is in flight: how fast it goes, which share of processors it takes.

Events at one time happen in the order in which they were put in, so that equal plans give equal timelines;
those that choose between what has come by then happen when all others have. Transfers:

1. A transfer takes `busy_us` at full rate, and then `latency_us`, which keeps nothing busy.
2. A pipeline rank has one network card, which serves each direction on its own. Of k transfers that use a
   direction at the same time, each gets an equal share, 1/k of the rate; one that uses several directions
   goes at the least of its shares. What one cannot use is not given to the others. Shares change at once
   when a transfer begins or ends.
3. While it is in flight, a transfer takes `processor` times its rate, and `slowdown`, of the compute lanes
   of its ranks. So the processor time it takes in all does not depend on its rate; slowdown, which is a
   share of the device that it uses, does.
4. Transfers that use no card have links of their own, and full rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Clock:
    """A queue of events; `now_us` is the time of the event that is happening."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_us: float, event: Callable[[], None]) -> None:
        """Let `event` happen at `time_us`, which must not be in the past."""
        heapq.heappush(self._events, (time_us, False, self._count, event))
        self._count += 1

    def choose(self, event: Callable[[], None]) -> None:
        """Let `event` happen now, when everything else that happens now has."""
        heapq.heappush(self._events, (self.now_us, True, self._count, event))
        self._count += 1

    def run(self) -> None:
        """Let events happen until none is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._events:
            return False
        self.now_us, _, _, event = heapq.heappop(self._events)
        event()
        return True

    def skip(self, time_us: float) -> bool:
        """Let it be `time_us`, if nothing happens until then; whether it is."""
        if self._events and self._events[0][0] <= time_us:
            return False
        self.now_us = time_us
        return True

    def advance(self, time_us: float) -> None:
        """Let the events up to `time_us` happen; then the clock is at that time, or stays what it was if
        that is later. What is chosen at that time waits: something may come yet."""
        while self._events and self._events[0][:2] <= (time_us, False):
            self.step()
        self.now_us = max(self.now_us, time_us)


class Moment:
    """Something that happens once. `begun_us`: since when it has been under way (None: not yet); `us`: when
    it happened."""

    __slots__ = ("_waiters", "begun_us", "happened", "us")

    def __init__(self) -> None:
        self.begun_us: float | None = None
        self.happened = False
        self.us = 0.0
        self._waiters: list[Callable[[], None]] = []

    def then(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the moment happens; it must not have happened yet."""
        assert not self.happened
        self._waiters.append(resume)

    def happen(self, clock: Clock) -> None:
        """Let the moment happen now; those who wait go on as events of this time."""
        self.happened, self.us = True, clock.now_us
        for resume in self._waiters:
            clock.at(clock.now_us, resume)
        self._waiters.clear()


LoadChange = Callable[[int, float, float], None]
"""(pipeline rank, what is given back of its processor, what is taken instead)."""

Card = tuple[int, bool]
"""(pipeline rank, whether outgoing)."""


def nothing() -> None:
    """What a transfer does when no one waits for that moment."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One message or collective in flight. `leave` is called after busy_us, `arrive` latency_us later.
    left_us: of busy_us, at the start and at `since_us`; until_arrival: processors are given back with the
    arrival, not when the transfer leaves."""

    left_us: float
    latency_us: float
    cards: Sequence[Card]
    pp_ranks: Sequence[int]
    processor: float
    slowdown: float
    leave: Callable[[], None]
    arrive: Callable[[], None]
    until_arrival: bool
    rate: float = 0.0
    since_us: float = 0.0
    load: float = 0.0
    version: int = 0


class Cards:
    """All transfers that are in flight. alone: messages alone use cards, and they take turns; there is
    nothing to share."""

    def __init__(self, clock: Clock, change_load: LoadChange, alone: bool) -> None:
        self._clock = clock
        self._change_load = change_load
        self._alone = alone
        self._on: dict[Card, list[Transfer]] = {}

    def begin(self, transfer: Transfer) -> None:
        """Let a transfer begin now."""
        transfer.since_us = self._clock.now_us
        if self._alone or not transfer.cards:
            self._go(transfer, 1.0)
            return
        for card in transfer.cards:
            self._on.setdefault(card, []).append(transfer)
        self._share(transfer.cards)

    def _share(self, cards: Sequence[Card]) -> None:
        """Step 2 for all that use one of `cards`, in the order in which they began."""
        met = {id(transfer): transfer for card in cards for transfer in self._on[card]}
        for transfer in met.values():
            rate = 1.0 / max(len(self._on[card]) for card in transfer.cards)
            if rate != transfer.rate:
                self._go(transfer, rate)

    def _go(self, transfer: Transfer, rate: float) -> None:
        """Put the end into the clock; an earlier one no longer counts."""
        clock = self._clock
        now_us = clock.now_us
        left_us = max(0.0, transfer.left_us - (now_us - transfer.since_us) * transfer.rate)
        transfer.left_us, transfer.since_us, transfer.rate = left_us, now_us, rate
        self._load(transfer, _load_of(transfer, rate))
        version = transfer.version = transfer.version + 1
        end_us = now_us + left_us / rate
        clock.at(end_us, lambda: self._leave(transfer, version))
        if transfer.arrive is not nothing:
            clock.at(end_us + transfer.latency_us, lambda: self._arrive(transfer, version))

    def _leave(self, transfer: Transfer, version: int) -> None:
        if version != transfer.version:
            return
        shared = not self._alone and bool(transfer.cards)
        if shared:
            for card in transfer.cards:
                self._on[card].remove(transfer)
        # Its latency goes on at full rate; what takes no processor then gives it back.
        lasts = transfer.until_arrival and transfer.arrive is not nothing
        self._load(transfer, _load_of(transfer, 1.0) if lasts else 0.0)
        # A collective that begins in its place keeps the others' shares as they are. A message begins later
        # in the same moment (`network`), so they go up and down again, and nothing goes on in between.
        transfer.leave()
        if shared:
            self._share(transfer.cards)

    def _arrive(self, transfer: Transfer, version: int) -> None:
        if version == transfer.version:
            self._load(transfer, 0.0)
            transfer.arrive()

    def _load(self, transfer: Transfer, load: float) -> None:
        was, transfer.load = transfer.load, load
        if load != was:
            for pp_rank in transfer.pp_ranks:
                self._change_load(pp_rank, was, load)


def _load_of(transfer: Transfer, rate: float) -> float:
    return transfer.slowdown + transfer.processor * rate
