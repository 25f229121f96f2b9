"""Clusters of accelerators, by name or from a file: what ops, messages and collectives cost on them.

A name is a device of the catalogue and a count, `h100x1024`. A file is a few lines of TOML (`ClusterFile`).
Reads such a file and those that it names; touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import tomlkit
from pydantic import BaseModel, ConfigDict, Field

from stretto.errors import UsageError, meant
from stretto.files.codec import MOST
from stretto.files.settings_file import read_settings
from stretto.files.whole_file import saving, write_file
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import SEND
from stretto.ir.costs import LEAST_RATE, CollectiveCost, Link
from stretto.ir.curve import Curve
from stretto.ir.limits import MOST_RANKS
from stretto.price.collectives import PROTOCOLS, Fabric, Group, axis_group, collective_curve
from stretto.price.devices import Device, Figure, device, devices
from stretto.price.efficiency import Roof
from stretto.price.nccl_tests import read_nccl_tests

Positive = Annotated[float, Field(ge=LEAST_RATE, le=MOST)]
Part = Annotated[float, Field(ge=LEAST_RATE, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Figures(_Strict):
    """Figures that differ from the catalogue's, in its units."""

    peak_tflops: Positive | None = None
    """Half precision, dense."""
    memory_gb: Positive | None = None
    """Memory of a device."""
    memory_tbps: Positive | None = None
    """Rate of that memory, TB/s."""
    cores: Annotated[int, Field(gt=0, le=MOST_RANKS)] | None = None
    """Multiprocessors, compute units."""
    link_gbps: Positive | None = None
    """All fast links of a device, one direction, GB/s."""
    peer_gbps: Positive | None = None
    """From one device to one other of its node, GB/s."""
    nic_gbit: Positive | None = None
    """A device's share of its node's network cards, Gbit/s."""
    link_efficiency: Part | None = None
    """Part of the links' rate that collectives reach."""
    nic_efficiency: Part | None = None
    """Part of the network cards' rate that collectives reach."""
    in_switch: Annotated[float, Field(ge=0, le=MOST)] | None = None
    """Bus rate of a reduction in the switch over `link_gbps`; 0 where there is none."""
    matmul: Part | None = None
    """Part of the peak that a large matmul reaches."""
    memory: Part | None = None
    """Part of the memory's rate that streaming kernels reach."""
    k_ramp: Annotated[float, Field(ge=0, le=MOST)] | None = None
    """Depth at which a matmul tile's prologue takes as long as its loop."""
    kernel_us: Annotated[float, Field(ge=0, le=MOST)] | None = None
    """Shortest time of a kernel."""
    launch_us: Annotated[float, Field(ge=0, le=MOST)] | None = None
    """Time of the host for one op."""
    unaligned: Part | None = None
    """What is left of `matmul` where a dim is no multiple of 8."""
    grouped: Part | None = None
    """What is left of `matmul` for one kernel of products of groups of rows."""
    flash: Part | None = None
    """Part of a product's rate that flash attention reaches in half precision."""
    efficient: Part | None = None
    """The same of the memory-efficient kernel, which takes masks."""
    cudnn: Part | None = None
    """The same of cuDNN's attention."""
    slowdown: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Part of the compute's speed that is lost while a collective is in flight."""


class MeasuredFiles(_Strict):
    """What was measured on the cluster itself."""

    nccl_tests: list[str] = []
    """Outputs of nccl-tests, text or JSON; paths are beside the cluster file."""


class ClusterFile(_Strict):
    """The text form of a cluster."""

    device: str
    """A device of the catalogue; `stretto cluster list` shows them."""
    count: Annotated[int, Field(gt=0, le=MOST_RANKS)]
    """Devices in all."""
    node_devices: Annotated[int, Field(gt=0, le=MOST_RANKS)] | None = None
    """Devices that the fast links of a node join; the catalogue's by default."""
    figures: Figures = Figures()
    """What differs from the catalogue."""
    measured: MeasuredFiles = MeasuredFiles()
    """Calibration."""


