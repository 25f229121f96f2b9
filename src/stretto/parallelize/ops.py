"""The communication ops as a model's code calls them while it is captured, each with its gradient.

They have shapes and no kernels, and need no process group. In the captured graph each is a start and a wait
(`stretto.ir.program` lists them), which the runtime carries out. They are conjugate pairs, as in Megatron-LM
(arXiv 1909.08053 and 2205.05198). Ranks have *equal* values, or *parts* (a slice, or a partial of a sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    IN_PROGRAMS,
    KINDS,
    REDUCE_SCATTER,
    Kind,
)

NAMESPACE = "stretto"

Axes = Sequence[tuple[str, int]]

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _kind in IN_PROGRAMS:
    _how = "str op, " if _kind.reductions else ""
    _library.define(f"{_kind.name}(Tensor x, {_how}str axis, int size) -> Tensor")
_library.define("wait(Tensor started) -> Tensor")
_library.define("axis_index(Tensor like, str axis, int size) -> Tensor")
_library.define("axis_chunk(Tensor x, int dim, str axis, int size) -> Tensor")


def _started(kind: Kind, x: Tensor, *arguments: Any) -> Tensor:
    shape = kind.shape(x.shape, arguments[-1], arguments[0] if kind.reductions else "")
    assert shape is not None, f"{kind.name} of a tensor of shape {list(x.shape)}"
    return x.new_empty(shape)


def _axis_chunk(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    # Strides of the slice, though the op returns a tensor of its own here: a functional graph has no views of
    # ops that it does not know. The runtime makes it the view that it is.
    shape = [n // size if d == dim else n for d, n in enumerate(x.shape)]
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device)


_fakes: dict[str, Callable[..., Tensor]] = {
    **{kind.name: partial(_started, kind) for kind in IN_PROGRAMS},
    "wait": torch.empty_like,
    "axis_index": lambda like, axis, size: torch.empty((), dtype=torch.int64, device=like.device),
    "axis_chunk": _axis_chunk,
}
for _name, _shapes in _fakes.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shapes, lib=_library)

_calls = getattr(torch.ops, NAMESPACE)


def index(like: Tensor, axis: str, size: int) -> Tensor:
    """This rank's coordinate on the axis: a 0-d int64 tensor on the device of `like`."""
    _check_axis("the rank's coordinate", axis, size)
    made: Tensor = _calls.axis_index(like, axis, size)
    return made


def communicate(kind: Kind, x: Tensor, axis: str, size: int, op: str = "") -> Tensor:
    """Any collective, start and wait; no gradient. Raises ValueError for a shape or an axis that is wrong."""
    _check_axis(kind.name, axis, size)
    if kind.shape(x.shape, size, op) is None:
        needs = f"a dim 0 that is a multiple of {size}" if x.dim() else "a dim 0: write x.unsqueeze(0)"
        raise ValueError(f"{kind.name} over {axis} = {size}: a tensor of shape {list(x.shape)} needs {needs}")
    how = (op,) if kind.reductions else ()
    made: Tensor = _calls.wait(getattr(_calls, kind.name)(x.contiguous(), *how, axis, size))
    return made


def all_reduce(x: Tensor, axis: str, size: int, op: str = "sum") -> Tensor:
    """The sum (or "max") over the axis; no gradient."""
    return communicate(ALL_REDUCE, x, axis, size, op)


def all_gather(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """Slices along `dim` put together, in the order of ranks; no gradient. Collectives work along the first
    dim: with something before `dim`, the parts are put into their places by a copy."""
    dim = _dim_of(x, dim)
    made = communicate(ALL_GATHER, x, axis, size)
    if dim == 0:
        return made
    full = [n * size if d == dim else n for d, n in enumerate(x.shape)]
    if math.prod(x.shape[:dim]) == 1:
        return made.view(full)
    return made.view(size, *x.shape).movedim(0, dim).reshape(full)


def reduce_scatter(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """The sum over the axis, of which each rank keeps its slice along `dim`; no gradient."""
    x, dim = x.contiguous(), _dim_of(x, dim)
    check_divides(x.shape[dim], size, axis, f"dim {dim} of a tensor of shape {list(x.shape)}")
    part = x.shape[dim] // size
    shape = [part if d == dim else n for d, n in enumerate(x.shape)]
    if dim and math.prod(x.shape[:dim]) > 1:
        x = x.view(*x.shape[:dim], size, part, *x.shape[dim + 1 :]).movedim(dim, 0)
    first = (size * shape[0], *shape[1:])
    return communicate(REDUCE_SCATTER, x.reshape(first), axis, size, "sum")


def own_chunk(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """This rank's slice along `dim`; no gradient."""
    _check_axis("a rank's slice", axis, size)
    dim = _dim_of(x, dim)
    check_divides(x.shape[dim], size, axis, f"dim {dim} of a tensor of shape {list(x.shape)}")
    made: Tensor = _calls.axis_chunk(x, dim, axis, size)
    return made


def check_divides(n: int, size: int, axis: str, what: str) -> None:
    """Raises ValueError, in a user's words, when `size` ranks cannot have equal parts of `n`."""
    if n % size:
        raise ValueError(
            f"{what} cannot be sharded equally over {axis} = {size}: {n} is not a multiple of it; change the "
            "one or the other"
        )


def _dim_of(x: Tensor, dim: int) -> int:
    if not x.dim():
        raise ValueError("ranks share a tensor along a dim, and this one has none; write x.unsqueeze(0)")
    return dim % x.dim()


_axes: ContextVar[Axes | None] = ContextVar("axes", default=None)


@contextmanager
def of_job(axes: Axes) -> Iterator[None]:
    """While the context lasts, code may communicate over these axes alone, the job's."""
    before = _axes.set(axes)
    try:
        yield
    finally:
        _axes.reset(before)


def _check_axis(what: str, axis: str, size: int) -> None:
    axes = _axes.get()
    if axes is not None and (axis, size) not in axes:
        raise ValueError(f"{what} is over {axis} = {size}, and the job has {dict(axes)} besides pp: name one")


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, size: int, kind: Kind) -> Tensor:
        ctx.back = KINDS[kind.gradient], axis, size
        return communicate(kind, x, axis, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kind, axis, size = ctx.back
        return communicate(kind, grad, axis, size), None, None, None


def exchange(x: Tensor, axis: str, size: int, kind: Kind = ALL_TO_ALL) -> Tensor:
    """Part k of dim 0 goes to rank k; what comes is in the order of ranks. Its gradient goes back so. kind:
    another that sums nothing."""
    made: Tensor = _Exchange.apply(x, axis, size, kind)  # type: ignore[no-untyped-call]
    return made
