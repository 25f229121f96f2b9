"""The peak rate of a device, by which a step's MFU is counted: what its sheet says that it computes at most.

A job's peak is that of its arithmetic by dtype: the time that all its FLOPs take at the sheet's rates. The
catalogue has the sheets of accelerators; of processors it has none, and their steps have no MFU.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.ir.costs import Peak
from stretto.ir.program import Job, Op
from stretto.price.devices import Device, devices

FP32_PART = 1 / 16
"""Rate of products in float32 over that in half precision: 19.5 of 312 TFLOP/s on the A100's sheet; assumed
of other devices. PyTorch uses no TF32 unless it is told to."""

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
    for stage in job.stages:
        for ops in stage.ops.values():
            for op in ops:
                flops += op.flops
                time_us += op.flops / flops_per_us(op_dtype(op))
    return Peak(flops / time_us if time_us else flops_per_us("bfloat16"), source)


def op_dtype(op: Op) -> str:
    """The dtype that an op computes with."""
    return next((spec.dtype for spec in op.outputs if spec is not None), "bfloat16")


def rate_part(dtype: str) -> float:
    """The rate of a dtype over that of half precision."""
    return FP32_PART if dtype in ("float32", "float64") else 1.0
