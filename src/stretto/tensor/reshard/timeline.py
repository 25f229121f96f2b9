"""When transfers run on the links of hosts.

`Hosts` gives the host of each rank and what links carry: all that resharding knows of a cluster. A host's
link sends one thing at a time and receives one thing at a time.

Transfers are taken in the order of a list. Each starts as soon as every link that it uses is free of those
before it in the list. Along a chain the pieces of a box follow one another: the next
link starts when the first piece has arrived, so that a chain over m hosts takes the time of one link and a
piece's time for each further one (Zhuang et al., MLSys 2023). Within a host, sending and receiving take no
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stretto.errors import UsageError

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
