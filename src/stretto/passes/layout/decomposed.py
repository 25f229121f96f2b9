"""Ops that are taken apart where parts of them can be computed on slices, and the op itself cannot.

Each function emits, by `sub`, ops at global shapes that make what the op makes, and returns their names; None
where it does not know how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from stretto.ir.dims import reduced
from stretto.ir.program import Arg, Const, Op, Ref, TensorSpec


class Sub(Protocol):
    """Emits one op at global shapes; returns its value."""

    def __call__(self, target: str, *args: Arg, **kwargs: Arg) -> str: ...


Decompose = Callable[[Op, Sequence[TensorSpec], Sub], Sequence[str] | None]


def _addmm(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    if op.kwargs:
        return None
    bias, left, right = op.args
    return (sub("aten.add.Tensor", Ref(sub("aten.mm.default", left, right)), bias),)


def _log_softmax(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    x, dim, to_float = op.args
    if to_float:
        return None
    low = sub("aten.sub.Tensor", x, Ref(sub("aten.amax.default", x, (dim,), True)))
    total = sub("aten.sum.dim_IntList", Ref(sub("aten.exp.default", Ref(low))), (dim,), True)
    return (sub("aten.sub.Tensor", Ref(low), Ref(sub("aten.log.default", Ref(total)))),)


def _softmax(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    x, dim, to_float = op.args
    if to_float:
        return None
    low = sub("aten.sub.Tensor", x, Ref(sub("aten.amax.default", x, (dim,), True)))
    part = Ref(sub("aten.exp.default", Ref(low)))
    return (sub("aten.div.Tensor", part, Ref(sub("aten.sum.dim_IntList", part, (dim,), True))),)


def _softmax_backward(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    grad, out, dim, _ = op.args
    if op.outputs[0] is None or op.outputs[0].dtype != specs[0].dtype:
        return None
    own = Ref(sub("aten.mul.Tensor", grad, out))
    total = sub("aten.mul.Tensor", out, Ref(sub("aten.sum.dim_IntList", own, (dim,), True)))
    return (sub("aten.sub.Tensor", own, Ref(total)),)


def _log_softmax_backward(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    grad, out, dim, _ = op.args
    if op.outputs[0] is None or op.outputs[0].dtype != specs[0].dtype:
        return None
    total = sub("aten.sum.dim_IntList", grad, (dim,), True)
    soft = sub("aten.mul.Tensor", Ref(sub("aten.exp.default", out)), Ref(total))
    return (sub("aten.sub.Tensor", grad, Ref(soft)),)


def _targets(target: Arg, ignored: int, sub: Sub) -> tuple[str, str]:
    """Targets with 0 in the places of those that are ignored, and which these are."""
    which = sub("aten.eq.Scalar", target, ignored)
    return sub("aten.masked_fill.Scalar", target, Ref(which), 0), which


def _nll(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    logp, target, weight, reduction, ignored = op.args
    if weight is not None or reduction == 0 or len(specs[0].shape) != 2:
        return None
    safe, which = _targets(target, ignored, sub)
    picked = sub("aten.gather.default", logp, 1, Ref(sub("aten.unsqueeze.default", Ref(safe), 1)))
    picked = sub("aten.squeeze.dim", Ref(picked), 1)
    kept = sub("aten.masked_fill.Scalar", Ref(picked), Ref(which), 0.0)
    loss = sub("aten.neg.default", Ref(sub("aten.sum.default", Ref(kept))))
    counts = sub("aten.bitwise_not.default", Ref(which))
    counts = sub("aten._to_copy.default", Ref(counts), dtype=Const("dtype", specs[0].dtype))
    total = sub("aten.sum.default", Ref(counts))
    return (loss if reduction == 2 else sub("aten.div.Tensor", Ref(loss), Ref(total))), total


def _nll_backward(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    grad, logp, target, weight, reduction, ignored, total = op.args
    if weight is not None or reduction == 0 or len(specs[1].shape) != 2:
        return None
    safe, which = _targets(target, ignored, sub)
    one = sub("aten.neg.default", grad)
    one = one if reduction == 2 else sub("aten.div.Tensor", Ref(one), total)
    each = sub("aten.expand.default", Ref(one), specs[2].shape)
    rows = sub("aten.masked_fill.Scalar", Ref(each), Ref(which), 0.0)
    zeros = sub("aten.zeros_like.default", logp)
    index, source = (Ref(sub("aten.unsqueeze.default", Ref(x), 1)) for x in (safe, rows))
    return (sub("aten.scatter_add.default", Ref(zeros), 1, index, source),)


def _over(op: Op, specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], bool, float]:
    """Of a reduction: its dims, whether they stay as 1, how many elements make one."""
    shape, made = specs[0].shape, op.outputs[0]
    dims = tuple(sorted(reduced(op, len(shape))))
    return dims, made is not None and len(made.shape) == len(shape), math.prod(shape[d] for d in dims)


def _in_own_dtype(op: Op, specs: Sequence[TensorSpec]) -> bool:
    """Whether all is of one dtype, in which sums are computed: kernels add up halves in float32."""
    dtypes = {spec.dtype for spec in (*specs, *op.outputs) if spec is not None}
    return len(dtypes) == 1 and dtypes <= {"float32", "float64"}


def _mean(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    dims, keep, count = _over(op, specs)
    if not _in_own_dtype(op, specs):
        return None
    return (sub("aten.div.Tensor", Ref(sub("aten.sum.dim_IntList", op.args[0], dims, keep)), count),)


def _highest(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    dims, keep, _ = _over(op, specs)
    return (sub("aten.amax.default", op.args[0], dims, keep),)


def _lowest(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    dims, keep, _ = _over(op, specs)
    if not _in_own_dtype(op, specs):
        return None
    high = sub("aten.amax.default", Ref(sub("aten.neg.default", op.args[0])), dims, keep)
    return (sub("aten.neg.default", Ref(high)),)


def _norm(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    """Of order 2, 1 or infinity."""
    order, (dims, keep, _) = op.args[1] if len(op.args) > 1 else 2, _over(op, specs)
    if order not in (1, 2, math.inf) or not _in_own_dtype(op, specs):
        return None
    if order == 2:
        squares = sub("aten.mul.Tensor", op.args[0], op.args[0])
        return (sub("aten.sqrt.default", Ref(sub("aten.sum.dim_IntList", Ref(squares), dims, keep))),)
    size = Ref(sub("aten.abs.default", op.args[0]))
    return (sub("aten.sum.dim_IntList" if order == 1 else "aten.amax.default", size, dims, keep),)


def _log_sum_exp(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    dims, keep, _ = _over(op, specs)
    if not _in_own_dtype(op, specs):
        return None
    high = sub("aten.amax.default", op.args[0], dims, True)
    endless = sub("aten.eq.Scalar", Ref(sub("aten.abs.default", Ref(high))), math.inf)
    high = sub("aten.masked_fill.Scalar", Ref(high), Ref(endless), 0.0)
    low = sub("aten.exp.default", Ref(sub("aten.sub.Tensor", op.args[0], Ref(high))))
    total = sub("aten.log.default", Ref(sub("aten.sum.dim_IntList", Ref(low), dims, True)))
    made = sub("aten.add.Tensor", Ref(total), Ref(high))
    return (made if keep else sub("aten.squeeze.dims", Ref(made), dims),)


def _place_of_highest(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    """The first place where the highest is, the last where nothing is equal to it (NaN)."""
    dims, keep, count = _over(op, specs)
    if len(op.args) < 2 or op.args[1] is None:
        return None
    (dim,) = dims
    high = Ref(sub("aten.amax.default", op.args[0], dims, True))
    length, behind = int(count), len(specs[0].shape) - dim - 1
    like = {"dtype": Const("dtype", "int64"), "device": Const("device", "job")}
    place = sub("aten.arange.default", length, **like)
    place = sub("aten.view.default", Ref(place), (length, *(1,) * behind))
    beyond = sub("aten.full.default", (), length - 1, **like)
    is_it = Ref(sub("aten.eq.Tensor", op.args[0], high))
    first = sub("aten.neg.default", Ref(sub("aten.where.self", is_it, Ref(place), Ref(beyond))))
    return (sub("aten.neg.default", Ref(sub("aten.amax.default", Ref(first), dims, keep))),)


def _weight_norm(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    """Rows of a direction, which have the lengths that are given."""
    direction, length = op.args[:2]
    dim = op.args[2] if len(op.args) > 2 else 0
    others = tuple(d for d in range(len(specs[0].shape)) if d != dim)
    if not _in_own_dtype(op, specs):
        return None
    squares = Ref(sub("aten.mul.Tensor", direction, direction))
    norm = sub("aten.sqrt.default", Ref(sub("aten.sum.dim_IntList", squares, others, True)))
    scale = Ref(sub("aten.div.Tensor", length, Ref(norm)))
    return sub("aten.mul.Tensor", direction, scale), norm


def _weight_norm_backward(op: Op, specs: Sequence[TensorSpec], sub: Sub) -> Sequence[str] | None:
    grad, direction, length, norm, dim = op.args
    others = tuple(d for d in range(len(specs[0].shape)) if d != dim)
    if not _in_own_dtype(op, specs):
        return None
    along = Ref(sub("aten.sum.dim_IntList", Ref(sub("aten.mul.Tensor", grad, direction)), others, True))
    of_length = Ref(sub("aten.div.Tensor", along, norm))
    unit = Ref(sub("aten.div.Tensor", direction, norm))
    across = Ref(sub("aten.sub.Tensor", grad, Ref(sub("aten.mul.Tensor", unit, of_length))))
    scale = Ref(sub("aten.div.Tensor", length, norm))
    return sub("aten.mul.Tensor", across, scale), of_length.name


DECOMPOSED: dict[str, Decompose] = {
    "aten._weight_norm_interface.default": _weight_norm,
    "aten._weight_norm_interface_backward.default": _weight_norm_backward,
    "aten.logsumexp.default": _log_sum_exp,
    "aten.argmax.default": _place_of_highest,
    **dict.fromkeys(("aten.mean.default", "aten.mean.dim"), _mean),
    "aten.max.default": _highest,
    **dict.fromkeys(("aten.min.default", "aten.amin.default"), _lowest),
    "aten.linalg_vector_norm.default": _norm,
    "aten.addmm.default": _addmm,
    "aten._softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
}
