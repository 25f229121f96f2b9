"""What a plan's costs come from: this machine, measured, or a description of devices and links.

`Cluster` is the description; "local" means: measure here (`stretto.cost.measured`).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.cost.measured import measured_costs
from stretto.cost.roofline import described_costs
from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.plan import Costs
from stretto.ir.program import Job
from stretto.settings_file import refusal


class Cluster(BaseModel):
    """Equal devices joined by equal links, for plans without the machine at hand.

    The defaults describe one core of a server processor (AVX-512, 2.6 GHz, measured) and, assumed, its local
    network; a plan's `costs.source` names the fields that were left at them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    flops_per_us: float = Field(default=80_000.0, gt=0)
    """Arithmetic that a device does in a microsecond; 80,000 is 80 GFLOP/s, one processor core."""
    memory_bytes_per_us: float = Field(default=10_000.0, gt=0)
    """Memory traffic of a device in a microsecond; 10,000 is 10 GB/s."""
    op_overhead_us: float = Field(default=3.0, ge=0)
    """What an op costs before it does anything: the dispatcher, a kernel's launch."""
    latency_us: float = Field(default=100.0, ge=0)
    """From the start of a send to the first byte at the receiver."""
    link_bytes_per_us: float = Field(default=1_000.0, gt=0)
    """Payload of a link in a microsecond; 1,000 is 8 Gbit/s, 12.5 is 100 Mbit/s."""
    processor_us_per_mb: float = Field(default=0.0, ge=0)
    """Processor time that each end of a message loses, for each 10**6 bytes."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory of a device; a plan that needs more is refused. None sets no limit."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refusal("Cluster", list(Cluster.model_fields), error) from None


def costs_of(job: Job, schedule: Schedule, cluster: str | Cluster) -> Costs:
    """The costs of a job on a cluster.

    cluster: "local" to measure on this machine, or a description.

    Raises UsageError for another name.
    """
    if isinstance(cluster, Cluster):
        return described_costs(job, cluster)
    if cluster != "local":
        raise UsageError(f'unknown cluster {cluster!r}: give "local" or a stretto.Cluster(...) description')
    return measured_costs(job, schedule)
