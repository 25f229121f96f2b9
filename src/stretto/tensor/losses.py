"""Losses that reduce, over sharded tensors: what they divide by is of the whole tensor.

PyTorch derives how such a loss is sharded from its decomposition, and calls the op on the parts: a mean of
means, which is right only where parts are equal and rows weigh the same, with a gradient that is too large by
the number of ranks. Here:

* a loss of elements is computed for each element, then summed, then divided by the whole tensor's size; its
  gradient is that of the elements, of a gradient divided by this size;
* `nll_loss`, that of cross-entropy, gives the sum of the rows that count and the sum of their weights; the
  mean is the one over the other, of the whole tensor. Its backward pass takes the sum of weights as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""How PyTorch numbers reductions."""

OF_ELEMENTS = frozenset(
    {
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
    }
)
BACKWARD_OF_ELEMENTS = frozenset(
    {
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
        aten.soft_margin_loss_backward.default,
        aten.binary_cross_entropy_backward.default,
    }
)
"""The first argument is the gradient, the second the loss's input."""
OF_LABELS = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})

LOSSES = OF_ELEMENTS | BACKWARD_OF_ELEMENTS | OF_LABELS


def over_the_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[DTensor]) -> Any:
    """What a reducing loss gives, by ops that do not; NotImplemented for all else."""
    if op not in LOSSES or all(set(x.placements) == {Replicate()} for x in tensors):
        return NotImplemented
    args = _filled(op, args, kwargs)
    at = _reduction_at(op)
    reduction = args[at]
    if reduction == NONE or (op in OF_LABELS and reduction == SUM):
        return NotImplemented

    def with_reduction(how: int) -> tuple[Any, ...]:
        return (*args[:at], how, *args[at + 1 :])

    if op in BACKWARD_OF_ELEMENTS:
        gradient, x = args[:2]
        given = with_reduction(NONE)
        return op(gradient / x.numel() if reduction == MEAN else gradient, *given[1:])
    if op in OF_LABELS:
        total, weights = op(*with_reduction(SUM))
        return total / weights, weights
    losses = op(*with_reduction(NONE))
    return losses.sum() if reduction == SUM else losses.sum() / losses.numel()


def reduction_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How a loss reduces, as PyTorch numbers it."""
    return int(_filled(op, args, kwargs)[_reduction_at(op)])


def _filled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments in their order."""
    found = list(args)
    for argument in op._schema.arguments[len(args) :]:
        found.append(kwargs.get(argument.name, argument.default_value))
    return tuple(found)


def _reduction_at(op: Any) -> int:
    return next(at for at, argument in enumerate(op._schema.arguments) if argument.name == "reduction")
