"""Ops that are taken apart where parts of them can be computed on slices, and the op itself cannot.

Each function emits, by `sub`, ops at global shapes that make what the op makes, and returns their names; None
where it does not know how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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


DECOMPOSED: dict[str, Decompose] = {
    "aten.addmm.default": _addmm,
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
}
