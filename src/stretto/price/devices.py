"""The catalogue of accelerators: figures, each with its source, and the peak rates by which MFU is counted.

The figures are in `data/devices.toml`, which is part of the package. A job's peak is that of its arithmetic
by dtype: the time that all its FLOPs take at the sheet's rates. Processors have no sheets, and their steps
no MFU.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from stretto.errors import UsageError, meant
from stretto.ir.costs import Peak
from stretto.ir.program import Job, Op
from stretto.price.collectives import Fabric
from stretto.price.efficiency import Efficiency, Roof

GB_PER_S = 1000.0
"""Bytes per microsecond of one GB/s."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and where it is from. status: how it is known, from the source itself down
    to a guess: read, measured, fitted, inferred, recalled, assumed."""

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

    def roof(self) -> Roof:
        """The device as ops see it."""
        return Roof(
            flops_per_us=self.number("peak_tflops") * 1e6,
            memory_bytes_per_us=self.number("memory_tbps") * 1e6,
            cores=int(self.number("cores")),
            efficiency=Efficiency(**{one.name: self.number(one.name) for one in fields(Efficiency)}),
        )

    def fabric(self) -> Fabric:
        """The device's links as collectives see them."""
        rings = self.figures.get("ring_gbps")
        return Fabric(
            node_devices=self.node_devices,
            topology=self.figures["topology"].value,
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
            # What is true for every device of a sheet is not on the sheet of another: it is assumed of it.
            for field, figure in result[like].figures.items():
                if field not in ("fp8_tflops", "ring_gbps"):
                    figures[field] = Figure(figure.value, "assumed", f"as {like} ({figure})")
        name = table.pop("name")
        for field, (value, said) in table.items():
            status, source = said.split(" ", 1)
            figures[field] = Figure(value, status, sources[source])
        result[key] = Device(key, name, figures)
    return result


def device(key: str) -> Device:
    """A device of the catalogue. Raises UsageError that lists the known ones."""
    known = devices()
    if key not in known:
        raise UsageError(f"unknown device {key!r}: {meant(key, known)}known are {', '.join(known)}")
    return known[key]


FP32_PART = 1 / 16
"""Rate of products in float32 over that in half precision: 19.5 of 312 TFLOP/s on the A100's sheet; assumed
of other devices. PyTorch uses no TF32 unless it is set to."""

CALLED = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "AMD Instinct MI300X": "mi300x",
}
"""What a device calls itself (`torch.cuda.get_device_name`) -> its key in the catalogue. Names are
recalled. Other forms, as an H100 on PCIe, have other peaks, and are not here."""


def named_peak(job: Job, name: str) -> Peak | None:
    """The job's peak on the device that calls itself so; None where the catalogue has no such device."""
    key = CALLED.get(name)
    return None if key is None else device_peak(job, devices()[key])


def device_peak(job: Job, device: Device) -> Peak:
    """The job's peak on a device of the catalogue."""
    half_flops_per_us = device.number("peak_tflops") * 1e6
    source = f"{device.name}, {device.figures['peak_tflops']}"
    return job_peak(job, lambda dtype: half_flops_per_us * rate_part(dtype), source)


def job_peak(job: Job, flops_per_us: Callable[[str], float], source: str) -> Peak:
    """The job's peak where ops of a dtype have these rates. source: of the rates."""
    flops = time_us = 0.0
    for _, op in job.all_ops:
        flops += op.flops
        time_us += op.flops / flops_per_us(op_dtype(op))
    return Peak(flops / time_us if time_us else flops_per_us("bfloat16"), source)


def op_dtype(op: Op) -> str:
    """The dtype that an op computes with."""
    return next((spec.dtype for spec in op.outputs if spec is not None), "bfloat16")


def rate_part(dtype: str) -> float:
    """The rate of a dtype over that of half precision."""
    return FP32_PART if dtype in ("float32", "float64") else 1.0
