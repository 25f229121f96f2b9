"""The communication ops as a model's code calls them while it is captured, each with its gradient.

They have shapes and no kernels, and need no process group. In the captured graph each is a start and a wait
(`stretto.ir.program` lists them), which the runtime carries out. They are conjugate pairs, as in Megatron-LM
(arXiv 1909.08053 and 2205.05198). Ranks have *equal* values, or *parts* (a slice, or a partial of a sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from stretto.parallelize.chunked import Chunked
from stretto.parallelize.unseen import ALONE, is_now, unseen

NAMESPACE = "stretto"

OneToOne = Callable[[Tensor], Tensor]

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
COLLECTIVES = tuple(kind for kind in IN_PROGRAMS if not kind.sized)
"""What code may start: an op's schema has no word for sizes."""

for _kind in COLLECTIVES:
    _how = "str op, " if _kind.has_how else ""
    _library.define(f"{_kind.name}(Tensor x, {_how}str axis, int size) -> Tensor")
_library.define("wait(Tensor started) -> Tensor")
_library.define("axis_index(Tensor like, str axis, int size) -> Tensor")
_library.define("axis_chunk(Tensor x, int dim, str axis, int size) -> Tensor")


def _started(kind: Kind, x: Tensor, *arguments: Any) -> Tensor:
    shape = kind.shape(x.shape, arguments[-1], arguments[0] if kind.has_how else "")
    assert shape is not None, f"{kind.name} of a tensor of shape {list(x.shape)}"
    return x.new_empty(shape)


def _axis_chunk(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    # Strides of the slice, though the op returns a tensor of its own here: a functional graph has no views of
    # ops that it does not know. The runtime makes it the view that it is.
    shape = [n // size if d == dim else n for d, n in enumerate(x.shape)]
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device)


_fakes: dict[str, Callable[..., Tensor]] = {
    **{kind.name: partial(_started, kind) for kind in COLLECTIVES},
    "wait": torch.empty_like,
    "axis_index": lambda like, axis, size: torch.empty((), dtype=torch.int64, device=like.device),
    "axis_chunk": _axis_chunk,
}
for _name, _shapes in _fakes.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shapes, lib=_library)

_calls = getattr(torch.ops, NAMESPACE)


@unseen
def index(like: Tensor, axis: str, size: int) -> Tensor:
    """This rank's coordinate on the axis: a 0-d int64 tensor on the device of `like`."""
    made: Tensor = _calls.axis_index(like, axis, size)
    return made


@unseen
def communicate(kind: Kind, x: Tensor, axis: str, size: int, op: str = "") -> Tensor:
    """Any collective, start and wait; no gradient."""
    how = (op,) if kind.has_how else ()
    made: Tensor = _calls.wait(getattr(_calls, kind.name)(x.contiguous(), *how, axis, size))
    return made


@unseen
def all_reduce(x: Tensor, axis: str, size: int, op: str = "sum") -> Tensor:
    """The sum (or "max") over the axis; no gradient."""
    return communicate(ALL_REDUCE, x, axis, size, op)


@unseen
def all_gather(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """Slices along `dim` put together, in the order of ranks; no gradient. Collectives work along the first
    dim: with something before `dim`, the parts are put into their places by a copy."""
    dim %= x.dim()
    made = communicate(ALL_GATHER, x, axis, size)
    if dim == 0:
        return made
    full = [n * size if d == dim else n for d, n in enumerate(x.shape)]
    if math.prod(x.shape[:dim]) == 1:
        return made.view(full)
    return made.view(size, *x.shape).movedim(0, dim).reshape(full)


@unseen
def reduce_scatter(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """The sum over the axis, of which each rank keeps its slice along `dim`; no gradient."""
    x, dim = x.contiguous(), dim % x.dim()
    check_divides(x.shape[dim], size, axis, f"dim {dim} of a tensor of shape {list(x.shape)}")
    part = x.shape[dim] // size
    shape = [part if d == dim else n for d, n in enumerate(x.shape)]
    if dim and math.prod(x.shape[:dim]) > 1:
        x = x.view(*x.shape[:dim], size, part, *x.shape[dim + 1 :]).movedim(dim, 0)
    first = (size * shape[0], *shape[1:])
    return communicate(REDUCE_SCATTER, x.reshape(first), axis, size, "sum")


@unseen
def own_chunk(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """This rank's slice along `dim`; no gradient."""
    dim %= x.dim()
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


class _OneToOnePair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: OneToOne, back: OneToOne) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


@unseen
def _pair(x: Tensor, there: OneToOne, back: OneToOne) -> Tensor:
    """Of a sequence in chunks, each chunk communicates by itself."""
    if is_now(ALONE):
        return x
    if type(x) is Chunked:
        return x.each(lambda chunk: _pair(chunk, there, back))
    made: Tensor = _OneToOnePair.apply(x, there, back)  # type: ignore[no-untyped-call]
    return made


def copy(x: Tensor, axis: str, size: int) -> Tensor:
    """Equal values, from here on used in parts."""
    return _pair(x, lambda t: t.view_as(t), lambda grad: all_reduce(grad, axis, size))


def reduce(x: Tensor, axis: str, size: int) -> Tensor:
    """Partials become their sum, equal on all ranks."""
    return _pair(x, lambda t: all_reduce(t, axis, size), lambda grad: grad)


def gather(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """Slices along `dim` become the full tensor, from here on used in parts."""
    return _pair(x, lambda t: all_gather(t, dim, axis, size), lambda g: reduce_scatter(g, dim, axis, size))


def scatter(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """Partials become slices of their sum along `dim`."""
    return _pair(x, lambda t: reduce_scatter(t, dim, axis, size), lambda g: all_gather(g, dim, axis, size))


def exchange(x: Tensor, axis: str, size: int, kind: Kind = ALL_TO_ALL) -> Tensor:
    """Part k of dim 0 goes to rank k; what comes is in the order of ranks. Its gradient goes back so. kind:
    another that sums nothing."""
    if kind.shape(x.shape, size) is None:
        check_divides(x.shape[0], size, axis, f"dim 0 of a tensor of shape {list(x.shape)}")
    back = KINDS[kind.gradient]
    return _pair(
        x, lambda t: communicate(kind, t, axis, size), lambda grad: communicate(back, grad, axis, size)
    )


def chunk(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """Equal values become slices along `dim`."""
    return _pair(x, lambda t: own_chunk(t, dim, axis, size), lambda grad: all_gather(grad, dim, axis, size))


def collect(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    """Slices along `dim` become the full tensor, equal on all ranks, and used equally."""
    return _pair(x, lambda t: all_gather(t, dim, axis, size), lambda grad: own_chunk(grad, dim, axis, size))
