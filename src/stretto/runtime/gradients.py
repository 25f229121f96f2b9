"""Gradients, given to autograd, which adds them to `.grad`.

Autograd adds gradients to `.grad` as a backward of the model does. So hooks on parameters act as they do
there, once a step: those of `register_hook` see the full gradient of the step and may change it, those of
`register_post_accumulate_grad_hook` and `register_multi_grad_hook` follow. No gradient is copied where
autograd would not copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stretto.ir.kept import largest_part, part_number
from stretto.runtime.part_gradient_adapter import PartGradient
from stretto.runtime.rank_tensors import RankTensors


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


def give(tensors: RankTensors, grads: dict[int, torch.Tensor]) -> list[nn.Parameter]:
    """Add gradients, by the indices of their parameters in the job, to `.grad` of those that are still
    trained, which are returned. Takes them out of `grads`."""
    for k in [k for k in grads if tensors.plan.job.parameters[k].slot is not None]:
        grads.update(_of_bucket(tensors, k, grads.pop(k)))
    trained = [k for k in sorted(grads) if tensors.parameters[k].requires_grad]  # not frozen since
    kept = [tensors.parameters[k] for k in trained]
    accumulate(kept, [_of_part(tensors, k, grads.pop(k)) for k in trained])
    for k, parameter in zip(trained, kept, strict=True):
        if parameter.grad is not None:
            parameter.grad = _of_part(tensors, k, parameter.grad)
    return kept


def trained_of(tensors: RankTensors, k: int, grad: torch.Tensor) -> list[torch.Tensor]:
    """What of a gradient is of parameters that are still trained; k: as of `_of_bucket`."""
    in_bucket = tensors.plan.job.parameters[k].slot is not None
    grads = _of_bucket(tensors, k, grad) if in_bucket else {k: grad}
    return [one for at, one in grads.items() if tensors.parameters[at].requires_grad]


def _of_bucket(tensors: RankTensors, k: int, row: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of the row of gradients of a bucket, those of the parameters that this rank keeps, by index in the job.
    k: of the parameter under whose name the row is known."""
    job = tensors.plan.job
    result: dict[str, int] = {}
    for at in sorted(tensors.parameters):
        known = job.parameters[at]
        here = part_number(job, known, tensors.coordinates) == largest_part(known)
        if known.slot is not None and known.kept_as == job.parameters[k].kept_as and here:
            result.setdefault(known.tied_to, at)
    return {at: tensors.rows_here(job.parameters[at], row) for at in result.values()}


def _of_part(tensors: RankTensors, k: int, grad: torch.Tensor) -> torch.Tensor:
    known = tensors.plan.job.parameters[k]
    if known.kept and grad.shape != tensors.parameters[k].shape:
        grad = tensors.rows_here(known, grad)
    return grad.as_subclass(PartGradient) if known.tied_to in tensors.cut_along else grad
