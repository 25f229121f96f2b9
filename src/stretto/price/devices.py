"""The catalogue of accelerators: what their sheets say and what was measured of them, each with its source.

The figures are in `data/devices.toml`, which is part of the package; this room reads it and turns it into
what the cost models take. Touches nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from stretto.errors import UsageError, meant
from stretto.price.efficiency import Efficiency, Roof
from stretto.price.fabric import Fabric, Topology

GB_PER_S = 1000.0
"""Bytes per microsecond of one GB/s."""

STATUSES = ("read", "measured", "fitted", "inferred", "recalled", "assumed")
"""How a figure is known, from the source itself down to a guess."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and where it is from. status: one of `STATUSES`."""

    value: Any
    status: str
    source: str

    def __str__(self) -> str:
        return f"{self.status}: {self.source}"


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator and the node that it comes in. figures: by the names of `data/devices.toml`."""

    key: str
    name: str
    figures: Mapping[str, Figure]

    def number(self, field: str) -> float:
        return float(self.figures[field].value)

    @property
    def node_devices(self) -> int:
        """Devices that the fast links join."""
        return int(self.figures["node_devices"].value)

    @property
    def memory_bytes(self) -> int:
        return int(self.number("memory_gb") * 1e9)

    @property
    def topology(self) -> Topology:
        return Topology(self.figures["topology"].value)

    @property
    def slowdown(self) -> float:
        """Part of the compute's speed that is lost while a collective is in flight."""
        return self.number("slowdown")

    def roof(self) -> Roof:
        """The device as ops see it."""
        names = (
            *("matmul", "k_ramp", "memory", "kernel_us", "launch_us", "unaligned", "grouped"),
            *("flash", "efficient", "cudnn"),
        )
        return Roof(
            flops_per_us=self.number("peak_tflops") * 1e6,
            memory_bytes_per_us=self.number("memory_tbps") * 1e6,
            cores=int(self.number("cores")),
            efficiency=Efficiency(**{name: self.number(name) for name in names}),
        )

    def fabric(self) -> Fabric:
        """The device's links as collectives see them."""
        rings = self.figures.get("ring_gbps")
        return Fabric(
            node_devices=self.node_devices,
            topology=self.topology,
            device_bytes_per_us=self.number("link_gbps") * GB_PER_S,
            peer_bytes_per_us=self.number("peer_gbps") * GB_PER_S,
            nic_bytes_per_us=self.number("nic_gbit") / 8 * GB_PER_S,
            link_efficiency=self.number("link_efficiency"),
            nic_efficiency=self.number("nic_efficiency"),
            in_switch=self.number("in_switch"),
            ring_bytes_per_us=tuple(
                (size, rate * GB_PER_S) for size, rate in enumerate(rings.value if rings else (), start=2)
            ),
        )


@cache
def devices() -> Mapping[str, Device]:
    """All devices of the catalogue by key, in its order."""
    text = resources.files("stretto.price").joinpath("data/devices.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    sources: dict[str, str] = tables.pop("sources")
    result: dict[str, Device] = {}
    for key, table in tables.items():
        figures: dict[str, Figure] = {}
        like = table.pop("like", None)
        if like is not None:
            # What holds for every device of a sheet is not on the sheet of another: it is assumed of it.
            for field, figure in result[like].figures.items():
                if field not in ("fp8_tflops", "ring_gbps"):
                    figures[field] = Figure(figure.value, "assumed", f"as {like} ({figure})")
        name = table.pop("name")
        for field, (value, said) in table.items():
            status, source = said.split(" ", 1)
            if status not in STATUSES:
                raise AssertionError(f"{key}.{field}: status {status!r}")
            figures[field] = Figure(value, status, sources[source])
        result[key] = Device(key, name, figures)
    return result


def device(key: str) -> Device:
    """A device of the catalogue. Raises UsageError that lists the known ones."""
    known = devices()
    if key not in known:
        raise UsageError(f"unknown device {key!r}: {meant(key, known)}known are {', '.join(known)}")
    return known[key]
