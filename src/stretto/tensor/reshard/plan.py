"""Plans of resharding: which rank sends which box to whom, in which order, and how long that takes.

    1. needs_of       the boxes that must move, and the copies that ranks make for themselves    tasks
    2. sends_of       what the mode makes of them                                                modes
    3. bound_us       the time that no plan can be under                                         bound
    4. Arranger       senders and order, the best of a few rules                                 order

A plan needs no device, and each rank may make it for itself: equal input gives an equal plan. Its list of
transfers is the order in which every rank does those that it takes part in, so no two ranks wait for each
other in a circle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from stretto.errors import UsageError
from stretto.tensor.layout import Layout, Region
from stretto.tensor.reshard.bound import bound_us
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import Mode, sends_of
from stretto.tensor.reshard.order import Arrangement, Arranger
from stretto.tensor.reshard.tasks import Copy, Needs, Tensor, needs_of
from stretto.tensor.reshard.timeline import MICROSECONDS_PER_S

__all__ = [
    "Choice",
    "Hosts",
    "Mode",
    "ReshardPlan",
    "Tensor",
    "plan_reshard",
    "plan_reshards",
]

PIECE_BYTES = 1 << 20
"""Pieces of a box along a chain, bytes: assumed. Small beside a box, large beside a message's own cost."""

MOST_PARTS = 4
"""Into how many parts boxes are cut at most, where whole ones leave links idle. Each is a message more."""

PARTS_MUST_SAVE = 0.01
"""Of the makespan, by which more parts must be better to be worth their messages. Assumed."""

Choice: TypeAlias = Literal["balanced", "naive"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box goes from a rank that holds it along a chain of ranks that need it.

    tensor: which of the tensors that are planned together, from 0.
    region: the box, in elements of the whole tensor.
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

    transfers: in the order in which every rank does its own. copies: what ranks hold already.
    zeros: (tensor, rank): the rank's target tensor is zeros (a Partial target).
    piece_bytes: along a chain, a receiver hands a box on in pieces of so many bytes.
    makespan_us: predicted, from the first byte sent to the last received. bound_us: no plan takes less.
    whole_us: the time of the whole tensors over the link of one host, a unit to compare by.
    tasks: how many distinct boxes must move to ranks that lack them, whatever the mode makes of them.
    needed_bytes: of boxes that ranks need and do not hold; a box counts for each of these.
    bytes_sent: by all ranks. link_bytes: of these, between hosts; sent_bytes and received_bytes: by host.
    """

    mode: Mode
    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]
    zeros: tuple[tuple[int, int], ...]
    piece_bytes: int
    makespan_us: float
    bound_us: float
    whole_us: float
    tasks: int
    needed_bytes: int
    bytes_sent: int
    link_bytes: int
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]


def plan_reshard(
    shape: Sequence[int],
    itemsize_bytes: int,
    source: Layout,
    target: Layout,
    hosts: Hosts,
    mode: Mode = "broadcast",
    *,
    choice: Choice = "balanced",
    piece_bytes: int = PIECE_BYTES,
) -> ReshardPlan:
    """Plan how a tensor comes from one layout to another; the meshes may be the same, overlap, or not.

    shape: of the whole tensor. mode: see `modes`.
    choice: "naive": the first holder sends, in the order of the tasks, to compare with.
    Raises UsageError for a Partial source (reduce it first), for placements that do not fit, for ranks
    without host.
    """
    tensor = Tensor(tuple(shape), itemsize_bytes, source, target)
    return plan_reshards([tensor], hosts, mode, choice=choice, piece_bytes=piece_bytes)


def plan_reshards(
    tensors: Sequence[Tensor],
    hosts: Hosts,
    mode: Mode = "broadcast",
    *,
    choice: Choice = "balanced",
    piece_bytes: int = PIECE_BYTES,
) -> ReshardPlan:
    """Plan several tensors that change their layouts at one time, so that they share the links well.

    `Transfer.tensor` and its like are indices into `tensors`. See `plan_reshard` for the rest.
    """
    if piece_bytes < 1:
        raise UsageError(f"piece_bytes={piece_bytes}: give 1 or more")
    if choice not in ("balanced", "naive"):
        raise UsageError(f"choice {choice!r} is not known; use balanced or naive")
    for tensor in tensors:
        for layout in (tensor.source, *tensor.targets):
            hosts.check(layout.ranks)
    needs = needs_of(tensors)
    bound = bound_us(needs.tasks, hosts)
    arranger = Arranger(sends_of(needs.tasks, hosts, mode), hosts, piece_bytes)
    if choice == "naive":
        return _plan(tensors, needs, arranger, arranger.naive(), mode, bound)
    # a mode may need more of the links than the best one: where it does, that is as far as it gets
    within_mode = bound_us(arranger.sends, hosts)
    arranger, found = _cut_if_better(arranger, arranger.balanced(within_mode), needs, mode, within_mode)
    return _plan(tensors, needs, arranger, found, mode, bound)


def _cut_if_better(
    arranger: Arranger, found: Arrangement, needs: Needs, mode: Mode, bound: float
) -> tuple[Arranger, Arrangement]:
    """Try boxes in parts, which several holders may send and which fill links that whole boxes leave idle.

    No part is smaller than a piece: along a chain it would win nothing but a shorter first piece.
    """
    for parts in range(2, MOST_PARTS + 1):
        if found.makespan_us * (1 - PARTS_MUST_SAVE) <= bound:
            break
        sends = sends_of(needs.tasks, arranger.hosts, mode, parts, least_bytes=arranger.piece_bytes)
        other = Arranger(sends, arranger.hosts, arranger.piece_bytes)
        better = other.balanced(bound)
        if better.makespan_us < found.makespan_us * (1 - PARTS_MUST_SAVE):
            arranger, found = other, better
    return arranger, found


def _plan(
    tensors: Sequence[Tensor],
    needs: Needs,
    arranger: Arranger,
    found: Arrangement,
    mode: Mode,
    bound: float,
) -> ReshardPlan:
    timeline, times = arranger.walk(found.ways, found.order)
    hosts = arranger.hosts
    transfers = []
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for index, (start_us, end_us) in times.items():
        send, way = arranger.sends[index], found.ways[index]
        transfers.append(
            Transfer(send.tensor, send.region, send.nbytes, way.sender, way.receivers, start_us, end_us)
        )
        for here, there in pairwise((way.sender, *way.receivers)):
            if hosts[here] != hosts[there]:
                sent[hosts[here]] += send.nbytes
                received[hosts[there]] += send.nbytes
    whole_bytes = sum(math.prod(tensor.shape) * tensor.itemsize_bytes for tensor in tensors)
    return ReshardPlan(
        mode=mode,
        transfers=tuple(transfers),
        copies=needs.copies,
        zeros=needs.zeros,
        piece_bytes=arranger.piece_bytes,
        makespan_us=timeline.makespan_us,
        bound_us=bound,
        whole_us=whole_bytes / hosts.link_bytes_per_s * MICROSECONDS_PER_S,
        tasks=len(needs.tasks),
        needed_bytes=sum(task.nbytes * len(task.receivers) for task in needs.tasks),
        bytes_sent=sum(one.nbytes * len(one.receivers) for one in transfers),
        link_bytes=sum(sent.values()),
        sent_bytes=dict(sorted(sent.items())),
        received_bytes=dict(sorted(received.items())),
    )
