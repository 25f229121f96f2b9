"""How long an op takes on a device: a roofline whose roofs depend on the op's shape.

    matmul     whole tiles run on all cores at once, so a product of few tiles, or of one tile more than
               fills the cores, takes as long as the next full wave (NVIDIA, "Matrix Multiplication
               Background", tile and wave quantization); a tile's loop over k has a prologue, so short k
               is slower; never faster than the operands' traffic.
    otherwise  bytes moved at the part of the memory's rate that such kernels reach.
    every op   a kernel has a shortest time, and the host needs time to launch it. Launches run ahead of the
               device, so a run of ops takes the longer of both sums: `run_us`.

Touches no device: numbers in, microseconds out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a matmul's tile and the part of the peak it can reach against the largest: smaller
tiles read their operands more often. Sizes as in CUTLASS's own list; the parts are assumed."""


ALIGNMENT = 8
"""Dims of a half-precision matmul should be multiples of it (NVIDIA, "Matrix Multiplication Background")."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a device reaches of its sheet.

    matmul: part of the peak that a large product reaches; k_ramp: k at which a tile's prologue takes as long
    as its loop; memory: part of the memory rate that streaming kernels reach; kernel_us: shortest time of a
    kernel; launch_us: time of the host for one op; unaligned: what is left of `matmul` where a dim is no
    multiple of 8, so that rows of half precision do not begin at 16 bytes; grouped: what is left of it for
    one kernel of products of groups of rows; flash, efficient, cudnn: part of a product's rate that kernels
    of attention reach in half precision (FlashAttention 2, the memory-efficient one, cuDNN's)."""

    matmul: float
    k_ramp: float
    memory: float
    kernel_us: float
    launch_us: float
    unaligned: float = 1.0
    grouped: float = 1.0
    flash: float = 1.0
    efficient: float = 1.0
    cudnn: float = 1.0


@dataclass(frozen=True, slots=True)
class Roof:
    """A device as the roofline sees it: peak rate of its matmul units, rate of its memory, its cores (SMs,
    compute units, cube cores), what it reaches of them."""

    flops_per_us: float
    memory_bytes_per_us: float
    cores: int
    efficiency: Efficiency


@dataclass(frozen=True, slots=True)
class Matmul:
    """`batch` products of (m, k) by (k, n). grouped: in a kernel for groups of unequal numbers of rows."""

    m: int
    n: int
    k: int
    batch: int = 1
    grouped: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


def matmul_us(dims: Matmul, nbytes: float, roof: Roof) -> float:
    """Microseconds of a matmul on the device alone; `nbytes`: operands and result once each."""
    reach = roof.efficiency
    core_flops_per_us = roof.flops_per_us * reach.matmul / roof.cores
    if dims.n % ALIGNMENT or dims.k % ALIGNMENT or dims.m % ALIGNMENT:
        core_flops_per_us *= reach.unaligned
    if dims.grouped:
        core_flops_per_us *= reach.grouped
    best = math.inf
    for rows, columns, part in TILES:
        tiles = math.ceil(dims.m / rows) * math.ceil(dims.n / columns) * dims.batch
        waves = math.ceil(tiles / roof.cores)
        loop = 2.0 * rows * columns * (dims.k + reach.k_ramp)
        best = min(best, waves * loop / (core_flops_per_us * part))
    return max(best, nbytes / (roof.memory_bytes_per_us * reach.memory)) + reach.kernel_us


def op_us(flops: float, bytes_moved: float, dims: Matmul | None, roof: Roof) -> float:
    """Microseconds of one op on the device alone, its launch not counted.

    flops: arithmetic (taken from `dims` where they are given); bytes_moved: what the op reads and writes of
    the device's memory; dims: of a matmul, batched or not; None for all other ops. An op with flops and no
    dims (a convolution, fused attention) runs at the matmul rate without quantisation.
    """
    if dims is not None:
        return matmul_us(dims, bytes_moved, roof)
    reach = roof.efficiency
    compute = flops / (roof.flops_per_us * reach.matmul)
    return max(compute, bytes_moved / (roof.memory_bytes_per_us * reach.memory)) + reach.kernel_us


def run_us(device_us: Iterable[float], launches: float, roof: Roof) -> float:
    """Microseconds of ops one after the other: the device's sum, or the host's launches if that is longer."""
    return max(sum(device_us), launches * roof.efficiency.launch_us)


def matmul_dims(target: str, shapes: Sequence[Sequence[int]]) -> Matmul | None:
    """The product that an op computes, None for one that is no matmul.

    target: its name, such as `aten.addmm.default`; shapes: of its tensor arguments, in order.
    """
    name = target.removeprefix("aten.").removeprefix("stretto_moe.").split(".", 1)[0]
    if name in ("addmm", "baddbmm"):
        shapes = shapes[1:]  # the first is added
    if name in ("mm", "addmm"):
        (m, k), (_, n) = shapes[:2]
        return Matmul(m, n, k)
    if name in ("bmm", "baddbmm"):
        (batch, m, k), (_, _, n) = shapes[:2]
        return Matmul(m, n, k, batch)
    if name == "grouped_mm":  # rows are shared out evenly, for want of another guess
        (rows, k), (groups, _, n) = shapes[:2]
        return Matmul(-(-rows // groups), n, k, groups, grouped=True)
    if name == "grouped_mm_t":
        (rows, m), (_, n), (groups,) = shapes[:3]
        return Matmul(m, n, -(-rows // groups), groups, grouped=True)
    return None
