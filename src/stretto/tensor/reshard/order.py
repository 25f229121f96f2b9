"""Who sends, and in which order: choices for a list of sends that make the links busy at once.

An arrangement is a sender and a way through the hosts for each send, and one order of all. Its timeline
follows from it. The steps, each from the best of those before it:

    1. naive: the first owner sends, in the order of the tasks, along hosts in order of rank
    2. senders: the longest send first, each from the host whose uplink then carries least
    3. order: again and again the send that can start first; which of several is a rule, and several rules
       are tried (open-shop list scheduling; a send is an operation on several links at once)
    4. turns: in each, every host sends to another one: the first to the first, the second to the second; then
       the first to the second, and so on. Where all have as much for all, no link is ever idle.

Equal input gives equal choices: ties go by index.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from stretto.tensor.reshard.tasks import Footprint, Hosts, Link, LinkTimeline, UnitTask, by_host, footprint


@dataclass(frozen=True, slots=True)
class Way:
    """A send as it is done: who sends it, along which ranks, and what that takes of the links."""

    sender: int
    receivers: tuple[int, ...]
    takes: Footprint


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Ways by index of send, and the order of the sends."""

    ways: tuple[Way, ...]
    order: tuple[int, ...]
    makespan_us: float


class SendArranger:
    """The sends of one reshard with all that choosing among arrangements needs."""

    def __init__(self, sends: Sequence[UnitTask], hosts: Hosts, piece_bytes: int) -> None:
        self.sends = sends
        self.hosts = hosts
        self.piece_bytes = piece_bytes

    def way(self, index: int, candidate: int, groups: Sequence[tuple[int, ...]]) -> Way:
        """The way of a send from one of its owners through its hosts in this order."""
        send = self.sends[index]
        sender = send.owners[candidate]
        receivers = tuple(rank for group in groups for rank in group)
        takes = footprint(send.nbytes, (sender, *receivers), self.hosts, self.piece_bytes)
        return Way(sender, receivers, takes)

    def walk(
        self, ways: Sequence[Way], order: Sequence[int]
    ) -> tuple[LinkTimeline, dict[int, tuple[float, float]]]:
        """Place all sends: the timeline, and (start, end) in microseconds by send, in the order placed."""
        timeline, times = LinkTimeline(), {}
        for i in order:
            times[i] = timeline.place(ways[i].takes)
        return timeline, times

    def arrangement(self, ways: Sequence[Way], order: Sequence[int]) -> Arrangement:
        """These choices with the makespan that they have."""
        return Arrangement(tuple(ways), tuple(order), self.walk(ways, order)[0].makespan_us)

    def naive(self) -> Arrangement:
        """Step 1."""
        ways = [self.way(i, 0, by_host(send.receivers, self.hosts)) for i, send in enumerate(self.sends)]
        return self.arrangement(ways, range(len(ways)))

    def balanced(self, bound_us: float) -> Arrangement:
        """Steps 2 to 4: the best of the naive arrangement and of each order with balanced senders."""
        best = self.naive()
        ways = self.balanced_ways()
        orders: list[Callable[[], list[int]]] = [partial(self.listed, ways, rule) for rule in RULES]
        orders.append(lambda: in_turns([way.takes for way in ways]))
        for order in orders:
            if best.makespan_us <= bound_us * (1 + 1e-9):  # sums of times are rounded
                break
            best = min(best, self.arrangement(ways, order()), key=lambda one: one.makespan_us)
        return best

    def balanced_ways(self) -> list[Way]:
        """Step 2: for each send the owner, and the way, that leave the busiest uplink least busy."""
        up: dict[int, int] = defaultdict(int)
        out: dict[int, int] = defaultdict(int)
        ways: dict[int, Way] = {}

        def open_choice(i: int) -> tuple[bool, int, int]:
            send = self.sends[i]
            return len({self.hosts[rank] for rank in send.owners}) > 1, -send.nbytes, i

        # those that have no choice first: the others then even out what these load
        for i in sorted(range(len(self.sends)), key=open_choice):
            send = self.sends[i]
            by_load = [(up[self.hosts[rank]], out[rank], c) for c, rank in enumerate(send.owners)]
            candidate = min(by_load)[2]
            # the last host forwards nothing, so the one that sends most otherwise is there
            groups = sorted(by_host(send.receivers, self.hosts), key=lambda group: up[self.hosts[group[0]]])
            ways[i] = way = self.way(i, candidate, groups)
            out[way.sender] += send.nbytes
            for (kind, host), _, _ in way.takes.uses:
                if kind == "up":
                    up[host] += send.nbytes
        return [ways[i] for i in range(len(self.sends))]

    def listed(self, ways: Sequence[Way], rule: Rule) -> list[int]:
        """Step 3: again and again, of the sends that can start first, the one that the rule puts first."""
        remaining: dict[Link, float] = defaultdict(float)
        for way in ways:
            for link, from_us, to_us in way.takes.uses:
                remaining[link] += to_us - from_us
        timeline = LinkTimeline()
        order: list[int] = []

        def key(i: int) -> tuple[float, tuple[float, float], int]:
            takes = ways[i].takes
            loads = [remaining[link] for link, _, _ in takes.uses]
            return timeline.earliest_us(takes), rule(loads, takes.arrival_us), i

        # sends that take the same of the same links are equally good: one of each kind is in the heap
        same: dict[Footprint, deque[int]] = defaultdict(deque)
        for i, way in enumerate(ways):
            same[way.takes].append(i)
        # starts only move later and remaining loads only shrink, so a key only grows: one that is unchanged
        # when it comes up is the least of all
        heap = [key(queue.popleft()) for queue in same.values()]
        heapq.heapify(heap)
        while heap:
            i = heap[0][2]
            now = key(i)
            if now != heap[0]:
                heapq.heapreplace(heap, now)
                continue
            order.append(i)
            timeline.place(ways[i].takes)
            for link, from_us, to_us in ways[i].takes.uses:
                remaining[link] -= to_us - from_us
            queue = same[ways[i].takes]
            if queue:
                heapq.heapreplace(heap, key(queue.popleft()))
            else:
                heapq.heappop(heap)
        return order


Rule = Callable[[Sequence[float], float], tuple[float, float]]
"""(what is left for each link of a send, its own time), microseconds -> what orders sends, least first."""

RULES: tuple[Rule, ...] = (
    # the link with most left sets the end: keep it busy; then the longest, which is hardest to fit in late
    lambda left, us: (-max(left, default=0.0), -us),
    # the same, then the shortest: it frees its other link for the next
    lambda left, us: (-max(left, default=0.0), us),
    lambda left, us: (-sum(left), -us),
    lambda left, us: (-sum(left), us),
)


def in_turns(takes: Sequence[Footprint]) -> list[int]:
    """Step 4: an order of sends, by index; sends within a host come first.

    takes: what each takes of the links. Of a chain only the first hop is looked at.
    """
    ends = [[host for (_, host), _, _ in one.uses[:2]] for one in takes]
    ups, downs = (sorted({hosts[end] for hosts in ends if hosts}) for end in (0, 1))

    def key(i: int) -> tuple[int, float, int]:
        if not ends[i]:
            return -1, 0.0, i
        up, down = ends[i]
        turn = (downs.index(down) - ups.index(up)) % max(len(ups), len(downs))
        return turn, -takes[i].arrival_us, i

    return sorted(range(len(takes)), key=key)
