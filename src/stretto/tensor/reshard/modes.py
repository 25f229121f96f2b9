"""How a box goes to several ranks: what each mode makes of a unit task.

    point_to_point   every receiver gets its own copy from a holder
    broadcast        one chain through all receiving hosts, so that each host's link carries the box once in
                     each direction; inside a host the chain goes on from device to device

In every mode a host of which a device holds the box serves its own receivers, without the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from stretto.errors import UsageError
from stretto.tensor.layout import region_count
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.tasks import UnitTask

Mode: TypeAlias = Literal["broadcast", "point_to_point"]

MODES: tuple[Mode, ...] = get_args(Mode)


def by_host(ranks: Iterable[int], hosts: Hosts) -> list[tuple[int, ...]]:
    """The ranks of each host, in the order given."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[hosts[rank]].append(rank)
    return [tuple(ranks) for ranks in found.values()]


def sends_of(
    tasks: Sequence[UnitTask], hosts: Hosts, mode: Mode, parts: int = 1, least_bytes: int = 1
) -> list[UnitTask]:
    """What a mode sends for these tasks: of each, a holder to a chain of receivers. parts: cut each box that
    goes between hosts into so many, as far as no part has fewer than least_bytes.

    Raises UsageError for a mode that there is not.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known; use one of {', '.join(MODES)}")
    sends: list[UnitTask] = []
    for task in tasks:
        near = {hosts[ranks[0]]: ranks for ranks in by_host(task.holders, hosts)}
        far: list[int] = []
        for ranks in by_host(task.receivers, hosts):
            if hosts[ranks[0]] in near:
                local = replace(task, holders=near[hosts[ranks[0]]], receivers=ranks)
                sends += [local] if mode == "broadcast" else _one_by_one(local)
            else:
                far += ranks
        outside = replace(task, receivers=tuple(far))
        for piece in cut(outside, min(parts, max(1, task.nbytes // least_bytes))) if far else ():
            sends += [piece] if mode == "broadcast" else _one_by_one(piece)
    return sends


def _one_by_one(task: UnitTask) -> list[UnitTask]:
    return [replace(task, receivers=(rank,)) for rank in task.receivers]


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
        yield replace(task, region=region, nbytes=region_count(region) * itemsize_bytes)
