"""The products that a convolution is, for its price: implicit matrix products, as cuDNN's kernels are.

    forward    every place of the result by its channels, summed over the kernel's places and input channels
    gradient   of the input: every place of the input by its channels, with the same arithmetic;
               of the weight: its channels by the kernel's places and input channels, summed over all places

(Chetlur et al., arXiv 1410.0759; NVIDIA, "Convolutional Layers User's Guide", on implicit GEMM.) One with
groups has none here: kernels for few channels a group are no matrix products. Touches no device.
"""

from __future__ import annotations

import math

from stretto.ir.prices import Specs
from stretto.ir.program import Op, Ref
from stretto.price.efficiency import Matmul

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"


def convolution_products(op: Op, specs: Specs) -> tuple[Matmul, ...] | None:
    """The products that a convolution computes; None for other ops and for one with groups.

    Of the backward, those of the gradients that it is asked for. For transposed convolutions, too: their
    forward is the gradient of the input of a plain one.
    """
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
