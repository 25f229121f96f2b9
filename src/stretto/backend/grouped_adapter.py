"""Ops of mixtures of experts that a captured graph can contain: products of groups of rows.

    grouped_mm(x_RD, w_EDM, ends_E)    rows ends[e - 1] to ends[e] of x times w[e]; zero behind the last end
    grouped_mm_t(x_RD, y_RM, ends_E)   for each group x' y, (E, D, M): the gradient of w
    own(x, axis)                       x, whose rows each rank of an axis puts in an order of its own (a view)

The number of rows is fixed, and how many each group has is data: so the shapes of a step do not depend on
where a router sends tokens. An accelerator has one kernel for it (`torch.nn.functional.grouped_mm`, in
bfloat16); elsewhere a product a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stretto.errors import UsageError

_library: Any = torch.library.Library("stretto_moe", "DEF")  # type: ignore[no-untyped-call]
_library.define("grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor")
_library.define("grouped_mm_t(Tensor x, Tensor y, Tensor ends) -> Tensor")
_library.define("own(Tensor(a) x, str axis) -> Tensor(a)")
_library.impl("own", lambda x, axis: x.view_as(x), "CompositeExplicitAutograd")


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    if ends.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "cuda_graph=True replays one recorded step, and the host must know where each expert's rows end, "
            "but in bfloat16: train in bfloat16 (precision = 'bf16'), give experts a capacity, or leave "
            "cuda_graph out"
        )
    result = ends.tolist()
    return list(zip([0, *result], result))


def _one_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if _one_kernel(x):
        built = F.grouped_mm(x, w, offs=ends.to(torch.int32))
        behind = torch.arange(x.shape[0], device=x.device) >= ends[-1]
        return built.masked_fill(behind.unsqueeze(1), 0.0)
    built = x.new_zeros(x.shape[0], w.shape[2])
    for e, (start, end) in enumerate(_bounds(ends)):
        torch.mm(x[start:end], w[e], out=built[start:end])
    return built


def _mm_t(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    if _one_kernel(x):
        return F.grouped_mm(x.t(), y, offs=ends.to(torch.int32))
    built = x.new_empty(ends.shape[0], x.shape[1], y.shape[1])
    for e, (start, end) in enumerate(_bounds(ends)):
        torch.mm(x[start:end].t(), y[start:end], out=built[e])
    return built


for _name, _run, _shape in (
    ("grouped_mm", _mm, lambda x, w, ends: x.new_empty(x.shape[0], w.shape[2])),
    ("grouped_mm_t", _mm_t, lambda x, y, ends: x.new_empty(ends.shape[0], x.shape[1], y.shape[1])),
):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"stretto_moe::{_name}", _shape, lib=_library)

_calls = torch.ops.stretto_moe


@register_flop_formula([_calls.grouped_mm, _calls.grouped_mm_t])
def _flops(x: Any, other: Any, ends: Any, *, out_shape: Any = None, **_: Any) -> int:
    return 2 * int(math.prod(x)) * int(out_shape[-1])


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        built: Tensor = _calls.grouped_mm(x, w, ends)
        return built

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = _calls.grouped_mm(grad, w.transpose(1, 2), ends)
        return of_x, _calls.grouped_mm_t(x, grad, ends), None


def grouped_mm(x_RD: Tensor, w_EDM: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of x by groups, each times its own matrix: (R, M). ends_E: where each group's rows end; rows
    behind the last end become zero."""
    built: Tensor = _Grouped.apply(x_RD, w_EDM, ends_E)  # type: ignore[no-untyped-call]
    return built
