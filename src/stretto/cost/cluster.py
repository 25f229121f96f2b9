"""What a plan's costs come from: this machine, measured, or a description of devices and links.

`Cluster` is the description. "local" means: measure here. When the ranks of the plan are running
(`torch.distributed` is initialised with as many), each measures its own stages while the others measure
theirs, as they will compute; then all share what they found and hold equal costs. In a single process all
stages are measured one after the other, and messages between two processes started for it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.cost.messages import measure_links, measure_local_link
from stretto.cost.profile import device_name, profile
from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.plan import Costs, Link
from stretto.ir.program import Job, Op
from stretto.settings_file import refusal

ACTION_US = 8.0
"""Time of a window's run beside its ops: its call, its clock readings. Measured on a 2.6 GHz core."""


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
        return _described(job, cluster)
    if cluster != "local":
        raise UsageError(f'unknown cluster {cluster!r}: give "local" or a stretto.Cluster(...) description')
    if job.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device(job.device)
    if dist.is_initialized() and dist.get_world_size() == schedule.ranks and schedule.ranks > 1:
        return _measured_together(job, schedule, device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise UsageError(
            "several ranks were started, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before stretto.plan, so that all ranks agree on the costs"
        )
    found = profile(job, device)
    if schedule.ranks > 1:
        link = measure_local_link()
    else:
        link = Link(0.0, float("inf"), 0.0, "no messages")
    return Costs(found.op_us, {}, link, ACTION_US, found.source)


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
    size = {f"param/{p.name}": p.spec.nbytes for p in job.parameters}
    size |= {f"buffer/{b.name}": b.spec.nbytes for b in job.buffers}
    size |= {f"batch/{name}": spec.nbytes for name, spec in job.batch}
    size |= {op.name: _made(op) for stage in job.stages for ops in stage.ops.values() for op in ops}

    def op_us(op: Op) -> float:
        if op.target == "getitem":
            return 0.0  # its tuple has paid
        if op.alias is not None:
            return cluster.op_overhead_us
        traffic = _made(op) + sum(size.get(name, 0) for name in op.uses)
        return cluster.op_overhead_us + max(
            op.flops / cluster.flops_per_us, traffic / cluster.memory_bytes_per_us
        )

    times = {
        (stage.index, op.name): op_us(op) for stage in job.stages for ops in stage.ops.values() for op in ops
    }
    assumed = sorted(type(cluster).model_fields.keys() - cluster.model_fields_set - {"memory_bytes"})
    source = "roofline of the description" + (f"; assumed: {', '.join(assumed)}" if assumed else "")
    link = Link(cluster.latency_us, cluster.link_bytes_per_us, cluster.processor_us_per_mb, source)
    return Costs(times, {}, link, ACTION_US, source)


def _made(op: Op) -> int:
    """Bytes of all results, views included: what a reader of the value reads."""
    return sum(spec.nbytes for spec in op.outputs if spec is not None)
