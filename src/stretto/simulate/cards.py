"""What is in flight: how fast it goes, and which share of processors it takes.

Knows places and times; nothing of edges, ops or instructions. The contract:

1. A transfer takes `busy_us` at full rate, and then `latency_us`, which keeps nothing busy.
2. A place has one network card, which serves each direction on its own. Of k transfers that use a direction
   at the same time, each gets an equal share, 1/k of the rate; one that uses several directions goes at the
   least of its shares. What one cannot use is not given to the others. Shares change at once
   when a transfer begins or ends.
3. While it is in flight, a transfer takes `processor` times its rate, and `slowdown`, of the compute lanes
   of its places. So the processor time it takes in all does not depend on its rate; slowdown, which is a
   share of the device that it holds, does. `slower` is the part of `processor` by which ops are slower.
4. Transfers that use no card have links of their own, and full rate.
5. While the compute lane of one of its places works, a transfer goes at `pace` of its rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.simulate.clock import Clock
from stretto.simulate.compute_lane import NO_LOAD, Load

LoadChange = Callable[[int, Load, Load], None]
"""(place, what is given back of its processor, what is taken instead)."""

Card = tuple[int, bool]
"""(place, whether outgoing)."""


def nothing() -> None:
    """What a transfer does when nobody waits for that moment."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One message or collective in flight. `leave` is called after busy_us, `arrive` latency_us later; `rest`
    as `Cards.at_rest` says.

    left_us: of busy_us, at the start and at `since_us`; until_arrival: processors are given back with the
    arrival, not when the transfer leaves.
    """

    left_us: float
    latency_us: float
    cards: Sequence[Card]
    places: Sequence[int]
    processor: float
    slowdown: float
    leave: Callable[[], None]
    arrive: Callable[[], None]
    until_arrival: bool
    pace: float = 1.0
    slower: float = 0.0
    rest_us: float = 0.0
    rest: Callable[[], None] = nothing
    share: float = 0.0
    rate: float = 0.0
    since_us: float = 0.0
    load: Load = NO_LOAD
    version: int = 0


class Cards:
    """All transfers that are in flight.

    alone: messages alone use cards, and they take turns; there is nothing to share.
    """

    def __init__(self, clock: Clock, change_load: LoadChange, alone: bool) -> None:
        self._clock = clock
        self._change_load = change_load
        self._alone = alone
        self._on: dict[Card, list[Transfer]] = {}
        self._working: set[int] = set()
        self._paced: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        """Let a transfer begin now."""
        transfer.since_us = self._clock.now_us
        if transfer.pace < 1.0:
            self._paced.append(transfer)
        if self._alone or not transfer.cards:
            transfer.share = 1.0
            self._go(transfer)
            return
        for card in transfer.cards:
            self._on.setdefault(card, []).append(transfer)
        self._share(transfer.cards)

    def work(self, place: int, working: bool) -> None:
        """Step 5: the compute lane of a place begins to work, or stands."""
        if working == (place in self._working):
            return
        (self._working.add if working else self._working.remove)(place)
        for transfer in [found for found in self._paced if place in found.places]:
            self._go(transfer)

    def _share(self, cards: Sequence[Card]) -> None:
        """Step 2 for all that use one of `cards`, in the order in which they began."""
        met = {id(transfer): transfer for card in cards for transfer in self._on[card]}
        for transfer in met.values():
            share = 1.0 / max(len(self._on[card]) for card in transfer.cards)
            if share != transfer.share:
                transfer.share = share
                self._go(transfer)

    def _go(self, transfer: Transfer) -> None:
        """Put the end into the clock; an earlier one no longer counts."""
        clock = self._clock
        rate = transfer.share
        if transfer.pace < 1.0 and not self._working.isdisjoint(transfer.places):
            rate *= transfer.pace
        now_us = clock.now_us
        transfer.left_us = left_us = self.left_us(transfer)
        transfer.since_us = now_us
        transfer.rate = rate
        self._load(transfer, _load_of(transfer, rate))
        version = transfer.version = transfer.version + 1
        end_us = now_us + left_us / rate
        if transfer.rest is not nothing:
            self._aim_at_rest(transfer)
        clock.at(end_us, lambda: self._leave(transfer, version))
        if transfer.arrive is not nothing:
            clock.at(end_us + transfer.latency_us, lambda: self._arrive(transfer, version))

    def left_us(self, transfer: Transfer) -> float:
        """Of a transfer's busy_us, what is left now."""
        return max(0.0, transfer.left_us - (self._clock.now_us - transfer.since_us) * transfer.rate)

    def at_rest(self, transfer: Transfer, rest_us: float, then: Callable[[], None]) -> None:
        """Call `then`, once, when no more than `rest_us` of a transfer's busy_us is left."""
        transfer.rest_us, transfer.rest = rest_us, then
        self._aim_at_rest(transfer)

    def _aim_at_rest(self, transfer: Transfer) -> None:
        wait_us = max(0.0, self.left_us(transfer) - transfer.rest_us) / transfer.rate
        aim = transfer.version, transfer.rest_us
        self._clock.at(self._clock.now_us + wait_us, lambda: self._rest(transfer, aim))

    def _rest(self, transfer: Transfer, aim: tuple[int, float]) -> None:
        if aim == (transfer.version, transfer.rest_us):
            rest, transfer.rest = transfer.rest, nothing
            rest()

    def _leave(self, transfer: Transfer, version: int) -> None:
        if version != transfer.version:
            return
        if transfer.pace < 1.0:
            self._paced.remove(transfer)
        shared = not self._alone and bool(transfer.cards)
        if shared:
            for card in transfer.cards:
                self._on[card].remove(transfer)
        # Its latency goes on at full rate; what takes no processor then gives it back.
        lasts = transfer.until_arrival and transfer.arrive is not nothing
        self._load(transfer, _load_of(transfer, 1.0) if lasts else NO_LOAD)
        # What begins in its place keeps the others' shares as they are.
        transfer.leave()
        if shared:
            self._share(transfer.cards)

    def _arrive(self, transfer: Transfer, version: int) -> None:
        if version == transfer.version:
            self._load(transfer, NO_LOAD)
            transfer.arrive()

    def _load(self, transfer: Transfer, load: Load) -> None:
        """Step 3."""
        was, transfer.load = transfer.load, load
        if load != was:
            for place in transfer.places:
                self._change_load(place, was, load)


def _load_of(transfer: Transfer, rate: float) -> Load:
    taken = transfer.processor * rate
    return Load(transfer.slowdown + taken, transfer.slower * taken)
