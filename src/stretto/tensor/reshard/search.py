"""A search for a better arrangement: seeded local changes, kept when they are no worse.

The order of the sends, the sender of one, or its way through the hosts is changed at random; the timeline
says what it is worth. Changes that leave the makespan as it is are kept too, so that the search crosses
plateaus, of which makespans have many. (Zhuang et al., MLSys 2023, section 3.2, search orders depth first
for few tasks and by random greedy runs for many; local changes serve both.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stretto.tensor.reshard.order import Arrangement, Arranger, Way, meets

LINK_USES_PER_S = 1_000_000
"""Uses of links that the search places in a second, by which its budget is counted, so that equal input
gives an equal plan on every machine. Measured on one 2 GHz core to within a factor of two."""

SEED = 0


def searched(arranger: Arranger, start: Arrangement, bound_us: float, search_s: float) -> Arrangement:
    """The best arrangement found from a start within a budget of about so many seconds; never a worse one."""
    uses = sum(len(way.takes.uses) + 1 for way in start.ways)
    tries = int(search_s * LINK_USES_PER_S / max(uses, 1))
    chance = random.Random(SEED)
    best = start
    for _ in range(tries if len(start.ways) > 1 else 0):
        if meets(best.makespan_us, bound_us):
            break
        ways, order = list(best.ways), list(best.order)
        # often two changes at once: another sender alone seldom fits the order that was made for the first
        for _ in range(chance.choice((1, 1, 2, 3))):
            _change(arranger, ways, order, chance)
        found = arranger.arrangement(ways, order)
        if found.makespan_us <= best.makespan_us:
            best = found
    return best


def _change(arranger: Arranger, ways: list[Way], order: list[int], chance: random.Random) -> None:
    """One change of the order, or of how one send goes; the lists are changed in place."""
    kind = chance.random()
    if kind < 0.4:
        order.insert(chance.randrange(len(order)), order.pop(chance.randrange(len(order))))
    elif kind < 0.6:
        i, j = chance.randrange(len(order)), chance.randrange(len(order))
        order[i], order[j] = order[j], order[i]
    else:
        index = order[chance.randrange(len(order))]
        send = arranger.sends[index]
        groups = _groups_of(ways[index].receivers, send.groups)
        if len(groups) > 1 and chance.random() < 0.5:
            chance.shuffle(groups)
            candidate = send.candidates.index((ways[index].sender, ways[index].holding))
        else:
            candidate = chance.randrange(len(send.candidates))
        ways[index] = arranger.way(index, candidate, groups)


def _groups_of(receivers: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups in the order in which the receivers stand now."""
    return sorted(groups, key=lambda group: receivers.index(group[0]))
