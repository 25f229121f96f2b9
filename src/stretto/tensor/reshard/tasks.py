"""What must move, what each mode sends for it, and when transfers run on the links of hosts.

A unit task is one distinct box of the target layout, with all ranks that need it, cut by the boxes of the
source layouts, with all ranks that have it: any of these may send it, all of the others receive it. A
rank that has what it needs copies it. (Zhuang et al., "On Optimizing the Communication of Model
Parallelism", MLSys 2023.) Where a tensor has several targets, boxes are cut by all of them, and anyone who
needs a box for any of them receives it once.

A mode is how a box goes to several ranks:

    point_to_point   every receiver gets its own copy from an owner
    broadcast        one chain through all receiving hosts, so that each host's link carries the box once in
                     each direction; inside a host the chain goes on from device to device

In every mode a host that has the box on one of its devices serves its own receivers, without the network.

`Hosts` is all that resharding knows of a cluster. A host's link sends one thing at a time and receives one
thing at a time; within a host, both take no time. Transfers are taken in the order of a list: each starts as
soon as every link that it uses is free of those before it. Along a chain the next link starts when the first
piece has arrived.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Literal, TypeAlias, get_args

from stretto.errors import UsageError
from stretto.tensor.layout import Layout, Region, intersect, region_count

DEFAULT_LINK_BYTES_PER_S = 12.5e9
"""100 Gbit/s: assumed, where only the ratios of times matter."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts joined by a network in which only their own links are narrow. Links are full duplex.

    host_of: the host of each rank, by rank: (0, 0, 1, 1) puts ranks 2 and 3 on host 1.
    link_bytes_per_s: what a host's link carries in each direction.
    latency_us: from the end of sending to the end of receiving, between hosts.
    """

    host_of: tuple[int, ...]
    link_bytes_per_s: float = DEFAULT_LINK_BYTES_PER_S
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_of", tuple(self.host_of))
        if not (0 < self.link_bytes_per_s < math.inf):
            raise UsageError(f"link_bytes_per_s={self.link_bytes_per_s}: give bytes a second, above 0")
        if not (0 <= self.latency_us < math.inf):
            raise UsageError(f"latency_us={self.latency_us}: give microseconds, 0 or more")

    @staticmethod
    def of(
        devices: int,
        ranks: int,
        link_bytes_per_s: float = DEFAULT_LINK_BYTES_PER_S,
        latency_us: float = 0.0,
    ) -> Hosts:
        """Hosts of so many devices each, filled in order of rank, as torchrun numbers them."""
        if devices < 1 or ranks < 1:
            raise UsageError(f"{ranks} ranks on hosts of {devices} devices: give at least 1 of each")
        placed = tuple(rank // devices for rank in range(ranks))
        return Hosts(placed, link_bytes_per_s, latency_us)

    def __getitem__(self, rank: int) -> int:
        """The host of a rank."""
        return self.host_of[rank]

    def check(self, ranks: Iterable[int]) -> None:
        """Raises UsageError if a rank has no host."""
        missing = sorted({rank for rank in ranks if not 0 <= rank < len(self.host_of)})
        if missing:
            raise UsageError(
                f"ranks {missing} are on a mesh but on no host: host_of names {len(self.host_of)} ranks; "
                "give the host of every rank"
            )


MICROSECONDS_PER_S = 1e6

Link = tuple[str, int]
"""("up" | "down", host): one direction of a host's link."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a transfer takes of the links, from its own start: (link, from_us, to_us) each.

    arrival_us: when the last byte is at the last receiver.
    """

    uses: tuple[tuple[Link, float, float], ...]
    arrival_us: float


def footprint(nbytes: int, chain: Sequence[int], hosts: Hosts, piece_bytes: int) -> Footprint:
    """What sending a box of so many bytes along a chain of ranks takes. chain: the sender first."""
    uses: list[tuple[Link, float, float]] = []
    piece = min(nbytes, piece_bytes)
    starts_us, ends_us = 0.0, 0.0
    for here, there in pairwise(chain):
        if hosts[here] == hosts[there]:
            continue
        rate = hosts.link_bytes_per_s / MICROSECONDS_PER_S
        ends_us = starts_us + nbytes / rate
        uses.append((("up", hosts[here]), starts_us, ends_us))
        uses.append((("down", hosts[there]), starts_us, ends_us))
        starts_us += piece / rate + hosts.latency_us
        ends_us += hosts.latency_us
    return Footprint(tuple(uses), ends_us)


@dataclass(slots=True)
class LinkTimeline:
    """When each link is free again, as transfers are placed one after another."""

    free_us: dict[Link, float] = field(default_factory=dict)
    makespan_us: float = 0.0

    def earliest_us(self, what: Footprint) -> float:
        """When a transfer could start if it were the next."""
        free = self.free_us
        start = 0.0
        for link, from_us, _ in what.uses:
            if link in free and free[link] - from_us > start:
                start = free[link] - from_us
        return start

    def place(self, what: Footprint) -> tuple[float, float]:
        """Let a transfer be the next; returns its start and the arrival of its last byte, microseconds."""
        start = self.earliest_us(what)
        for link, _, to_us in what.uses:
            self.free_us[link] = start + to_us
        end = start + what.arrival_us
        self.makespan_us = max(self.makespan_us, end)
        return start, end


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that changes its layout.

    shape, itemsize_bytes: of the full tensor.
    source: the layout that it is in.
    target: the layout that it goes to. A Partial("sum") axis of it has the value on its first ranks only.
        Several layouts, none of them Partial, when the same values are wanted in each of them.
    """

    shape: tuple[int, ...]
    itemsize_bytes: int
    source: Layout
    target: Layout | Sequence[Layout]

    @property
    def targets(self) -> tuple[Layout, ...]:
        """The target layouts: one, unless several were given."""
        return (self.target,) if isinstance(self.target, Layout) else tuple(self.target)


