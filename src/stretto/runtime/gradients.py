"""Gradients: flattened for a reduction, and given to autograd, which adds them to `.grad`.

A gradient that all ranks of an axis reduce has one slot in the flat tensor. Of one whose parts a few ranks
share, each part has a slot, so that one reduction over the axis adds up the copies of every part: a rank puts
zeros into the others' slots.

Autograd adds gradients to `.grad` as a backward of the model does. So hooks on parameters act as they do
there, once a step: those of `register_hook` see the full gradient of the step and may change it, those of
`register_post_accumulate_grad_hook` and `register_multi_grad_hook` follow. No gradient is copied where
autograd would not copy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stretto.ir.program import Job, Parameter


class Slot(NamedTuple):
    """This rank's slot of a gradient, and how many there are."""

    at: int
    slots: int


def slot_of(job: Job, parameter: Parameter, axis: str, coordinates: Mapping[str, int]) -> Slot:
    """Of a parameter's gradient in a sum over an axis (or a communicator of ties)."""
    slots = parameter.slots(axis, job.size(axis))
    result = (s.part(coordinates[axis]) for s in parameter.shards if s.axis == axis and slots > 1)
    return Slot(next(result, 0), slots)


def together(grads: Sequence[torch.Tensor], slots: Sequence[Slot]) -> torch.Tensor:
    """The tensor to be summed, flat; a gradient alone in its one slot as it is, without a copy."""
    if len(grads) == 1 and slots[0].slots == 1:
        return grads[0]
    return torch.cat(
        [piece for grad, slot in zip(grads, slots, strict=True) for piece in _around(grad, slot)]
    )


def _around(grad: torch.Tensor, slot: Slot) -> tuple[torch.Tensor, ...]:
    flat = grad.reshape(-1)
    if slot.slots == 1:
        return (flat,)
    zero = grad.new_zeros(1)  # expanded: the zeros of other slots take no memory before they are put together
    after = slot.slots - 1 - slot.at
    return zero.expand(slot.at * len(flat)), flat, zero.expand(after * len(flat))


def apart(total: torch.Tensor, grads: Sequence[torch.Tensor], slots: Sequence[Slot]) -> None:
    """Give every gradient its sum, in place."""
    if total is grads[0]:
        return
    first = 0
    for grad, slot in zip(grads, slots, strict=True):
        n = grad.numel()
        grad.copy_(total.narrow(0, first + slot.at * n, n).view_as(grad))
        first += slot.slots * n


class _Backward(torch.autograd.Function):
    """A function of the parameters whose backward gives gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *_: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.empty((), device=grads[0].device)  # where autograd waits for what made the gradients

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        grads = ctx.grads
        # Autograd takes a tensor that no one else has; one that somebody has, it copies.
        return (None, *(grads.pop(0).detach() for _ in range(len(grads))))


def accumulate(parameters: Sequence[nn.Parameter], grads: list[torch.Tensor]) -> None:
    """Add each gradient to its parameter's `.grad`; one that is given twice gets the sum. Empties `grads`."""
    if parameters:
        with torch.inference_mode(False), torch.enable_grad():
            built = _Backward.apply(grads, *parameters)  # type: ignore[no-untyped-call]
            built.backward(built.detach())
