"""Hosts: which rank stands where, and what the links carry. The only thing resharding knows of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
