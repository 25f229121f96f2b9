"""Costs of a job on equal devices joined by equal links: a roofline for ops, rings for collectives.

    op          overhead + the longer of arithmetic at the device's rate and traffic at its memory's
    message     latency + bytes / rate
    collective  a ring of n over such links: n - 1 steps of a latency to gather or to scatter, each moving
                (n - 1) / n of the tensor; twice that to reduce (Patarasuk and Yuan 2009); an exchange sends
                one part to each in turn

Reads a description, touches no device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stretto.ir.collectives import KINDS
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.program import GETITEM, WAIT, Job, Op, TensorSpec
from stretto.measure.wanted import wanted_collectives

if TYPE_CHECKING:
    from stretto.price.cluster import Cluster

ACTION_US = 8.0
"""Time of a window's run beside its ops: its call, its clock readings. Measured on a 2.6 GHz core."""

FREE = (GETITEM, WAIT)
"""Ops that take no time of their own: the tuple has paid, the communication has a lane of its own."""


def described_costs(job: Job, cluster: Cluster) -> Costs:
    """The costs of a job on a flat description; `source` names the fields that were left at defaults."""
    size = sizes_of(job)

    def op_us(_: int, op: Op) -> float:
        if op.target in FREE:
            return 0.0
        if op.alias is not None:
            return cluster.op_overhead_us
        return cluster.op_overhead_us + max(
            op.flops / cluster.flops_per_us, traffic_bytes(op, size) / cluster.memory_bytes_per_us
        )

    assumed = sorted(type(cluster).model_fields.keys() - cluster.model_fields_set - {"memory_bytes"})
    source = "roofline of the description" + (f"; assumed: {', '.join(assumed)}" if assumed else "")
    link = Link(cluster.latency_us, cluster.link_bytes_per_us, cluster.processor_us_per_mb, source)
    collectives = {
        (wanted.axis, wanted.kind): ring_cost(link, wanted.kind, job.size(wanted.axis))
        for wanted in wanted_collectives(job)
    }
    axes = tuple(dict.fromkeys(axis for axis, _ in collectives))
    # All links of a flat description are one network, which pipeline messages use as well.
    return Costs(op_times(job, op_us), {}, link, ACTION_US, source, collectives, axes)


def ring_cost(link: Link, kind: str, members: int) -> CollectiveCost:
    """A collective as a ring of `members` over equal links."""
    part = KINDS[kind].moved(members)
    # A transport that needs more processor time than wire time moves no faster than the processor does.
    us_per_byte = part * max(1.0 / link.bytes_per_us, link.processor_us_per_mb / 1e6)
    latency_us = KINDS[kind].steps(members) * link.latency_us
    span = 1_000_000.0
    return CollectiveCost(
        Curve(((0.0, latency_us), (span, latency_us + span * us_per_byte))),
        link.processor_us_per_mb * part,
        0.0,
        f"a ring of {members} over links: {link.source}",
    )


def op_times(job: Job, op_us: Callable[[int, Op], float]) -> dict[tuple[int, str], float]:
    """(stage, op name) -> time by a function of both, for all ops of a job."""
    return {
        (stage.index, op.name): op_us(stage.index, op)
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }


def specs_of(job: Job) -> dict[str, TensorSpec]:
    """Value name -> shape, for every value of the step that is one tensor."""
    found = {f"param/{p.name}": p.spec for p in job.parameters}
    found |= {f"buffer/{b.name}": b.spec for b in job.buffers}
    found |= {f"batch/{name}": spec for name, spec in job.batch}
    found |= {f"const/{c.name}": c.spec for c in job.constants}
    if job.trains:
        found["tangent"] = job.loss_spec
    for stage in job.stages:
        for op in (op for ops in stage.ops.values() for op in ops):
            if len(op.outputs) == 1 and op.outputs[0] is not None:
                found[op.name] = op.outputs[0]
    return found


def sizes_of(job: Job) -> dict[str, int]:
    """Value name -> bytes that a reader of the value reads; of a tuple, all its parts."""
    size = {name: spec.nbytes for name, spec in specs_of(job).items()}
    for stage in job.stages:
        for op in (op for ops in stage.ops.values() for op in ops):
            size[op.name] = made_bytes(op)
    return size


def traffic_bytes(op: Op, size: dict[str, int]) -> int:
    """Bytes that an op reads and writes, each value once."""
    return made_bytes(op) + sum(size.get(name, 0) for name in op.uses)


def made_bytes(op: Op) -> int:
    """Bytes of all results, views included: what a reader of the value reads."""
    return sum(spec.nbytes for spec in op.outputs if spec is not None)
