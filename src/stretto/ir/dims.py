"""What each op does with the dims of its tensors: the one table of rules that proofs and passes read.

A rule gives every dim of every tensor that an op reads or makes a *label*. Dims with one label are cut
together: a rank that has a part of one has the same part of all. What a rule says of labels:

    full       the op needs all of it (the dim of a softmax): it cannot be cut
    summed     the op adds up over it (a matrix product's inner dim): from parts it makes partial sums
    linear     sets of operands in which the op is linear: from partial sums in all of one set, it makes
               partial sums

A size of 1 that is repeated to fit another operand has no label (None): it is not cut with that operand.

Rules are about values, not about placements; `stretto.ir.placements` draws the conclusions. They are those of
the ops' definitions, as DTensor's sharding strategies are (torch/distributed/tensor/_ops). An op that has no
rule may still be computed on values that are unsharded and equal everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.ir import dim_rules
from stretto.ir.dim_rules import Dims, broadcast, dim_of, each, labels_of, operands, together
from stretto.ir.op_names import (
    ADDING,
    ALONG_ONE,
    ATTENTION,
    ATTENTION_BACKWARD,
    CONJUGATES,
    COPIES,
    DIM_THIRD,
    FIRST_LINEAR,
    LINEAR_ALONG_ONE,
    LINEAR_REDUCTIONS,
    MIXTURE,
    MIXTURE_BACKWARD,
    OWN,
    POINTWISE,
    PRODUCTS,
    QUOTIENTS,
    REDUCTION_SETTING,
    REDUCTIONS,
    SCALED,
    SUMS,
    names,
)
from stretto.ir.program import Op, TensorSpec

Rule = Callable[[Op, Sequence[TensorSpec]], "Dims | None"]


def dims_of(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """The op's rule; specs: of its `operands`. None for an op that has none."""
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
    if op.target in COPIES or op.target in SCALED or op.target in CONJUGATES:
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
    elif op.target == "aten.where.ScalarOther" and op.args[2] == 0:
        linear = each(1)
    elif op.target == "aten.masked_fill.Scalar" and op.args[2] == 0:
        linear = each(0)
    return Dims(inputs, tuple(labels_of(len(shape)) for _ in op.outputs), linear=linear)


def reduced(op: Op, count: int) -> frozenset[int]:
    """The dims that a reduction reduces."""
    at = 2 if op.target in DIM_THIRD else 1
    given = op.args[at] if len(op.args) > at else dict(op.kwargs).get("dim")
    if given is None or given == () or op.target == "aten.norm.Scalar":
        return frozenset(range(count))
    dims = given if isinstance(given, tuple) else (given,)
    return frozenset(dim_of(d, count) for d in dims)


