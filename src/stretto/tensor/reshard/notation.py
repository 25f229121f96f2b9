"""Layouts in short: `2x4:S0RR` is a tensor of three dims on two hosts of four devices.

The letters are one for each DIM of the tensor: S0 is cut over mesh axis 0 (the hosts), S1 over axis 1 (the
devices of a host), S01 over both, R whole. (The notation of Zhuang et al., MLSys 2023.) PyTorch's
placements are the other way round: one for each AXIS of the mesh.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
from stretto.ir.limits import MOST_RESHARDED
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.hosts import Hosts

WRITTEN = re.compile(r"([0-9]{1,12})x([0-9]{1,12}):((?:R|S[01]+)*)")
HELP = "write HOSTSxDEVICES:LETTERS with R, S0, S1 or S01 for each dim, such as 2x4:S0RR"


@dataclass(frozen=True, slots=True)
class Written:
    """A mesh of hosts x devices, and the placement of each of its two axes. dims: how many the tensor has."""

    hosts: int
    devices: int
    placements: tuple[Placement, Placement]
    dims: int

    def layout(self, first_rank: int) -> Layout:
        """The layout on ranks counted from a first one, host by host."""
        rows = range(first_rank, first_rank + self.hosts * self.devices, self.devices)
        return Layout(tuple(tuple(range(row, row + self.devices)) for row in rows), self.placements)


def read(text: str) -> Written:
    """A mesh and layout as written. Raises UsageError if it is not in this notation."""
    match = WRITTEN.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no mesh and layout; {HELP}")
    hosts, devices = int(match[1]), int(match[2])
    if not hosts or not devices:
        raise UsageError(f"{text!r}: a mesh needs at least one host of one device")
    if hosts * devices > MOST_RESHARDED:
        raise UsageError(
            f"{text!r}: {hosts * devices:,} devices are more than {MOST_RESHARDED:,}, whose boxes are all "
            "listed; give a mesh of fewer"
        )
    letters = re.findall(r"R|S[01]+", match[3])
    placements: list[Placement] = [Replicate(), Replicate()]
    for dim, letter in enumerate(letters):
        for axis in map(int, letter[1:]):
            if isinstance(placements[axis], Shard):
                raise UsageError(f"{text!r}: axis {axis} cuts twice; an axis of the mesh cuts one dim, once")
            placements[axis] = Shard(dim)
        if letter == "S10":
            raise UsageError(f"{text!r}: axes cut a dim from left to right, as in PyTorch; write S01")
    return Written(hosts, devices, (placements[0], placements[1]), len(letters))


def between_meshes(source: str, target: str, hosts: Hosts | None = None) -> tuple[Layout, Layout, Hosts]:
    """The layouts that two texts say, the target's mesh on hosts and ranks after the source's.

    hosts: whose rates are taken; where ranks stand follows from the texts.
    """
    before, after = read(source), read(target)
    count = before.hosts * before.devices
    placed = [host for host in range(before.hosts) for _ in range(before.devices)]
    placed += [before.hosts + host for host in range(after.hosts) for _ in range(after.devices)]
    rates = hosts or Hosts(())
    at = Hosts(tuple(placed), rates.link_bytes_per_s, rates.latency_us)
    return before.layout(0), after.layout(count), at
