"""What costs come from without the machine at hand: a description of devices and links.

On a `Cluster` an op takes its overhead and the longer of arithmetic at the device's rate and traffic at its
memory's, a collective is a ring. On `Hardware` an op's shape counts (`efficiency.op_us`), and what the
launches of a program take beyond its ops is spread over them; collectives and messages go by where ranks lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stretto.errors import UsageError, near_path
from stretto.files.codec import MOST
from stretto.files.settings_file import NamedArguments, read_toml
from stretto.ir.action import Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import LEAST_RATE, CollectiveCost, Costs, Link, Peak
from stretto.ir.mesh import Mesh
from stretto.ir.prices import Priced, Pricer, Specs, price_list, traffic_bytes
from stretto.ir.program import CHUNK, INDEX, Job, Op, Ref
from stretto.price.calibration import Calibration, load_calibration
from stretto.price.cluster_file import Hardware, load_cluster, named_cluster
from stretto.price.devices import device_peak, job_peak, op_dtype, rate_part
from stretto.price.efficiency import (
    Matmul,
    Roof,
    attention_product,
    convolution_products,
    kernel_part,
    matmul_dims,
    matmul_us,
    op_us,
)
from stretto.price.priced import calibrated_pricer, find_group, find_link, priced_costs
from stretto.price.shared import ACTION_US, FREE, ring_cost, sharing, wanted_collectives

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
        *(cluster.latency_us, cluster.link_gbps * PER_US["GB/s"], cluster.processor_us_per_mb, source),
        start_us=cluster.message_us,
    )


def described_costs(job: Job, cluster: Cluster) -> Costs:
    """The costs of a job on a flat description; `source` names the fields that were left at defaults."""
    link = flat_link(cluster)
    collectives = {
        (wanted.axis, wanted.kind): ring_cost(link, wanted.kind, job.size(wanted.axis))
        for wanted in wanted_collectives(job)
    }
    axes = tuple(dict.fromkeys(axis for axis, _ in collectives))
    times = {key: priced.us for key, priced in price_list(job, FlatPricer(cluster)).items()}
    # All links of a flat description are one network, which pipeline messages use as well.
    peak_source = "peak_tflops of the description"
    if isinstance(cluster.peak_tflops, dict):
        peak = job_peak(job, cluster.flops_per_us, peak_source)
    else:
        peak = Peak(cluster.flops_per_us("any"), peak_source)
    return Costs(times, {}, link, ACTION_US, link.source, collectives, axes, peak=peak)


TF32_PART = 1 / 2
"""Rate of products in TF32 over that in half precision: 156 of 312 TFLOP/s on the A100's sheet; assumed of
other devices. PyTorch uses it for convolutions of float32 unless it is set not to
(`torch.backends.cudnn.allow_tf32`)."""


def hardware_costs(job: Job, schedule: Schedule, hardware: Hardware) -> Costs:
    """The costs of a job on named hardware; its world fills nodes in rank order. Raises UsageError when the
    job needs more devices than the cluster has."""
    mesh = job.mesh(schedule.ranks)
    sizes = dict(mesh.sizes)
    if mesh.world > hardware.count:
        layout = ", ".join(f"{axis} = {size}" for axis, size in mesh.sizes)
        raise UsageError(
            f"{layout} needs {mesh.world} devices, but {hardware.name} has {hardware.count}: name a larger "
            "cluster, or lay the job out smaller"
        )
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    links = {(a, b): hardware.pp_link(sizes, a, b) for a, b in pairs if a != b}
    # What no pair names (the step's loss, tied gradients) goes from the first pipeline rank to the last.
    far = hardware.pp_link(sizes, 0, max(1, schedule.ranks - 1))
    collectives = {
        (wanted.axis, wanted.kind): hardware.collective(wanted.kind, sizes, wanted.axis)
        for wanted in wanted_collectives(job)
    }
    leaving = {axis for axis, size in mesh.sizes if size > 1 and hardware.group(sizes, axis).nodes > 1}
    shared = sharing([axis for axis, _ in job.axes], leaving, pipelined=schedule.ranks > 1)
    source = f"roofline of {hardware.name} by shape"
    peak = device_peak(job, hardware.device)
    times = {key: priced.us for key, priced in price_list(job, HardwarePricer(hardware)).items()}
    return Costs(times, links, far, ACTION_US, source, collectives, shared, peak=peak)


class HardwarePricer(Pricer):
    """Prices ops on a device of the catalogue."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def price(self, op: Op, specs: Specs) -> Priced:
        """As `Pricer.price`, on the device alone."""
        return Priced(0.0 if _is_free(op) else device_us(op, specs, self._hardware))

    def run_us(self, ops: Sequence[Op], alone_us: Sequence[float]) -> Sequence[float]:
        """As `Pricer.run_us`: what launches take beyond the ops is spread over those that launch."""
        roof = self._hardware.roof
        launching = sum(not _is_free(op) for op in ops)
        missing_us = max(0.0, launching * roof.efficiency.launch_us - sum(alone_us)) / max(launching, 1)
        result = []
        for op, us in zip(ops, alone_us, strict=True):
            us = 0.0 if _is_free(op) else us + missing_us
            # An op that only starts a communication still costs its launch.
            result.append(max(us, roof.efficiency.launch_us) if op.kind is not None else us)
        return result


