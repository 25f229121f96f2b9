"""What each op does with the dims of its tensors: the one table of rules that proofs and passes read.

A rule gives every dim of every tensor that an op reads or makes a *label*. Dims with one label are cut
together: a rank that has a part of one has the same part of all. What a rule says of labels:

    whole      the op needs all of it (the dim of a softmax): it cannot be cut
    summed     the op adds up over it (a matrix product's inner dim): from parts it makes addends
    linear     sets of operands in which the op is linear: from addends in all of one set, it makes addends

A size of 1 that is repeated to fit another operand has no label (None): it is not cut with that operand.

Rules are about values, not about placements; `stretto.ir.placements` draws the conclusions. They are those of
the ops' definitions, as DTensor's sharding strategies are (torch/distributed/tensor/_ops). An op that has no
rule may still be computed on values that are whole and equal everywhere. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.ir import dims_attention, dims_moved
from stretto.ir.dim_labels import Dims, broadcast, dim_of, each, labels_of, operands, together
from stretto.ir.op_names import (
    ADDING,
    ALONG_ONE,
    ATTENTION,
    ATTENTION_BACKWARD,
    COPIES,
    FIRST_LINEAR,
    LINEAR_ALONG_ONE,
    LINEAR_REDUCTIONS,
    POINTWISE,
    PRODUCTS,
    QUOTIENTS,
    REDUCTION_SETTING,
    REDUCTIONS,
    SCALED,
    SUMS,
)
from stretto.ir.program import Op, TensorSpec

Rule = Callable[[Op, Sequence[TensorSpec]], "Dims | None"]


def dims_of(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """The op's rule; specs: of its `operands`. None for an op that has none."""
    if op.target in POINTWISE:
        return _pointwise(op, specs)
    if op.target in REDUCTIONS:
        return _reduction(op, specs)
    if op.target in ALONG_ONE:
        return _along_one(op, specs)
    if op.target in ATTENTION:
        return dims_attention.attention(op, specs)
    if op.target in ATTENTION_BACKWARD:
        return dims_attention.attention_backward(op, specs)
    rule = RULES.get(op.target)
    return None if rule is None else rule(op, specs)


