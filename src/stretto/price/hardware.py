"""Costs of a job on a cluster of the catalogue: ops by shape, collectives and messages by where ranks lie.

    op          `efficiency.op_us`: products by their dims, fused attention and convolutions by those of their
                products, all else by the bytes moved. Views and waits take nothing on the device.
    launches    the host's launches of a program may take longer than its ops (`efficiency.run_us`); what is
                missing is then spread evenly over the ops that launch.
    collective  the model of `cluster_file.Hardware` at the axis' place on the fabric (tp within a node)
    message     the link of two places of the pipeline

Reads a description, touches no device.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.prices import Priced, Pricer, Specs, price_list, traffic_bytes
from stretto.ir.program import CHUNK, INDEX, Job, Op, Ref
from stretto.price.attention import attention_product, kernel_part
from stretto.price.cluster_file import Hardware
from stretto.price.convolution import convolution_products
from stretto.price.efficiency import Matmul, matmul_dims, matmul_us, run_us
from stretto.price.peak import device_peak, op_dtype, rate_part
from stretto.price.roofline import ACTION_US, FREE
from stretto.price.sharing import sharing
from stretto.price.wanted import wanted_collectives

TF32_PART = 1 / 2
"""Rate of products in TF32 over that in half precision: 156 of 312 TFLOP/s on the A100's sheet; assumed of
other devices. PyTorch uses it for convolutions of float32 unless it is told not to
(`torch.backends.cudnn.allow_tf32`)."""


def hardware_costs(job: Job, schedule: Schedule, hardware: Hardware) -> Costs:
    """The costs of a job on named hardware; its world fills nodes in rank order.

    Raises UsageError when the job needs more devices than the cluster has.
    """
    mesh = job.mesh(schedule.ranks)
    sizes = dict(mesh.sizes)
    if mesh.world > hardware.count:
        layout = ", ".join(f"{axis} = {size}" for axis, size in mesh.sizes)
        raise UsageError(
            f"{layout} needs {mesh.world} devices, but {hardware.name} has {hardware.count}: name a larger "
            "cluster, or lay the job out smaller"
        )
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    links = {(a, b): hardware.place_link(sizes, a, b) for a, b in pairs if a != b}
    # What no pair names (the step's loss, tied gradients) goes from the first place to the last.
    far = hardware.place_link(sizes, 0, max(1, schedule.ranks - 1))
    collectives = {
        (wanted.axis, wanted.kind): hardware.collective(wanted.kind, sizes, wanted.axis)
        for wanted in wanted_collectives(job)
    }
    leaving = {axis for axis, size in mesh.sizes if size > 1 and hardware.group(sizes, axis).nodes > 1}
    shared = sharing([axis for axis, _ in job.axes], leaving, pipelined=schedule.ranks > 1)
    source = f"roofline of {hardware.name} by shape"
    peak = device_peak(job, hardware.device)
    times = program_times(job, hardware)
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
        missing_us = max(0.0, run_us(alone_us, launching, roof) - sum(alone_us)) / max(launching, 1)
        result = []
        for op, us in zip(ops, alone_us, strict=True):
            us = 0.0 if _is_free(op) else us + missing_us
            # An op that only starts a communication still costs its launch.
            result.append(max(us, roof.efficiency.launch_us) if op.kind is not None else us)
        return result


def program_times(job: Job, hardware: Hardware) -> dict[tuple[int, str], float]:
    """(stage, op name) -> microseconds on the compute lane."""
    return {key: priced.us for key, priced in price_list(job, HardwarePricer(hardware)).items()}


def device_us(op: Op, specs: Specs, hardware: Hardware) -> float:
    """Microseconds of one op on the device alone."""
    moved = traffic_bytes(op, specs)
    if op.kind is not None:
        # What works in place makes a copy of its own; the others make a buffer.
        return hardware.op_us(0.0, moved) if op.kind.in_place else 0.0
    shapes = [specs[name].shape for name in _tensors(op) if name in specs]
    part = rate_part(op_dtype(op))
    attention = attention_product(op, specs)
    if attention is not None:
        product, count = attention
        rate = part * kernel_part(op, hardware.roof.efficiency)
        return max(count * _product_us(product, hardware) / rate, hardware.op_us(0.0, moved))
    if "convolution" in op.target and op_dtype(op) == "float32":
        part = TF32_PART
    products = convolution_products(op, specs)
    if products is not None:
        total = sum(_product_us(product, hardware) for product in products)
        return max(total / part + hardware.roof.efficiency.kernel_us, hardware.op_us(0.0, moved))
    dims = matmul_dims(op.target, shapes)
    us = hardware.op_us(float(op.flops), moved, dims)
    if part == 1.0 or not op.flops:
        return us
    # Products of float32 are slower only where arithmetic binds, not traffic.
    return max(hardware.op_us(op.flops / part, moved), us)


def _product_us(product: Matmul, hardware: Hardware) -> float:
    """A product's time by arithmetic alone, without the shortest time of a kernel."""
    return matmul_us(product, 0.0, hardware.roof) - hardware.roof.efficiency.kernel_us


def _tensors(op: Op) -> list[str]:
    """Names of the tensor arguments by position, repeated ones included: a product may square its input."""
    return [arg.name for arg in op.args if isinstance(arg, Ref)]


def _dtype(op: Op) -> str:
    return next((spec.dtype for spec in op.outputs if spec is not None), "bfloat16")


def _is_free(op: Op) -> bool:
    return op.alias is not None or op.target in (*FREE, INDEX, CHUNK)