@dataclass(frozen=True, slots=True)
class UnitTask:
    """A box, who has it and who needs it.

    tensor: its index among the tensors planned together. owners: ranks that
    have it, in order. receivers: ranks that need it and do not have it, in order of the target mesh.
    """

    tensor: int
    region: Region
    nbytes: int
    owners: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A rank has a box that it needs, and copies it from its source tensor into its target tensor."""

    tensor: int
    region: Region
    rank: int


def needs_of(tensors: Sequence[Tensor]) -> tuple[list[UnitTask], list[Copy]]:
    """What must move so that each tensor comes to its target, and what is there. Raises UsageError for a
    Partial source, a shape that is none, or a placement that does not fit the shape."""
    tasks: list[UnitTask] = []
    copies: list[Copy] = []
    for index, tensor in enumerate(tensors):
        _check(tensor)
        nothing = tensor.targets[0].zero_ranks()
        kept = [_tiles(tensor.source, tensor.shape)]
        needed = [_tiles(target, tensor.shape, leave_out=nothing) for target in tensor.targets]
        for tile, needers in _needed(needed):
            for region, owners in _pieces(tile, kept):
                nbytes = region_count(region) * tensor.itemsize_bytes
                copies += [Copy(index, region, rank) for rank in needers if rank in owners]
                receivers = tuple(rank for rank in needers if rank not in owners)
                if receivers:
                    tasks.append(UnitTask(index, region, nbytes, tuple(sorted(owners)), receivers))
    return tasks, copies


def _needed(targets: Sequence[dict[Region, list[int]]]) -> Iterator[tuple[Region, list[int]]]:
    """The boxes of the first target, cut where any other cuts them: each with all ranks that need it."""
    first, *others = targets
    for tile, ranks in first.items():
        if not others:
            yield tile, ranks
            continue
        for region, more in _pieces(tile, others):
            yield region, [*ranks, *(rank for rank in more if rank not in ranks)]


def _pieces(tile: Region, resident: Sequence[dict[Region, list[int]]]) -> Iterator[tuple[Region, list[int]]]:
    """Cut a box where any layout cuts it: each piece with the ranks of all that have it.

    The boxes of one layout are equal or apart, so one layout alone cuts the tile into its own boxes. Several
    lie across one another: the tile is cut at every edge of any.
    """
    over = [
        [(box, ranks) for box, ranks in tiles.items() if intersect(box, tile) is not None]
        for tiles in resident
    ]
    if len(over) == 1:
        for box, ranks in over[0]:
            shared = intersect(box, tile)
            assert shared is not None
            yield shared, ranks
        return
    cuts = [
        sorted({edge for boxes in over for box, _ in boxes for edge in _within(box[dim], tile[dim])})
        for dim in range(len(tile))
    ]
    for region in product(*(pairwise(edges) for edges in cuts)):
        overlapping = [ranks for boxes in over for box, ranks in boxes if intersect(box, region) is not None]
        yield region, list(dict.fromkeys(rank for ranks in overlapping for rank in ranks))


def _within(ends: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
    return max(ends[0], limits[0]), min(ends[1], limits[1])


def _tiles(
    layout: Layout, shape: tuple[int, ...], leave_out: tuple[int, ...] = ()
) -> dict[Region, list[int]]:
    """Distinct boxes of a layout that are not empty, each with its ranks in order of the mesh."""
    result: dict[Region, list[int]] = defaultdict(list)
    for rank, region in layout.regions(shape).items():
        if region_count(region) and rank not in leave_out:
            result[region].append(rank)
    return result


def _check(tensor: Tensor) -> None:
    if tensor.itemsize_bytes < 1:
        raise UsageError(f"itemsize_bytes={tensor.itemsize_bytes}: give the bytes of one element, 1 or more")
    if any(size < 0 for size in tensor.shape):
        raise UsageError(f"shape {tensor.shape}: a size is below 0")
    if not tensor.targets:
        raise UsageError(f"tensor of shape {tensor.shape}: no target layout; give the layout that it goes to")
    if len(tensor.targets) > 1 and any(target.partial_axes for target in tensor.targets):
        raise UsageError(
            f"tensor of shape {tensor.shape}: of its targets {', '.join(map(str, tensor.targets))} one is "
            "Partial, and its ranks have terms, not the value; plan that target as a tensor of its own"
        )
    if tensor.source.partial_axes:
        raise UsageError(
            f"tensor of shape {tensor.shape}: its source {tensor.source} is not reduced yet; reduce it "
            f"within its mesh first, for example to {tensor.source.reduced(tensor.shape).placements}"
        )


Mode: TypeAlias = Literal["broadcast", "point_to_point"]

MODES: tuple[Mode, ...] = get_args(Mode)


def by_host(ranks: Iterable[int], hosts: Hosts) -> list[tuple[int, ...]]:
    """The ranks of each host, in the order given."""
    result: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        result[hosts[rank]].append(rank)
    return [tuple(ranks) for ranks in result.values()]


def sends_of(
    tasks: Sequence[UnitTask], hosts: Hosts, mode: Mode, parts: int = 1, least_bytes: int = 1
) -> list[UnitTask]:
    """What a mode sends for these tasks: of each, an owner to a chain of receivers. parts: cut each box that
    goes between hosts into so many, as far as no part has fewer than least_bytes.

    Raises UsageError for a mode that there is not.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known; use one of {', '.join(MODES)}")
    sends: list[UnitTask] = []
    for task in tasks:
        near = {hosts[ranks[0]]: ranks for ranks in by_host(task.owners, hosts)}
        far: list[int] = []
        for ranks in by_host(task.receivers, hosts):
            if hosts[ranks[0]] in near:
                local = replace(task, owners=near[hosts[ranks[0]]], receivers=ranks)
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
    # divided evenly, the larger first: no part is more than one row longer than another
    edges = [start + -(-size * i // parts) for i in range(parts + 1)]
    for ends in pairwise(edges):
        region = (*task.region[:dim], ends, *task.region[dim + 1 :])
        yield replace(task, region=region, nbytes=region_count(region) * itemsize_bytes)
