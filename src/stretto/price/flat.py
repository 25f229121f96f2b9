"""A cluster of equal devices joined by equal links, and what a job costs on it: a roofline, rings.

    op          overhead + the longer of arithmetic at the device's rate and traffic at its memory's
    message     latency + what each takes + bytes / rate
    collective  `stretto.price.roofline.ring_cost`

Reads a description, touches no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.files.form import MOST
from stretto.files.settings_file import refusal
from stretto.ir.costs import LEAST_RATE, Costs, Link, Peak
from stretto.ir.prices import Priced, Pricer, Specs, price_list, traffic_bytes
from stretto.ir.program import Job, Op
from stretto.price.roofline import ACTION_US, FREE, ring_cost
from stretto.price.wanted import wanted_collectives


class Cluster(BaseModel):
    """Equal devices joined by equal links, for plans without the machine at hand.

    The defaults describe one core of a server processor (AVX-512, 2.6 GHz, measured) and, assumed, its local
    network; a plan's `costs.source` names the fields that were left at them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    flops_per_us: float = Field(default=80_000.0, ge=LEAST_RATE, le=MOST)
    """Arithmetic that a device does in a microsecond; 80,000 is 80 GFLOP/s, one processor core."""
    memory_bytes_per_us: float = Field(default=10_000.0, ge=LEAST_RATE, le=MOST)
    """Memory traffic of a device in a microsecond; 10,000 is 10 GB/s."""
    op_overhead_us: float = Field(default=3.0, ge=0, le=MOST)
    """What an op costs before it does anything: the dispatcher, a kernel's launch."""
    latency_us: float = Field(default=100.0, ge=0, le=MOST)
    """From the start of a send to the first byte at the receiver."""
    link_bytes_per_us: float = Field(default=1_000.0, ge=LEAST_RATE, le=MOST)
    """Payload of a link in a microsecond; 1,000 is 8 Gbit/s, 12.5 is 100 Mbit/s."""
    processor_us_per_mb: float = Field(default=0.0, ge=0, le=MOST)
    """Processor time that each end of a message loses, for each 10**6 bytes."""
    message_us: float = Field(default=0.0, ge=0, le=MOST)
    """What each message keeps its link for before its bytes; about 18 for Gloo on one machine, measured."""
    memory_bytes: int | None = Field(default=None, gt=0, le=2**62)
    """Memory of a device; a plan that needs more is refused. None sets no limit."""

    if not TYPE_CHECKING:  # else a type checker would take any argument: pydantic tells it the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise refusal("Cluster", Cluster, error) from None


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
        moved_us = traffic_bytes(op, specs) / cluster.memory_bytes_per_us
        return Priced(cluster.op_overhead_us + max(op.flops / cluster.flops_per_us, moved_us))


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
    peak = Peak(cluster.flops_per_us, "flops_per_us of the description")
    return Costs(op_us, {}, link, ACTION_US, source, collectives, axes, peak=peak)