@dataclass(frozen=True)
class Hardware:
    """Equal accelerators in equal nodes, and what things cost on them. measured: collectives as benchmarks
    gave them, by (kind, group size); `text` is what a file says of it."""

    name: str
    device: Device
    count: int
    measured: Mapping[tuple[str, int], Curve]
    text: ClusterFile

    @cached_property
    def roof(self) -> Roof:
        return self.device.roof()

    @cached_property
    def fabric(self) -> Fabric:
        return self.device.fabric()

    @property
    def nodes(self) -> int:
        return -(-self.count // self.device.node_devices)

    @property
    def memory_bytes(self) -> int:
        """Memory of a device."""
        return self.device.memory_bytes

    def group(self, mesh: Mapping[str, int], axis: str) -> Group:
        """Where the groups of an axis lie; mesh: axis sizes, outermost first. Raises UsageError."""
        return axis_group(mesh, axis, self.fabric.node_devices)

    def collective(self, kind: str, mesh: Mapping[str, int], axis: str) -> CollectiveCost:
        """What collectives of an axis cost, as a plan carries it. Raises UsageError for an unknown axis."""
        group = self.group(mesh, axis)
        # A benchmark of so many devices measures a group that fills its nodes, or is within one.
        dense = group.nodes == 1 or group.node_groups == 1
        known = self.measured.get((kind, group.size)) if dense else None
        curve = known or collective_curve(kind, group, self.fabric)
        where = f"{group.per_node} on each of {group.nodes} nodes" if group.nodes > 1 else "in one node"
        described = "measured by nccl-tests" if known else f"model of {self.name}"
        return CollectiveCost(curve, 0.0, self.device.number("slowdown"), f"{described}: {axis} {where}")

    def pp_link(self, mesh: Mapping[str, int], sender: int, receiver: int) -> Link:
        """What a message between two pipeline ranks costs; mesh: axis sizes with pp outermost."""
        stride = math.prod(size for axis, size in mesh.items() if axis != PIPELINE)
        return self.link(sender * stride, receiver * stride)

    def link(self, sender: int, receiver: int) -> Link:
        """What a message between two ranks costs; ranks fill nodes in order."""
        same = sender // self.fabric.node_devices == receiver // self.fabric.node_devices
        curve = collective_curve(SEND.name, Group(2, 1) if same else Group(1, 2), self.fabric)
        # A plan's link is one straight line: its latency is that of few bytes, its rate that of many. Each
        # message is a kernel of its own on its lane's stream, which starts when the one before has ended.
        (x0, y0), (x1, y1) = curve.points[-2:]
        where = f"model of {self.name}, {'in a node' if same else 'between nodes'}"
        start_us = min(curve.us(0.0), PROTOCOLS[0].start_us)
        return Link(curve.us(0.0) - start_us, (x1 - x0) / (y1 - y0), 0.0, where, start_us)


def named_cluster(name: str) -> Hardware:
    """A cluster by name, `h100x1024`. Raises UsageError that lists the known devices."""
    device, _, count = (name, "", "") if name in devices() else name.rpartition("x")
    fits = (
        count.isascii()
        and count.isdecimal()
        and int(count[: len(str(MOST_RANKS)) + 1]) in range(1, MOST_RANKS + 1)
    )
    known = device in devices()
    if known and fits:
        return _resolve(name, ClusterFile(device=device, count=int(count)), Path())
    what = f"its count is {count!r:.60}, and must be an integer from 1 to {MOST_RANKS:,}"
    if not known:
        what = f"no device is called {device or name!r}"
    near = "" if known else meant(device or name, (*devices(), "local"))
    raise UsageError(
        f"unknown cluster {name!r:.60}: {what}; {near}a name is <device>x<count>, for example h100x1024; "
        f"known devices are {', '.join(devices())}. For another, write a cluster file"
    )


def load_cluster(path: str | Path) -> Hardware:
    """Read a cluster file. Raises UsageError that names the file, the key and what is expected."""
    path = Path(path)
    text = read_settings(ClusterFile, path)
    try:
        return _resolve(path.stem, text, path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def find_cluster(name_or_path: str) -> Hardware:
    """A cluster by name, or by a file's path (it ends in .toml). Raises UsageError."""
    return load_cluster(name_or_path) if name_or_path.endswith(".toml") else named_cluster(name_or_path)


def save_cluster(hardware: Hardware, path: str | Path) -> None:
    """Write the cluster file that `load_cluster` reads back. Raises StrettoError where it cannot."""
    with saving(path):
        write_file(path, tomlkit.dumps(hardware.text.model_dump(exclude_defaults=True)))


def _resolve(name: str, text: ClusterFile, folder: Path) -> Hardware:
    result = device(text.device)
    given = dict(text.figures)
    if text.node_devices is not None:
        given["node_devices"] = text.node_devices
    figures = dict(result.figures)
    for key, value in given.items():
        if value is not None:
            figures[key] = Figure(value, "read", f"cluster file {name}")
    if {"link_gbps", "peer_gbps", "link_efficiency"} & {k for k, value in given.items() if value is not None}:
        figures.pop("ring_gbps", None)  # it was measured over other links, and would hide what is given
    measured: dict[tuple[str, int], Curve] = {}
    for file in text.measured.nccl_tests:
        measured |= read_nccl_tests(folder / file)
    return Hardware(name, replace(result, figures=figures), text.count, measured, text)
