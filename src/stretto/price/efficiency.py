"""How long an op takes on a device: a roofline whose roofs depend on the op's shape.

    matmul       full tiles run on all cores at once, so a product of few tiles, or of one tile more than
                 fills the cores, takes as long as the next full wave (NVIDIA, "Matrix Multiplication
                 Background", tile and wave quantization); a tile's loop over k has a prologue, so short k
                 is slower; never faster than the operands' traffic
    attention    forward two products, backward five (Dao et al. 2022, arXiv 2205.14135, algorithm 4); causal
                 kernels pass over tiles above the diagonal. What each kernel reaches is a device's figure
    convolution  implicit matrix products (Chetlur et al., arXiv 1410.0759); with groups, none
    otherwise    bytes moved at the part of the memory's rate that such kernels reach
    every op     a kernel has a shortest time, and the host needs time to launch it. Launches run ahead of the
                 device, so a run of ops takes the longer of both sums

Touches no device: numbers in, microseconds out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.prices import Specs
from stretto.ir.program import Op, Ref, TensorSpec

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a matmul's tile and the part of the peak it can reach against the largest: smaller
tiles read their operands more often. Sizes as in CUTLASS's own list; the parts are assumed."""


ALIGNMENT = 8
"""Dims of a half-precision matmul should be multiples of it (NVIDIA, "Matrix Multiplication Background")."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a device reaches of its sheet; `stretto.price.cluster_file.Figures` says what each is."""

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
    """Microseconds of one op on the device alone, its launch not counted. flops: taken from `dims` where they
    are given; bytes_moved: what the op reads and writes of the device's memory; dims: of a matmul, else None.
    An op with flops and no dims runs at the matmul rate without quantisation."""
    if dims is not None:
        return matmul_us(dims, bytes_moved, roof)
    reach = roof.efficiency
    compute = flops / (roof.flops_per_us * reach.matmul)
    return max(compute, bytes_moved / (roof.memory_bytes_per_us * reach.memory)) + reach.kernel_us


def matmul_dims(target: str, shapes: Sequence[Sequence[int]]) -> Matmul | None:
    """The product that an op (`aten.addmm.default`) computes on tensors of these shapes, None for one that is
    no matmul."""
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


BACKWARD_PART = 0.8
"""Rate of a backward's products over that of the forward's, in half precision. Measured on one H100, PyTorch
2.11, 16,384 tokens of 16 heads in sequences of 1,024 to 8,192: 0.76 to 0.82, of all three kernels."""

TILE = 256
"""Tokens of a tile: a causal kernel takes as long as this many more tokens that are seen. Fitted to the same:
without a mask over causal, 1.6 at 1,024 tokens, 1.9 at 8,192."""


def attention_product(op: Op, specs: Mapping[str, TensorSpec]) -> tuple[Matmul, float] | None:
    """(one product, how many of its size) of a fused attention, None for other ops."""
    if "scaled_dot_product" not in op.target:
        return None
    backward = "_backward" in op.target
    tensors = [arg.name for arg in op.args if isinstance(arg, Ref)]
    query, key = (specs[name].shape for name in (tensors[1:3] if backward else tensors[:2]))
    S, T = query[-2], key[-2]
    count = 5.0 if backward else 2.0
    # The last query sees the last key, in all kernels that take fewer queries than keys.
    seen = min(1.0, max(0.0, 1.0 - (S - TILE) / (2.0 * T))) if _is_causal(op) else 1.0
    return Matmul(S, T, query[-1], math.prod(query[:-2])), count * seen


def kernel_part(op: Op, reach: Efficiency) -> float:
    """What part of a product's rate the kernel of a fused attention reaches on a device. In float32 none
    falls behind products."""
    kernels = {"_flash_": reach.flash, "_efficient_": reach.efficient, "_cudnn_": reach.cudnn}
    part = next((part for name, part in kernels.items() if name in op.target), None)
    dtype = next((spec.dtype for spec in op.outputs if spec is not None), "")
    if part is None or dtype not in ("bfloat16", "float16"):
        return 1.0
    return part * BACKWARD_PART if "_backward" in op.target else part


def _is_causal(op: Op) -> bool:
    from stretto.backend.dispatch_adapter import arguments_of  # here, as it loads PyTorch

    return bool(arguments_of(op).get("is_causal"))


FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"


def convolution_products(op: Op, specs: Specs) -> tuple[Matmul, ...] | None:
    """The products that a convolution computes, of the backward those of the gradients that it is asked for;
    None for other ops and for one with groups. The forward of a transposed one is the gradient of the input
    of a plain one."""
    # (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups), and backward
    # (grad_output, input, weight, bias_sizes, stride, ..., groups, output_mask)
    if op.target == FORWARD:
        source, weight = op.args[:2]
        transposed, groups, wanted = op.args[6], op.args[8], None
        result = op.outputs[0].shape if op.outputs[0] is not None else None
    elif op.target == BACKWARD:
        gradient, source, weight = op.args[:3]
        transposed, groups, wanted = op.args[7], op.args[9], op.args[10]
        result = specs[gradient.name].shape if isinstance(gradient, Ref) and gradient.name in specs else None
    else:
        return None
    if groups != 1 or result is None or not isinstance(source, Ref) or not isinstance(weight, Ref):
        return None
    if source.name not in specs or weight.name not in specs:
        return None
    small, large = specs[source.name].shape, result
    kernel = specs[weight.name].shape
    if not transposed:
        small, large = large, small
    # In both kinds the weight's first dim goes with the side that has one place for each run of the kernel.
    runs = small[0] * math.prod(small[2:])
    channels, summed = kernel[0], math.prod(kernel[1:])
    gathering = Matmul(runs, channels, summed)
    places = large[0] * math.prod(large[2:])
    spreading = Matmul(places, kernel[1], max(1, round(gathering.flops / 2 / places / kernel[1])))
    if wanted is None:
        return (spreading,) if transposed else (gathering,)
    found = []
    if isinstance(wanted, tuple) and wanted[0]:
        found.append(gathering if transposed else spreading)
    if isinstance(wanted, tuple) and wanted[1]:
        found.append(Matmul(channels, summed, runs))
    return tuple(found)