def device_us(op: Op, specs: Specs, hardware: Hardware) -> float:
    """Microseconds of one op on the device alone."""
    roof, moved = hardware.roof, traffic_bytes(op, specs)
    if op.kind is not None:
        # What works in place makes a copy of its own; the others make a buffer.
        return op_us(0.0, moved, None, roof) if op.kind.in_place else 0.0
    part = rate_part(op_dtype(op))
    attention = attention_product(op, specs)
    if attention is not None:
        product, count = attention
        rate = part * kernel_part(op, roof.efficiency)
        return max(count * _product_us(product, roof) / rate, op_us(0.0, moved, None, roof))
    if "convolution" in op.target and op_dtype(op) == "float32":
        part = TF32_PART
    products = convolution_products(op, specs)
    if products is not None:
        total = sum(_product_us(product, roof) for product in products)
        return max(total / part + roof.efficiency.kernel_us, op_us(0.0, moved, None, roof))
    # By position, repeated ones included: a product may square its input.
    shapes = [specs[arg.name].shape for arg in op.args if isinstance(arg, Ref) and arg.name in specs]
    dims = matmul_dims(op.target, shapes)
    us = op_us(float(op.flops), moved, dims, roof)
    if part == 1.0 or not op.flops:
        return us
    # Products of float32 are slower only where arithmetic binds, not traffic.
    return max(op_us(op.flops / part, moved, None, roof), us)


def _product_us(product: Matmul, roof: Roof) -> float:
    """A product's time by arithmetic alone, without the shortest time of a kernel."""
    return matmul_us(product, 0.0, roof) - roof.efficiency.kernel_us


def _is_free(op: Op) -> bool:
    return op.alias is not None or op.target in (*FREE, INDEX, CHUNK)


Description = Cluster | Hardware | Calibration
"""What can be planned for without the machine at hand: equal devices and links, devices of the catalogue, or
what was measured before."""


def described(job: Job, schedule: Schedule, found: Description) -> tuple[Costs, Pricer]:
    """The costs of a job on what is described, and what prices the ops that passes make of it. Raises
    UsageError for a job that does not fit."""
    if isinstance(found, Cluster):
        return described_costs(job, found), FlatPricer(found)
    if isinstance(found, Hardware):
        return hardware_costs(job, schedule, found), HardwarePricer(found)
    return priced_costs(job, schedule, found), calibrated_pricer(job, schedule, found)


def pp_link(found: Description, mesh: Mesh) -> Link:
    """What a message between neighbouring pipeline ranks costs. Raises UsageError for a calibration
    that has no messages."""
    if isinstance(found, Cluster):
        return flat_link(found)
    if isinstance(found, Hardware):
        return found.pp_link(dict(mesh.sizes), 0, 1)
    return find_link(found, mesh.world // mesh.size(PIPELINE)).link


def axis_cost(found: Description, mesh: Mesh, axis: str, kind: str) -> CollectiveCost:
    """What a kind of collective costs along an axis. Raises UsageError for a calibration without one."""
    if isinstance(found, Cluster):
        return ring_cost(flat_link(found), kind, mesh.size(axis))
    if isinstance(found, Hardware):
        return found.collective(kind, dict(mesh.sizes), axis)
    return find_group(found, mesh, axis, kind).cost


def describe(cluster: str | Description) -> Description | None:
    """The description that a name or a file gives; None for "local".

    A name is a device of the catalogue and a count, `h100x1024`. A file is a calibration (.json, made by
    `stretto calibrate`), a cluster file (.toml with the key `device`), or `stretto.Cluster`'s fields (.toml).

    Raises UsageError that says what was expected.
    """
    if cluster is None or isinstance(cluster, Description):
        return cluster
    if not isinstance(cluster, str):
        raise UsageError(
            f'a cluster is "local", a name such as h100x64, a file\'s path as text, or '
            f"stretto.Cluster(...), not {type(cluster).__name__}"
        )
    if cluster == "local":
        return None
    path = Path(cluster)
    if path.suffix == ".json":
        return load_calibration(path)
    if path.suffix == ".toml":
        return _from_toml(path)
    try:
        return named_cluster(cluster)
    except UsageError as error:
        raise UsageError(
            f'{error} (.toml), or give "local" to measure this machine, or a calibration (.json)'
        ) from None


def _from_toml(path: Path) -> Cluster | Hardware:
    if not path.exists():
        raise UsageError(
            f"{path}: there is no such file; {near_path(path, '{} ')}give a cluster file, a name, or local"
        )
    result = read_toml(path, "cluster file")
    if "device" in result:
        return load_cluster(path)
    try:
        return Cluster(**result)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
