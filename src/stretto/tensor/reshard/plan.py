"""Plans of resharding: which rank sends which box to whom, in which order, and how long that takes.

A plan needs no device. Each rank may make it for itself: equal input gives an equal plan. Every rank does its
transfers in the order of the list, so no two ranks wait for each other in a circle.

The bound is the load of the links, with senders chosen as well as they could be. Into a host, each box must
go once if a rank of it needs the box and none has it. Out of the hosts, each box must go as often as there
are such hosts: once at least out of a host that had it at first, and otherwise out of any of these and those
that it has come to. The least that the busiest uplink must send is the largest, over sets of hosts, of the
bytes that only the set can send, for each host of the set (Hall's condition). A maximum flow finds a set that
cannot send its bytes at a given load; the load then grows to what that set needs, until there is none
(Dinkelbach's method).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal, TypeAlias

import networkx as nx

from stretto.errors import UsageError
from stretto.tensor.layout import Region
from stretto.tensor.reshard.order import Arrangement, SendArranger
from stretto.tensor.reshard.tasks import MICROSECONDS_PER_S, Copy, UnitTask, needs_of, sends_of
from stretto.tensor.reshard.tasks import Hosts as Hosts
from stretto.tensor.reshard.tasks import Mode as Mode
from stretto.tensor.reshard.tasks import Tensor as Tensor

PIECE_BYTES = 1 << 20
"""Pieces of a box along a chain, bytes: assumed. Small beside a box, large beside a message's own cost."""

MOST_PARTS = 4
"""Into how many parts boxes are cut at most, where uncut ones leave links idle. Each is a message more."""

PARTS_MUST_SAVE = 0.01
"""Of the makespan, by which more parts must be better to be worth their messages. Assumed."""

