"""How long a collective takes on a fabric: rings, trees, reductions in the switch, direct exchange.

Terms. A fabric: links within a node and network cards between nodes. `nbytes` is the full tensor: what is
reduced (all_reduce), the gathered result (all_gather), the input (reduce_scatter, broadcast, send), one
rank's input (all_to_all). Bus rate: what a link carries; a ring of n moves (n-1)/n of the tensor over every
link, and twice that to reduce and gather.

    1. An algorithm says how many steps its longest chain has within nodes and between them, and how many
       bytes its busiest link carries.
    2. A protocol says what the start, a step within a node and a step between nodes take, and which part
       of the bus rate it reaches. Libraries have one for few bytes (flags beside the data, no barrier) and
       one for many (large pieces). 1 and 2 give a straight line, latency + bytes / rate.
    3. The library takes the fastest, so the time is the lowest of the lines, as a `Curve`.

The form follows NCCL's own tuning model (latency by algorithm, protocol and hop; bus rate by protocol) and
Thakur et al. 2005 (IJHPCA 19) for the step counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.errors import UsageError
from stretto.ir.collectives import KINDS, Kind
from stretto.ir.curve import Curve

Topology = Literal["switch", "mesh", "cube-mesh"]
"""How the devices of a node are joined: every device reaches every other at its full rate (NVSwitch); by a
link of its own for each pair, so that two alone have one link's rate (MI300X, 910B); some pairs only, so that
rings of a group exist or not by its size (V100)."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links of a cluster of equal nodes. Rates are one direction's, in bytes per microsecond.

    node_devices: devices that the fast links join; device_bytes_per_us: all fast links of a device
    together; peer_bytes_per_us: one device to one other; nic_bytes_per_us: a device's share of its node's
    network cards; link_efficiency, nic_efficiency: what a collective library reaches of these;
    in_switch: bus rate of a reduction in the switch over `device_bytes_per_us`, 0 where there is none;
    ring_bytes_per_us: (devices of a node, bus rate that they were measured to reach), for topologies that no
    formula shows.
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
        if self.topology == "mesh":
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
    """Where the members of a communicator lie: `per_node` of them on each of `nodes` nodes. node_groups:
    groups of the same axis that a node carries; each has its own members' share of the network cards."""

    per_node: int
    nodes: int
    node_groups: int = 1

    @property
    def size(self) -> int:
        return self.per_node * self.nodes


