"""How a box goes to several ranks: what each mode makes of a unit task.

    point_to_point   every receiver gets its own copy from a holder
    broadcast        one chain through all receiving hosts, so that each host's link carries the box once in
                     each direction; inside a host the chain goes on from device to device

In every mode a host of which a device holds the box serves its own receivers, without the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from stretto.errors import UsageError
from stretto.tensor.layout import Region, region_count
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.tasks import UnitTask

Mode: TypeAlias = Literal["broadcast", "point_to_point"]

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class Send:
    """A transfer of which the sender and the way are still open.

    candidates: ranks that may send, in order.
    groups: receivers, a group for each host; the order of the groups is open, that in a group is not.
    """

    tensor: int
    region: Region
    nbytes: int
    candidates: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def sends_of(
    tasks: Sequence[UnitTask], hosts: Hosts, mode: Mode, parts: int = 1, least_bytes: int = 1
) -> list[Send]:
    """What a mode sends for these tasks. parts: cut each box that goes between hosts into so many,
    as far as no part has fewer than least_bytes.

    Raises UsageError for a mode that there is not.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known; use one of {', '.join(MODES)}")
    sends: list[Send] = []
    for task in tasks:
        near: dict[int, list[int]] = defaultdict(list)
        for holder in task.holders:
            near[hosts[holder]].append(holder)
        needing: dict[int, list[int]] = defaultdict(list)
        for rank in task.receivers:
            needing[hosts[rank]].append(rank)
        for host in [host for host in needing if host in near]:
            local = tuple(needing.pop(host))
            groups = [(rank,) for rank in local] if mode == "point_to_point" else [local]
            sends += [_send(task, tuple(near[host]), (group,)) for group in groups]
        for piece in cut(task, min(parts, max(1, task.nbytes // least_bytes))) if needing else ():
            far = [tuple(ranks) for ranks in needing.values()]
            if mode == "broadcast":
                sends.append(_send(piece, task.holders, tuple(far)))
            else:
                sends += [_send(piece, task.holders, ((rank,),)) for group in far for rank in group]
    return sends


def cut(task: UnitTask, parts: int) -> Iterator[UnitTask]:
    """A task as so many tasks of parts of its box, fewer where its dims are too short.

    The dim that is cut leaves the least largest part; of several such dims, the first, whose parts are the
    least scattered in memory.
    """
    sizes = [stop - start for start, stop in task.region]
    if parts == 1 or not sizes:
        yield task
        return
    dim = min(range(len(sizes)), key=lambda d: (-(-sizes[d] // parts) / sizes[d], d))
    start, size = task.region[dim][0], sizes[dim]
    parts = min(parts, size)
    itemsize_bytes = task.nbytes // region_count(task.region)
    # spread evenly, the larger first: no part is more than one row longer than another
    edges = [start + -(-size * i // parts) for i in range(parts + 1)]
    for ends in pairwise(edges):
        region = (*task.region[:dim], ends, *task.region[dim + 1 :])
        nbytes = region_count(region) * itemsize_bytes
        yield UnitTask(task.tensor, region, nbytes, task.holders, task.receivers)


def _send(task: UnitTask, candidates: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> Send:
    return Send(task.tensor, task.region, task.nbytes, candidates, groups)