def _reduction(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    spec, made = specs[0], op.outputs[0]
    if made is None:
        return None
    count = len(spec.shape)
    over = reduced(op, count)
    labels = labels_of(count)
    kept = len(made.shape) == count
    out = tuple((None if d in over else d) if kept else d for d in labels if kept or d not in over)
    adding = op.target in ADDING
    return Dims(
        (labels, *(() for _ in specs[1:])),
        tuple(out for _ in op.outputs),
        full=frozenset() if adding else over,
        summed=over if adding else frozenset(),
        linear=each(0) if op.target in LINEAR_REDUCTIONS else (),
    )


def _along_one(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """Operands and results have all dims, or all but the one along which the op works."""
    at, default = ALONG_ONE[op.target]
    count = max(len(spec.shape) for spec in (*specs, *op.outputs) if spec is not None)
    dim = dim_of(op.args[at] if len(op.args) > at else dict(op.kwargs).get("dim", default), count)
    labels = labels_of(count)
    beside = labels[:dim] + labels[dim + 1 :]
    full = [spec.shape for spec in specs if len(spec.shape) == count]
    if any(spec is not None and len(spec.shape) < count - 1 for spec in (*specs, *op.outputs)):
        return None
    # A scatter reads as much of each dim as its index has.
    unlike = {d for d in beside if len({shape[d] for shape in full}) > 1}
    linear = tuple(range(len(specs))) if op.target == STACK else LINEAR_ALONG_ONE.get(op.target)
    return Dims(
        tuple(labels if len(spec.shape) == count else beside for spec in specs),
        tuple(beside if spec is not None and len(spec.shape) < count else labels for spec in op.outputs),
        full=frozenset({dim, *unlike}) if count else frozenset(),
        linear=() if linear is None else (frozenset(linear),),
    )


STACK = "aten.stack.default"

CONTRACTIONS = {
    "mm": ("ik", "kj", "ij"),
    "bmm": ("bik", "bkj", "bij"),
    "mv": ("ik", "k", "i"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
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


def _grouped(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """Products of groups of rows, where the third operand says each group's end."""
    if len(specs) != 3:
        return None
    rows, inner, group, out = range(4)
    names_of = {
        (2, 3): ((rows, inner), (group, inner, out), (rows, out)),
        # Over a group's rows: what other ranks have of them is of other groups.
        (2, 2): ((inner, rows), (rows, out), (group, inner, out)),
    }
    result = names_of.get((len(specs[0].shape), len(specs[1].shape)))
    if result is None:
        return None
    left, right, made = result
    if op.target == OVER_ROWS:
        left = left[::-1]
    summed = frozenset((inner,)) if rows in made else frozenset[int]()
    return Dims((left, right, (group,)), (made,), frozenset((rows, group)), summed, each(0, 1))


OVER_ROWS = "stretto_moe.grouped_mm_t.default"

GROUPED = (
    OVER_ROWS,
    "stretto_moe.grouped_mm.default",
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
)
"""Products of groups of rows."""


def _grouped_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """Both gradients of such a product, of (rows, matrices, groups' ends, gradient)."""
    rows, inner, group, out = range(4)
    left, right = (rows, inner), (group, inner, out)
    full, summed = frozenset((rows, group)), frozenset((inner, out))
    return Dims((left, right, (group,), (rows, out)), (left, right), full, summed, each(3))


POOLS = " ".join(
    f"{pool}{way}"
    for n in (2, 3)
    for pool in (f"avg_pool{n}d", f"max_pool{n}d_with_indices", f"_adaptive_avg_pool{n}d")
    for way in ("", "_backward")
)
"""Names of ops that pool images."""

RULES: dict[str, Rule] = {
    name: rule
    for text, rule in (
        (" ".join((*CONTRACTIONS, *ADDED_TO)), _product),
        ("permute transpose.int t", dim_rules.permute),
        ("slice.Tensor slice_backward flip roll tril triu constant_pad_nd", dim_rules.changed),
        ("view_as_complex view_as_real", dim_rules.complex_view),
        ("expand", dim_rules.expand),
        ("repeat", dim_rules.repeat),
        ("embedding", dim_rules.embedding),
        ("embedding_dense_backward", dim_rules.embedding_backward),
        ("index_select", dim_rules.index_select),
        ("index.Tensor", dim_rules.index),
        ("index_put _index_put_impl", dim_rules.index_put),
        (
            "index_fill.int_Scalar index_fill.int_Tensor index_add index_copy index_reduce",
            dim_rules.into_rows,
        ),
        (POOLS, dim_rules.image),
        ("native_layer_norm _fused_rms_norm", dim_rules.norm),
        ("native_layer_norm_backward _fused_rms_norm_backward", dim_rules.norm_backward),
        ("nll_loss_forward nll_loss2d_forward", dim_rules.nll),
        ("nll_loss_backward nll_loss2d_backward", dim_rules.nll_backward),
    )
    for name in names(text)
}
for targets, family_rule in (
    (GROUPED, _grouped),
    (("transformers.grouped_mm_fallback_backward.default",), _grouped_backward),
    ((MIXTURE, MIXTURE_BACKWARD), dim_rules.mixture),
    (ATTENTION_BACKWARD, dim_rules.attention_backward),
    (ATTENTION, dim_rules.attention),
    (ALONG_ONE, _along_one),
    (REDUCTIONS, _reduction),
    ((*POINTWISE, OWN), _pointwise),
):
    RULES |= dict.fromkeys(targets, family_rule)


__all__ = ["Dims", "dims_of", "operands", "reduced"]
