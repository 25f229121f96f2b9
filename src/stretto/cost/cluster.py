"""What a plan's costs come from: this machine, measured, or a description of devices and links.

`Cluster` is the description. "local" means: measure here. When the ranks of the plan are running
(`torch.distributed` is initialised with as many), each measures its own stages while the others measure
theirs, as they will compute; then all share what they found and hold equal costs. In a single process all
stages are measured one after the other, and messages between two processes started for it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from stretto.cost.messages import measure_links, measure_local_link
from stretto.cost.profile import device_name, profile
from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.plan import Costs, Link
from stretto.ir.program import Job, Op

ACTION_US = 8.0
"""Time of a window's run beside its ops: its call, its clock readings. Measured on a 2.6 GHz core."""


class Cluster(BaseModel):
    """Equal devices joined by equal links, for plans without the machine at hand."""

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


def costs_of(job: Job, schedule: Schedule, cluster: str | Cluster) -> Costs:
    """The costs of a job on a cluster.

    cluster: "local" to measure on this machine, or a description.

    Raises UsageError for another name.
    """
    if isinstance(cluster, Cluster):
        return _described(job, cluster)
    if cluster != "local":
        raise UsageError(f'unknown cluster {cluster!r}: give "local" or a stretto.Cluster(...) description')
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    if dist.is_initialized() and dist.get_world_size() == schedule.ranks and schedule.ranks > 1:
        return _measured_together(job, schedule, device)
    found = profile(job, device)
    if schedule.ranks > 1:
        link = measure_local_link()
    else:
        link = Link(0.0, float("inf"), 0.0, "no messages")
    return Costs(found.op_us, {}, link, ACTION_US, found.source)


def _on_gpu() -> bool:
    if dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return False


def _measured_together(job: Job, schedule: Schedule, device: torch.device) -> Costs:
    rank = dist.get_rank()
    dist.barrier()  # so that all ranks load the machine at the same time, as in a step
    mine = profile(job, device, schedule.stages_of(rank))
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    links = measure_links([(a, b) for a, b in pairs if a != b], device)
    shared: list[object] = [None] * schedule.ranks
    dist.all_gather_object(shared, (dict(mine.op_us), links))
    op_us: dict[tuple[int, str], float] = {}
    all_links: dict[tuple[int, int], Link] = {}
    for item in shared:
        assert isinstance(item, tuple)
        op_us |= item[0]
        all_links |= item[1]
    default = next(iter(all_links.values()), Link(0.0, float("inf"), 0.0, "no messages"))
    source = f"measured on {device_name(device)}, {schedule.ranks} ranks at once"
    return Costs(op_us, all_links, default, ACTION_US, source)


def _described(job: Job, cluster: Cluster) -> Costs:
    def op_us(op: Op) -> float:
        if op.target == "getitem":
            return 0.0
        if op.alias is not None:
            return cluster.op_overhead_us
        traffic = 2.0 * op.nbytes / cluster.memory_bytes_per_us
        return cluster.op_overhead_us + max(op.flops / cluster.flops_per_us, traffic)

    times = {
        (stage.index, op.name): op_us(op) for stage in job.stages for ops in stage.ops.values() for op in ops
    }
    link = Link(
        cluster.latency_us,
        cluster.link_bytes_per_us,
        cluster.processor_us_per_mb,
        "read from the description",
    )
    return Costs(times, {}, link, ACTION_US, "roofline of the description")