def axis_group(mesh: Mapping[str, int], axis: str, node_devices: int) -> Group:
    """Where a group of `axis` lies when ranks fill nodes in order. mesh: axis sizes, outermost first. The
    members of a group are an inner stride s apart, so a node of d devices has d/s of them, and s groups
    side by side. Groups that would straddle nodes unevenly (3 ranks on nodes of 8) are taken as on smaller
    nodes that they fill evenly. Raises UsageError for an axis that the mesh does not have."""
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


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a library's way of sending takes.

    start_us: once; ring_step_us: a step of a ring within a node; tree_step_us: a step of a chain of a tree
    within a node, whose pieces are smaller; node_step_us: a step between nodes; rate: part of the bus rate.
    """

    start_us: float
    ring_step_us: float
    tree_step_us: float
    node_step_us: float
    rate: float


PROTOCOLS = (
    Protocol(4.9, 1.87, 0.4, 12.5, 0.06),
    Protocol(44.0, 1.5, 0.1, 16.0, 1.0),
)
"""Few bytes, many bytes. Fitted on the all-reduce sweeps of 2 to 128 A100 that NetX-lab/Echo and vTrain
publish (NCCL's own tables have steps of 0.6 to 20 us for the same). Assumed of other devices."""


SWITCH_MEMBERS = 4
"""Members of a node from which a reduction in the switch is used: below, a ring moves as little. Assumed."""


@dataclass(frozen=True, slots=True)
class _Route:
    """Step 1: an algorithm on a group. `moved` is the busiest link's part of the tensor."""

    ring_steps: float
    tree_steps: float
    node_steps: float
    moved: float
    bytes_per_us: float


@functools.lru_cache(maxsize=4096)
def collective_curve(kind: str, group: Group, fabric: Fabric) -> Curve:
    """Microseconds over bytes of a collective that has its links for itself, as a plan carries it. A group of
    one takes no time; otherwise the time is positive and grows with the bytes."""
    if group.size == 1:
        return Curve(((0.0, 0.0),))
    return Curve.lowest(
        (
            protocol.start_us
            + route.ring_steps * protocol.ring_step_us
            + route.tree_steps * protocol.tree_step_us
            + route.node_steps * protocol.node_step_us,
            route.moved / (route.bytes_per_us * protocol.rate),
        )
        for route in _routes(KINDS[kind], group, fabric)
        for protocol in PROTOCOLS
    )


def _cards(group: Group, fabric: Fabric) -> float:
    return fabric.nic_bytes_per_us * fabric.nic_efficiency * group.per_node


def _routes(kind: Kind, group: Group, fabric: Fabric) -> list[_Route]:
    n, k, m = group.size, group.per_node, group.nodes
    # Of a ring through all members: the slower of the links in a node and of the network cards of the members
    # there (those of others serve the groups of others).
    bus = fabric.bus_bytes_per_us(k) if k > 1 else math.inf
    bus = bus if m == 1 else min(bus, _cards(group, fabric))
    direct = fabric.topology == "mesh"
    if kind.route == "pair":
        rate = fabric.pair_bytes_per_us() if m == 1 else fabric.nic_bytes_per_us * fabric.nic_efficiency
        return [_Route(1.0 if m == 1 else 0.0, 0.0, 0.0 if m == 1 else 1.0, 1.0, rate)]
    # Once around: a ring passes every member; devices that are all joined exchange in one step. Between
    # nodes, a ring crosses m - 1 times and a tree is log2(m) deep.
    around = (1.0 if direct else k - 1.0) if k > 1 else 0.0
    if kind.route == "direct":
        within = (k - 1) / (n * fabric.bus_bytes_per_us(k)) if k > 1 else 0.0
        if direct and k > 1:
            within = 1.0 / (n * fabric.pair_bytes_per_us())  # one slice on each of its links at once
        between = (m - 1) / (m * bus / k) if m > 1 else 0.0
        return [_Route(around, 0.0, m - 1.0, within + between, 1.0)]
    depth = math.log2(m)
    part = (n - 1) / n
    if kind.route == "chain":
        # A pipeline through all members; on links of their own, pieces to all that all pass on.
        routes = [_Route(around, 0.0, m - 1.0, 1.0, bus), _Route(0.0, around, depth, 1.0, bus)]
        if direct and m == 1:
            routes = [_Route(1.0, 0.0, 0.0, 1.0, fabric.pair_bytes_per_us())]
            routes.append(_Route(2.0, 0.0, 0.0, 2.0 * (k - 1) / k, bus))
        return routes
    turns = float(kind.turns)
    back = kind.turns == 2  # what was reduced is sent back
    routes = [_Route(turns * around, 0.0, turns * (m - 1.0), turns * part, bus)]
    if m > 1:
        # To reduce and send back, a double binary tree moves the full tensor each way; to gather or
        # scatter, halving over log2(m) levels moves what a ring does (Sanders et al. 2009; Thakur).
        moved = 2.0 if back else part
        routes.append(_Route(0.0, turns * around, turns * depth, moved, bus))
    if fabric.in_switch and k >= SWITCH_MEMBERS:
        if back:
            # The switch adds, so a device sends its tensor once; between nodes each sends its own part. Both
            # go on at the same time.
            switch = 2.0 * (k - 1) / (k * fabric.device_bytes_per_us * fabric.in_switch)
            between = 2.0 * (m - 1) / (m * _cards(group, fabric))
            routes.append(_Route(0.0, 2.0, 2.0 * depth, max(switch, between), 1.0))
        else:
            routes.append(_Route(0.0, 1.0, depth, part, bus))
    return routes
