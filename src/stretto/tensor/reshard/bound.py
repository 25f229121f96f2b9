"""The time that no plan can be under: the load of the links, with senders chosen as well as they could be.

Into a host, each box must go once if a rank of it needs the box and none holds it. Out of the hosts, each
box must go as often as there are such hosts: once at least out of a host that held it at first, and otherwise
out of any of these and those that it has come to.

With boxes divided at will among the hosts that may send them, the least that the busiest uplink must send is
the largest, over sets of hosts, of the bytes that only the set can send, for each host of the set (Hall's
condition). A maximum flow finds a set that cannot send its bytes at a given load; the load then grows to what
that set needs, until there is none (Dinkelbach's method).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction

import networkx as nx

from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.tasks import UnitTask
from stretto.tensor.reshard.timeline import MICROSECONDS_PER_S

Demands = Mapping[frozenset[int], int]
"""Bytes that must leave, by the hosts that may send them."""


def bound_us(tasks: Iterable[UnitTask], hosts: Hosts) -> float:
    """Microseconds that these tasks take at least, whoever sends and in whichever order: of what must move,
    in any mode; of what one mode sends, in that mode. 0 if no link is used."""
    incoming: dict[int, int] = defaultdict(int)
    outgoing: dict[frozenset[int], int] = defaultdict(int)
    for task in tasks:
        holding = frozenset(hosts[rank] for rank in task.holders)
        lacking = frozenset(hosts[rank] for rank in task.receivers) - holding
        for host in lacking:
            incoming[host] += task.nbytes
        if lacking:
            outgoing[holding] += task.nbytes
        if len(lacking) > 1:
            outgoing[holding | lacking] += task.nbytes * (len(lacking) - 1)
    if not incoming:
        return 0.0
    load_bytes = max(Fraction(max(incoming.values())), least_load(outgoing))
    return float(load_bytes) / hosts.link_bytes_per_s * MICROSECONDS_PER_S + hosts.latency_us


def least_load(demands: Demands) -> Fraction:
    """The least largest load, in bytes, when each demand is divided at will among the hosts of its set."""
    everyone = frozenset[int]().union(*demands)
    load = Fraction(sum(demands.values()), len(everyone))
    while True:
        starved = _starved(demands, load)
        if not starved:
            return load
        within = sum(nbytes for allowed, nbytes in demands.items() if allowed <= starved)
        load = Fraction(within, len(starved))


def _starved(demands: Demands, load: Fraction) -> frozenset[int]:
    """Hosts that cannot send all that only they can if each sends at most so much; empty if all can.

    They are on the demands' side of a minimum cut between demands and hosts.
    """
    network = nx.DiGraph()
    for demand, nbytes in demands.items():
        # whole numbers: all is counted in parts of load's denominator
        network.add_edge("demands", demand, capacity=nbytes * load.denominator)
        for host in demand:
            network.add_edge(demand, host)  # of any capacity
            network.add_edge(host, "sent", capacity=load.numerator)
    sent, (behind, _) = nx.minimum_cut(network, "demands", "sent")
    if sent == sum(demands.values()) * load.denominator:
        return frozenset()
    return frozenset(host for host in behind if isinstance(host, int))
