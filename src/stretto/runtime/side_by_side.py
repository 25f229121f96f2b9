"""Gradients that are summed together, side by side in one tensor.

A gradient that all ranks of an axis sum has one slot. Of one whose parts a few ranks share, each part has a
slot, so that one sum over the axis adds up the copies of every part: a rank puts zeros into the others'
slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from stretto.ir.program import Job, Parameter


class Slot(NamedTuple):
    """This rank's slot of a gradient, and how many there are."""

    at: int
    slots: int


def slot_of(job: Job, parameter: Parameter, axis: str, coordinates: Mapping[str, int]) -> Slot:
    """Of a parameter's gradient in a sum over an axis (or a communicator of ties)."""
    slots = parameter.slots(axis, job.size(axis))
    found = (s.part(coordinates[axis]) for s in parameter.shards if s.axis == axis and slots > 1)
    return Slot(next(found, 0), slots)


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
