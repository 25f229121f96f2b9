"""An order by rounds: in each, as many hosts send and receive at once as can, the busiest among them.

A send that can start at once may keep two links busy and leave a third, on which as much waits, without a
partner; then no rule that looks at one send at a time is good enough. A round is a matching of senders and
receivers that covers the links with most left to do, as far as a matching can cover them: links are taken in
order of what they have left, and each is covered by an alternating path that uncovers none before it (sets
that a matching can cover are a matroid, so taking the greatest first is best). For sends of one length this
colours the edges of a bipartite graph, and the order takes no longer than the busiest link (König).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from stretto.tensor.reshard.timeline import Footprint, Link

Pair = tuple[Link, Link]
"""The first two links of a send: (up, down)."""


def in_rounds(takes: Mapping[int, Footprint]) -> list[int]:
    """An order of sends, by index, in rounds; sends within a host come first.

    takes: what each takes of the links. Of a chain only the first hop is looked at.
    """
    waiting: dict[Pair, deque[int]] = defaultdict(deque)
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
