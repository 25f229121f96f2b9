"""Gradients of mean losses over sharded tensors, which DTensor divides by the size of a rank's part.

PyTorch 2.13 derives how such a loss is sharded from its decomposition, and then calls the op on the parts:
the loss is right, an average of averages, and its gradient is as many times too large as there are ranks. The
sum has no size in it: here the gradient of the mean becomes that of the sum, of a gradient divided by the
whole tensor's size. The test that shows PyTorch's own goes when PyTorch is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

aten = torch.ops.aten

MEAN, SUM = 1, 2
"""How PyTorch numbers reductions."""

REDUCTION_AT = {
    aten.mse_loss_backward.default: 3,
    aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3,
    aten.soft_margin_loss_backward.default: 3,
    aten.binary_cross_entropy_backward.default: 4,
}
"""Ops, and which argument says how they reduce. The first is the gradient, the second the loss's input."""


def over_the_whole(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with which an op on parts gives the gradient of the mean over the whole tensor; all other
    ops keep theirs. A reduction that is left out is the mean, and left as it is only where parts are wholes.
    """
    at = REDUCTION_AT.get(op)
    if at is None:
        return args
    reduction = args[at] if len(args) > at else MEAN
    spread = any(isinstance(x, DTensor) and set(x.placements) != {Replicate()} for x in args[1:3])
    if reduction != MEAN or not spread:
        return args
    filled = (*args, *[None] * (at - len(args)))[:at]
    return (args[0] / args[1].numel(), *filled[1:], SUM, *args[at + 1 :])
