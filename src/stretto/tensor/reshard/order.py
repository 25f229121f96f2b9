"""Who sends, and in which order: choices for a list of sends that make the links busy at once.

An arrangement is a sender and a way through the hosts for each send, and one order of all. Its timeline
follows from it. The steps, each from the best of those before it:

    1. naive: the first owner sends, in the order of the tasks, along hosts in order of rank
    2. senders: the longest send first, each from the host whose uplink then carries least
    3. order: again and again the send that can start first; which of several is a rule, and several rules
       are tried (open-shop list scheduling; a send is an operation on several links at once)
    4. rounds: in each, as many hosts send and receive at once as can, the busiest among them. No rule that
       takes one send at a time does that. A round is a matching of senders and receivers: links are taken in
       order of what they have left, and each is covered by an alternating path that uncovers none before it
       (sets that a matching can cover are a matroid, so taking the greatest first is best). For sends of one
       length the order takes no longer than the busiest link (König).

Equal input gives equal choices: ties go by index.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
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
        orders.append(lambda: in_rounds({i: way.takes for i, way in enumerate(ways)}))
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


def in_rounds(takes: Mapping[int, Footprint]) -> list[int]:
    """Step 4: an order of sends, by index, in rounds; sends within a host come first.

    takes: what each takes of the links. Of a chain only the first hop is looked at.
    """
    waiting: dict[tuple[Link, Link], deque[int]] = defaultdict(deque)
    left: dict[Link, float] = defaultdict(float)
    order = []
    # the longest first: short ones at the end leave less over
    for i in sorted(takes, key=lambda i: (-takes[i].arrival_us, i)):
        between = [link for link, _, _ in takes[i].uses if link[0] in ("up", "down")]
        if not between:
            order.append(i)
            continue
        waiting[between[0], between[1]].append(i)
        for link, from_us, to_us in takes[i].uses:
            left[link] += to_us - from_us
    while waiting:
        beside: dict[Link, list[Link]] = defaultdict(list)
        for up, down in waiting:
            beside[up].append(down)
            beside[down].append(up)
        for link in beside:
            beside[link].sort(key=lambda other: (-left[other], other))
        mates = covering(beside, sorted(beside, key=lambda link: (-left[link], link)))
        for up, down in sorted(mates.items()):
            if up[0] != "up":
                continue
            i = waiting[up, down].popleft()
            if not waiting[up, down]:
                del waiting[up, down]
            order.append(i)
            for link, from_us, to_us in takes[i].uses:
                left[link] -= to_us - from_us
    return order


def covering(beside: Mapping[Link, Sequence[Link]], wanted: Sequence[Link]) -> dict[Link, Link]:
    """A matching, as each link's mate, that covers those that are wanted most, first to last.

    `networkx.max_weight_matching` gives an equal one in 40 s for 64 hosts to 64 others, and this in 1.2 s.

    beside: the links on the other side that each could be matched with.
    """
    mates: dict[Link, Link] = {}
    kept: set[Link] = set()

    def cover(link: Link, seen: set[Link]) -> bool:
        for other in beside[link]:
            if other in seen:
                continue
            seen.add(other)
            mate = mates.get(other)
            if mate is None or mate not in kept or cover(mate, seen):
                if mate is not None and mates.get(mate) == other:
                    del mates[mate]
                mates[link], mates[other] = other, link
                return True
        return False

    for link in wanted:
        if link in mates or cover(link, set()):
            kept.add(link)
    return mates
