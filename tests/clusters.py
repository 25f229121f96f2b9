"""Descriptions to plan for in tests: processor cores, whose compute is slow, joined by a local network."""

from __future__ import annotations

from typing import Any

from stretto.price.cluster import Cluster

CORES = {
    "peak_tflops": 0.08,
    "memory_gbps": 10.0,
    "op_overhead_us": 3.0,
    "latency_us": 100.0,
    "link_gbps": 1.0,
}
"""One core of a server processor (AVX-512, 2.6 GHz, measured) and, assumed, its local network."""


def cores(**figures: Any) -> Cluster:
    """The cluster with other figures."""
    return Cluster(**{**CORES, **figures})


def cores_file(**figures: float) -> str:
    """The text of its file, with other figures."""
    return "".join(f"{name} = {value}\n" for name, value in {**CORES, **figures}.items())
