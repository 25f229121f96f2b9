"""A search for a better arrangement: simulated annealing, seeded, with its budget counted in evaluations.

The order of the sends, the sender of one, or its way through the hosts is changed at random; the timeline
says what it is worth. A worse arrangement may be gone on from while the temperature is high, an equal one
always, for makespans have wide plateaus. The temperature falls to nothing in each of a few rounds, and each
round starts from the best found so far.

Zhuang et al. (MLSys 2023) search orders depth first for few tasks, and by random greedy runs for many; local
changes serve both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stretto.tensor.reshard.order import Arrangement, Arranger, Way, meets

LINK_USES_PER_S = 3_000_000
"""Uses of links that the search places in a second, by which its budget is counted, so that equal input gives
an equal plan on every machine. Measured: 3.2 to 4 million on one core of a server (AMD EPYC), Python 3.11."""

SEED = 0


ROUNDS = 4

START_TEMPERATURE = 0.1
"""Of the makespan: by how much worse an arrangement is at first gone on from in one case of e. Assumed."""

ONE_MORE = 0.5
"""Chance of one more change at a time: a change of a sender seldom fits the order made for the one before."""


def searched(arranger: Arranger, start: Arrangement, bound_us: float, search_s: float) -> Arrangement:
    """The best arrangement found from a start within a budget of about so many seconds; never a worse one."""
    uses = sum(len(way.takes.uses) + 1 for way in start.ways)
    tries = int(search_s * LINK_USES_PER_S / ROUNDS / max(uses, 1)) if len(start.ways) > 1 else 0
    chance = random.Random(SEED)
    best = start
    for _ in range(ROUNDS):
        current = best
        for number in range(tries):
            if meets(best.makespan_us, bound_us):
                return best
            ways, order = list(current.ways), list(current.order)
            _change(arranger, ways, order, chance)
            while chance.random() < ONE_MORE:
                _change(arranger, ways, order, chance)
            found = arranger.arrangement(ways, order)
            allowance = START_TEMPERATURE * (1 - number / tries) * chance.expovariate(1.0)
            if found.makespan_us <= current.makespan_us * (1 + allowance):
                current = found
            if found.makespan_us < best.makespan_us:
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
