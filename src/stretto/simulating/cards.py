"""What is in flight: how fast it goes, and which share of processors it takes.

Knows places and times; nothing of edges, ops or instructions. The contract:

1. A transfer takes `busy_us` at full rate, and then `latency_us`, which keeps nothing busy.
2. A place has one network card, which serves each direction on its own. Of k transfers that use a direction
   at the same time, each gets an equal share, 1/k of the rate; one that uses several directions goes at the
   least of its shares. What one cannot use is not given to the others. Shares change at once
   when a transfer begins or ends.
3. While it is in flight, a transfer takes `processor` times its rate, and `slowdown`, of the compute lanes
   of its places. So the processor time it takes in all does not depend on its rate; slowdown, which is a
   share of the device that it holds, does.
4. Transfers that use no card have links of their own, and full rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.simulating.clock import Clock

LoadChange = Callable[[int, float, float], None]
"""(place, what is given back of its processor, what is taken instead)."""

Card = tuple[int, bool]
"""(place, whether outgoing)."""


def nothing() -> None:
    """What a transfer does when nobody waits for that moment."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One message or collective in flight. `leave` is called after busy_us, `arrive` latency_us later.
    left_us: of busy_us, at the start and at `since_us`; until_arrival: processors are given back with the
    arrival, not when the transfer leaves."""

    left_us: float
    latency_us: float
    cards: Sequence[Card]
    places: Sequence[int]
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
        """Step 3."""
        was, transfer.load = transfer.load, load
        if load != was:
            for place in transfer.places:
                self._change_load(place, was, load)


def _load_of(transfer: Transfer, rate: float) -> float:
    return transfer.slowdown + transfer.processor * rate
