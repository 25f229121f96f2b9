"""A cluster of equal devices joined by equal links, and what a job costs on it: a roofline, rings.

    op          overhead + the longer of arithmetic at the device's rate and traffic at its memory's
    message     latency + what each takes + bytes / rate
    collective  `stretto.price.roofline.ring_cost`

Reads a description, touches no device.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stretto.files.codec import MOST
from stretto.files.settings_file import NamedArguments
from stretto.ir.costs import LEAST_RATE, Costs, Link, Peak
from stretto.ir.prices import Priced, Pricer, Specs, price_list, traffic_bytes
from stretto.ir.program import Job, Op
from stretto.price.peak import job_peak, op_dtype
from stretto.price.roofline import ACTION_US, FREE, ring_cost
from stretto.price.wanted import wanted_collectives

Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST)]

PER_US = {"TFLOP/s": 1e6, "GB/s": 1e3}
"""A rate in its unit -> operations or bytes in a microsecond."""


class Cluster(NamedArguments):
    """Equal devices joined by equal links, to plan for machines that are not at hand. A plan's
    `costs.source` names the fields that were left at their defaults.

    Raises UsageError that names the argument and what is allowed.
    """

    peak_tflops: Rate | dict[str, Rate]
    """Peak arithmetic of a device in TFLOP/s: one number, or one for each dtype as PyTorch calls it
    ({"bfloat16": 989, "float32": 67}). Ops of other dtypes have the lowest of them."""
    memory_gbps: Rate
    """Rate of a device's memory (HBM) in GB/s."""
    link_gbps: Rate
    """Rate of a link in GB/s, one direction: 50 is 400 Gbit/s."""
    latency_us: float = Field(default=10.0, ge=0, le=MOST)
    """Microseconds from the start of a send to the first byte at the receiver; assumed."""
    op_overhead_us: float = Field(default=3.0, ge=0, le=MOST)
    """Microseconds of an op before it does anything: the dispatcher, a kernel's launch; assumed."""
    processor_us_per_mb: float = Field(default=0.0, ge=0, le=MOST)
    """Microseconds of compute that each end of a message loses, for each 10**6 bytes."""
    message_us: float = Field(default=0.0, ge=0, le=MOST)
    """Microseconds that each message keeps its link for before its bytes; 18 for Gloo on one machine."""
    memory_bytes: int | None = Field(default=None, gt=0, le=2**62)
    """Memory of a device in bytes. A plan that needs more is refused; None sets no limit."""

    def flops_per_us(self, dtype: str) -> float:
        """Peak arithmetic with values of a dtype."""
        peaks = self.peak_tflops
        peak = peaks.get(dtype, min(peaks.values())) if isinstance(peaks, dict) else peaks
        return peak * PER_US["TFLOP/s"]

    @property
    def link_bytes_per_us(self) -> float:
        """Payload of a link in a microsecond."""
        return self.link_gbps * PER_US["GB/s"]


class FlatPricer(Pricer):
    """Prices ops on one of a cluster's devices."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def price(self, op: Op, specs: Specs) -> Priced:
        """As `Pricer.price`."""
        cluster = self._cluster
        if op.target in FREE:
            return Priced(0.0)
        if op.alias is not None:
            return Priced(cluster.op_overhead_us)
        moved_us = traffic_bytes(op, specs) / (cluster.memory_gbps * PER_US["GB/s"])
        return Priced(cluster.op_overhead_us + max(op.flops / cluster.flops_per_us(op_dtype(op)), moved_us))


def flat_link(cluster: Cluster) -> Link:
    """What a message costs; its source names the fields that were left at defaults."""
    assumed = sorted(type(cluster).model_fields.keys() - cluster.model_fields_set - {"memory_bytes"})
    source = "roofline of the description" + (f"; assumed: {', '.join(assumed)}" if assumed else "")
    return Link(
        *(cluster.latency_us, cluster.link_bytes_per_us, cluster.processor_us_per_mb, source),
        start_us=cluster.message_us,
    )


def described_costs(job: Job, cluster: Cluster) -> Costs:
    """The costs of a job on a flat description; `source` names the fields that were left at defaults."""
    link = flat_link(cluster)
    source = link.source
    collectives = {
        (wanted.axis, wanted.kind): ring_cost(link, wanted.kind, job.size(wanted.axis))
        for wanted in wanted_collectives(job)
    }
    axes = tuple(dict.fromkeys(axis for axis, _ in collectives))
    op_us = {key: priced.us for key, priced in price_list(job, FlatPricer(cluster)).items()}
    # All links of a flat description are one network, which pipeline messages use as well.
    peak_source = "peak_tflops of the description"
    if isinstance(cluster.peak_tflops, dict):
        peak = job_peak(job, cluster.flops_per_us, peak_source)
    else:
        peak = Peak(cluster.flops_per_us("any"), peak_source)
    return Costs(op_us, {}, link, ACTION_US, source, collectives, axes, peak=peak)