def _pointwise(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    made = op.outputs[0]
    if made is None:
        return None
    shape = made.shape
    if op.target in REDUCTION_SETTING and any(len(s.shape) > len(shape) for s in specs):
        return None
    inputs = tuple(broadcast(spec, shape) for spec in specs)
    linear: tuple[frozenset[int], ...] = ()
    if op.target in COPIES or op.target in SCALED:
        # What becomes an integer or a truth value is not linear any more.
        linear = each(0) if made.dtype.startswith(("float", "bfloat", "complex")) else ()
    elif op.target in SUMS:
        linear = together(2) if len(specs) == 2 else ()
    elif op.target in PRODUCTS:
        linear = each(0, 1) if len(specs) == 2 else each(0)
    elif op.target in QUOTIENTS or op.target in FIRST_LINEAR:
        linear = each(0)
    elif op.target == "aten.where.self":
        linear = (frozenset((1, 2)),)
    elif op.target == "aten.masked_fill.Scalar" and op.args[2] == 0:
        linear = each(0)
    return Dims(inputs, tuple(labels_of(len(shape)) for _ in op.outputs), linear=linear)


def _reduced(op: Op, count: int) -> frozenset[int]:
    """The dims that a reduction reduces."""
    at = 2 if op.target in ("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim") else 1
    if op.target in ("aten.median.dim", "aten.mode.default", "aten.kthvalue.default"):
        at = 2 if op.target == "aten.kthvalue.default" else 1
    if op.target == "aten.norm.Scalar":
        return frozenset(range(count))
    given = op.args[at] if len(op.args) > at else dict(op.kwargs).get("dim")
    if given is None or given == () or (op.target.endswith(".default") and op.target.split(".")[1] in (
        "sum", "mean", "max", "min", "prod", "any", "all", "nansum"
    ) and not isinstance(given, (int, tuple))):  # fmt: skip
        return frozenset(range(count))
    dims = given if isinstance(given, tuple) else (given,)
    return frozenset(dim_of(d, count) for d in dims)


def _reduction(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    spec, made = specs[0], op.outputs[0]
    if made is None:
        return None
    count = len(spec.shape)
    reduced = _reduced(op, count)
    labels = labels_of(count)
    kept = len(made.shape) == count
    out = tuple((None if d in reduced else d) if kept else d for d in labels if kept or d not in reduced)
    adding = op.target in ADDING
    return Dims(
        (labels, *(() for _ in specs[1:])),
        tuple(out for _ in op.outputs),
        whole=frozenset() if adding else reduced,
        summed=reduced if adding else frozenset(),
        linear=each(0) if op.target in LINEAR_REDUCTIONS else (),
    )


def _along_one(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    count = len(specs[0].shape)
    at = ALONG_ONE[op.target]
    given = op.args[at] if len(op.args) > at else dict(op.kwargs).get("dim", -1)
    labels = labels_of(count)
    position = LINEAR_ALONG_ONE.get(op.target)
    return Dims(
        tuple(labels[: len(spec.shape)] for spec in specs),
        tuple(labels for _ in op.outputs),
        whole=frozenset((dim_of(given, count),)) if count else frozenset(),
        linear=() if position is None else each(position),
    )


CONTRACTIONS = {
    "mm": ("ik", "kj", "ij"),
    "bmm": ("bik", "bkj", "bij"),
    "mv": ("ik", "k", "i"),
    "dot": ("k", "k", ""),
}
"""Products of two operands, which are summed over k, as einsum writes them."""

ADDED_TO = {"addmm": "mm", "baddbmm": "bmm"}
"""The same with an operand before them, which is added to the product."""


def _product(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    name = op.target.split(".")[1]
    letters = CONTRACTIONS[ADDED_TO.get(name, name)]
    left, right, made = (tuple(map("ikjb".index, part)) for part in letters)
    summed = frozenset((1,))
    result = op.outputs[0]
    if name not in ADDED_TO or result is None:
        return Dims((left, right), (made,), summed=summed, linear=each(0, 1))
    bias = tuple(None if d is None else made[d] for d in broadcast(specs[0], result.shape))
    linear = (frozenset((0, 1)), frozenset((0, 2)))
    return Dims((bias, left, right), (made,), summed=summed, linear=linear, added=frozenset((0,)))


RULES: dict[str, Rule] = {
    **{f"aten.{name}.default": _product for name in (*CONTRACTIONS, *ADDED_TO)},
    **dict.fromkeys(("aten.permute.default", "aten.transpose.int", "aten.t.default"), dims_moved.permute),
    **dict.fromkeys(
        (
            *("aten.slice.Tensor", "aten.slice_backward.default", "aten.flip.default", "aten.roll.default"),
            *("aten.tril.default", "aten.triu.default", "aten.constant_pad_nd.default"),
        ),
        dims_moved.changed,
    ),
    "aten.select.int": dims_moved.select,
    "aten.select_backward.default": dims_moved.select_backward,
    "aten.expand.default": dims_moved.expand,
    "aten.repeat.default": dims_moved.repeat,
    "aten.stack.default": dims_moved.stack,
    "aten.unbind.int": dims_moved.unbind,
    **dict.fromkeys(("aten.slice_scatter.default", "aten.select_scatter.default"), dims_moved.scattered),
    "aten.embedding.default": dims_moved.embedding,
    "aten.embedding_dense_backward.default": dims_moved.embedding_backward,
    **dict.fromkeys(
        (
            *("aten.gather.default", "aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value"),
            "aten.scatter_reduce.two",
        ),
        dims_moved.gather,
    ),
    "aten.index_select.default": dims_moved.index_select,
    "aten.index.Tensor": dims_moved.index,
    **dict.fromkeys(("aten.index_put.default", "aten._index_put_impl.default"), dims_moved.index_put),
    **dict.fromkeys(
        (
            *("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor", "aten.index_add.default"),
            *("aten.index_copy.default", "aten.index_reduce.default"),
        ),
        dims_moved.into_rows,
    ),
    **dict.fromkeys(
        (
            f"aten.{pool}{way}.default"
            for n in (2, 3)
            for pool in (f"avg_pool{n}d", f"max_pool{n}d_with_indices", f"_adaptive_avg_pool{n}d")
            for way in ("", "_backward")
        ),
        dims_moved.image,
    ),
    **dict.fromkeys(("aten.native_layer_norm.default", "aten._fused_rms_norm.default"), dims_attention.norm),
    **dict.fromkeys(
        ("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default"),
        dims_attention.norm_backward,
    ),
    "aten.topk.default": dims_moved.topk,
    **dict.fromkeys(("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"), dims_attention.nll),
    **dict.fromkeys(
        ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"), dims_attention.nll_backward
    ),
}


__all__ = ["Dims", "dims_of", "operands"]
