"""What joins the devices: links within a node, network cards between nodes, and who sits where.

A fabric is facts of a cluster; how long a collective takes on it is for `stretto.price.collectives`. Reads
and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stretto.errors import UsageError


class Topology(StrEnum):
    """How the devices of a node are joined."""

    SWITCH = "switch"
    """Every device reaches every other at its full rate (NVSwitch)."""
    MESH = "mesh"
    """A link of its own for each pair: two devices alone have one link's rate (MI300X, 910B)."""
    CUBE_MESH = "cube-mesh"
    """Links between some pairs only; rings of a group exist or not by its size (V100)."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links of a cluster of equal nodes. Rates are one direction's, in bytes per microsecond.

    node_devices: devices that the fast links join; device_bytes_per_us: all fast links of a device
    together; peer_bytes_per_us: one device to one other; nic_bytes_per_us: a device's share of its node's
    network cards; link_efficiency, nic_efficiency: what a collective library reaches of these;
    in_switch: bus rate of a reduction in the switch over `device_bytes_per_us`, 0 where there is none;
    ring_bytes_per_us: (devices of a node, bus rate that they were measured to reach), for topologies that no
    formula tells.
    """

    node_devices: int
    topology: Topology
    device_bytes_per_us: float
    peer_bytes_per_us: float
    nic_bytes_per_us: float
    link_efficiency: float
    nic_efficiency: float
    in_switch: float = 0.0
    ring_bytes_per_us: tuple[tuple[int, float], ...] = ()

    def bus_bytes_per_us(self, size: int) -> float:
        """Bus rate of a ring (switch) or a direct exchange (mesh) of `size` devices of one node."""
        if self.topology is Topology.MESH:
            return self.peer_bytes_per_us * (size - 1) * self.link_efficiency
        for known, rate in sorted(self.ring_bytes_per_us):
            if known >= size:
                return rate
        return self.device_bytes_per_us * self.link_efficiency

    def pair_bytes_per_us(self) -> float:
        """Rate between two devices of one node."""
        return self.peer_bytes_per_us * self.link_efficiency


@dataclass(frozen=True, slots=True)
class Group:
    """Where the members of a communicator lie: `per_node` of them on each of `nodes` nodes.

    node_groups: groups of the same axis that a node carries. They use its network cards at the same time, so
    each has the share of its own members.
    """

    per_node: int
    nodes: int
    node_groups: int = 1

    def __post_init__(self) -> None:
        if min(self.per_node, self.nodes, self.node_groups) < 1:
            raise ValueError(f"{self}: expected 1 or more everywhere")

    @property
    def size(self) -> int:
        return self.per_node * self.nodes

    @property
    def is_dense(self) -> bool:
        """One group fills its nodes or lies within one: what a benchmark of so many devices measures."""
        return self.nodes == 1 or self.node_groups == 1


def axis_group(mesh: Mapping[str, int], axis: str, node_devices: int) -> Group:
    """Where a group of `axis` lies when ranks fill nodes in order.

    mesh: axis sizes from the outermost to the innermost, as in `DeviceMesh`; the innermost axis (tp) has
    neighbouring ranks. With an inner stride s, the members of a group are s ranks apart, so a node of d
    devices holds d/s of them, and s groups side by side.

    Where groups would straddle nodes unevenly (3 ranks on nodes of 8), the layout is taken at its worst: as
    on smaller nodes that they do fill evenly.

    Raises UsageError for an axis that the mesh does not have.
    """
    if axis not in mesh:
        raise UsageError(f"the mesh has no axis {axis!r}; it has {', '.join(mesh)}")
    names = list(mesh)
    stride = math.prod(mesh[name] for name in names[names.index(axis) + 1 :])
    size = mesh[axis]
    here = min(node_devices, math.prod(mesh.values()))
    block = math.gcd(here, stride * size)
    if block == stride * size:
        per_node = size
    elif block % stride == 0:
        per_node = block // stride
    else:
        per_node = 1
    return Group(per_node, size // per_node, max(1, here // per_node))