Choice: TypeAlias = Literal["balanced", "naive"]


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """One box goes from a rank that has it along a chain of ranks that need it.

    tensor: which of the tensors that are planned together, from 0.
    region: the box, in elements of the full tensor.
    nbytes: its bytes.
    sender: the rank that it comes from.
    receivers: the sender sends to the first, the first hands each piece on to the second, and so on; each
        keeps it. One receiver: a plain message.
    start_us, end_us: predicted: the first byte leaves the sender, the last one reaches the last receiver.
    """

    tensor: int
    region: Region
    nbytes: int
    sender: int
    receivers: tuple[int, ...]
    start_us: float = 0.0
    end_us: float = 0.0


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How one tensor, or several together, come to their target layouts.

    transfers: in the order in which every rank does its own. copies: what ranks have already.
    piece_bytes: along a chain, a receiver hands a box on in pieces of so many bytes.
    makespan_us: predicted, from the first byte sent to the last received. bound_us: no plan takes less.
    full_us: the time of the full tensors over the link of one host, a unit to compare by.
    tasks: how many distinct boxes must move to ranks that lack them, whatever the mode makes of them.
    needed_bytes: of boxes that ranks need and do not have; a box counts for each of these.
    bytes_sent: by all ranks. link_bytes: of these, between hosts; sent_bytes and received_bytes: by host.
    """

    mode: Mode
    transfers: tuple[BoxTransfer, ...]
    copies: tuple[Copy, ...]
    piece_bytes: int
    makespan_us: float
    bound_us: float
    full_us: float
    tasks: int
    needed_bytes: int
    bytes_sent: int
    link_bytes: int
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]


def plan_reshards(
    tensors: Sequence[Tensor],
    hosts: Hosts,
    mode: Mode = "broadcast",
    *,
    choice: Choice = "balanced",
    piece_bytes: int = PIECE_BYTES,
) -> ReshardPlan:
    """Plan how tensors come from one layout to another at one time, so that they share the links well. The
    meshes may be the same, overlap, or not.

    `BoxTransfer.tensor` and its like are indices into `tensors`. mode: how a box goes to several ranks.
    choice: "naive": the first owner sends, in the order of the tasks, to compare with.
    Raises UsageError for a Partial source (reduce it first), for placements that do not fit, for ranks
    without host.
    """
    if piece_bytes < 1:
        raise UsageError(f"piece_bytes={piece_bytes}: give 1 or more")
    if choice not in ("balanced", "naive"):
        raise UsageError(f"choice {choice!r} is not known; use balanced or naive")
    for tensor in tensors:
        for layout in (tensor.source, *tensor.targets):
            hosts.check(layout.ranks)
    tasks, copies = needs_of(tensors)
    bound = bound_us(tasks, hosts)
    arranger = SendArranger(sends_of(tasks, hosts, mode), hosts, piece_bytes)
    if choice == "naive":
        found = arranger.naive()
    else:
        # a mode may need more of the links than the best one: where it does, that is as far as it gets
        within_mode = bound_us(arranger.sends, hosts)
        arranger, found = _cut_if_better(arranger, arranger.balanced(within_mode), tasks, mode, within_mode)
    timeline, times = arranger.walk(found.ways, found.order)
    transfers = []
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for index, (start_us, end_us) in times.items():
        send, way = arranger.sends[index], found.ways[index]
        transfers.append(
            BoxTransfer(send.tensor, send.region, send.nbytes, way.sender, way.receivers, start_us, end_us)
        )
        for here, there in pairwise((way.sender, *way.receivers)):
            if hosts[here] != hosts[there]:
                sent[hosts[here]] += send.nbytes
                received[hosts[there]] += send.nbytes
    full_bytes = sum(math.prod(tensor.shape) * tensor.itemsize_bytes for tensor in tensors)
    return ReshardPlan(
        mode=mode,
        transfers=tuple(transfers),
        copies=tuple(copies),
        piece_bytes=arranger.piece_bytes,
        makespan_us=timeline.makespan_us,
        bound_us=bound,
        full_us=full_bytes / hosts.link_bytes_per_s * MICROSECONDS_PER_S,
        tasks=len(tasks),
        needed_bytes=sum(task.nbytes * len(task.receivers) for task in tasks),
        bytes_sent=sum(one.nbytes * len(one.receivers) for one in transfers),
        link_bytes=sum(sent.values()),
        sent_bytes=dict(sorted(sent.items())),
        received_bytes=dict(sorted(received.items())),
    )


def _cut_if_better(
    arranger: SendArranger, found: Arrangement, tasks: Sequence[UnitTask], mode: Mode, bound: float
) -> tuple[SendArranger, Arrangement]:
    """Try boxes in parts, which several owners may send and which fill links that uncut boxes leave idle.

    No part is smaller than a piece: along a chain it would win nothing but a shorter first piece.
    """
    for parts in range(2, MOST_PARTS + 1):
        if found.makespan_us * (1 - PARTS_MUST_SAVE) <= bound:
            break
        sends = sends_of(tasks, arranger.hosts, mode, parts, least_bytes=arranger.piece_bytes)
        other = SendArranger(sends, arranger.hosts, arranger.piece_bytes)
        better = other.balanced(bound)
        if better.makespan_us < found.makespan_us * (1 - PARTS_MUST_SAVE):
            arranger, found = other, better
    return arranger, found


@dataclass(frozen=True, slots=True)
class Together:
    """One plan for tensors of which each may go to several targets.

    parts: for each tensor that the plan speaks of, which of the given ones it is, and to which of its targets
    it goes: all those, for which a rank receives a box once and hands it on, or one by itself.
    """

    plan: ReshardPlan
    parts: tuple[tuple[int, tuple[int, ...]], ...]


def plan_together(
    tensors: Sequence[Tensor],
    hosts: Hosts,
    mode: Mode = "broadcast",
    *,
    piece_bytes: int = PIECE_BYTES,
) -> Together:
    """Plan all that moves at one time; ranks of one target serve those of another where that is better.

    First every target is served for itself, from the source. Then, tensor by tensor, its targets are joined:
    a box goes once to all ranks that need it for any of them, so that a chain runs through the hosts of all,
    and a host that gets it for one target has it for the others. It stays so if that ends earlier, or at the
    same time with fewer bytes between hosts. Targets with a Partial axis have terms, not the value, and stay
    apart.

    See `plan_reshards` for the rest.
    """

    def planned(joined: frozenset[int]) -> Together:
        parts: list[tuple[int, tuple[int, ...]]] = []
        for index, tensor in enumerate(tensors):
            apart = list(range(len(tensor.targets)))
            if index in joined:
                apart = [at for at in apart if tensor.targets[at].partial_axes]
                parts.append((index, tuple(at for at in range(len(tensor.targets)) if at not in apart)))
            parts += [(index, (at,)) for at in apart]
        split = [replace(tensors[at], target=[tensors[at].targets[to] for to in goes]) for at, goes in parts]
        return Together(plan_reshards(split, hosts, mode, piece_bytes=piece_bytes), tuple(parts))

    joined: frozenset[int] = frozenset()
    result = planned(joined)
    for index, tensor in enumerate(tensors):
        if sum(not target.partial_axes for target in tensor.targets) > 1:
            other = planned(joined | {index})
            plan, than = other.plan, result.plan
            is_faster = plan.makespan_us < than.makespan_us * (1 - PARTS_MUST_SAVE)
            is_as_fast = plan.makespan_us <= than.makespan_us * (1 + 1e-9)
            if is_faster or (is_as_fast and plan.link_bytes < than.link_bytes):
                joined, result = joined | {index}, other
    return result


Demands = Mapping[frozenset[int], int]
"""Bytes that must leave, by the hosts that may send them."""


def bound_us(tasks: Iterable[UnitTask], hosts: Hosts) -> float:
    """Microseconds that these tasks take at least, whichever rank sends, and in whichever order: of what must
    move, in any mode; of what one mode sends, in that mode. 0 if no link is used."""
    incoming: dict[int, int] = defaultdict(int)
    outgoing: dict[frozenset[int], int] = defaultdict(int)
    for task in tasks:
        keeping = frozenset(hosts[rank] for rank in task.owners)
        lacking = frozenset(hosts[rank] for rank in task.receivers) - keeping
        for host in lacking:
            incoming[host] += task.nbytes
        if lacking:
            outgoing[keeping] += task.nbytes
        if len(lacking) > 1:
            outgoing[keeping | lacking] += task.nbytes * (len(lacking) - 1)
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
        # integers: all is counted in parts of load's denominator
        network.add_edge("demands", demand, capacity=nbytes * load.denominator)
        for host in demand:
            network.add_edge(demand, host)  # of any capacity
            network.add_edge(host, "sent", capacity=load.numerator)
    sent, (behind, _) = nx.minimum_cut(network, "demands", "sent")
    if sent == sum(demands.values()) * load.denominator:
        return frozenset()
    return frozenset(host for host in behind if isinstance(host, int))
