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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.ir.program import Op, Ref, TensorSpec, refs

Labels = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Dims:
    """One op's rule. inputs: labels of the operands' dims, in the order of `operands`; outputs: of results.

    linear: sets of positions of operands. added: positions of operands that are added to the sum over
    `summed` labels (the bias of `addmm`): where that is a sum over ranks, they would be counted by each.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    whole: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    added: frozenset[int] = frozenset()


def operands(op: Op) -> tuple[str, ...]:
    """Names of the values that an op reads, in order, as often as it reads them."""
    return (*refs(op.args), *refs(tuple(value for _, value in op.kwargs)))


def _each(*positions: int) -> tuple[frozenset[int], ...]:
    """Linear in each of these operands by itself."""
    return tuple(frozenset((at,)) for at in positions)


def _all(count: int) -> tuple[frozenset[int], ...]:
    """Linear in all operands together (a sum)."""
    return (frozenset(range(count)),)


def _names(prefix: str, text: str) -> frozenset[str]:
    return frozenset(f"{prefix}{name}" for name in text.split())


COPIES = _names(
    "aten.",
    "clone.default _to_copy.default detach.default alias.default contiguous.default lift_fresh_copy.default "
    "neg.default positive.default to.dtype",
)
"""Linear in their only operand, element by element."""

SCALED = _names("aten.", "mul.Scalar div.Scalar")
SUMS = _names("aten.", "add.Tensor sub.Tensor rsub.Tensor")
PRODUCTS = _names("aten.", "mul.Tensor")
QUOTIENTS = _names("aten.", "div.Tensor")

FIRST_LINEAR = _names(
    "aten.",
    "gelu_backward.default silu_backward.default tanh_backward.default sigmoid_backward.default "
    "threshold_backward.default hardtanh_backward.default leaky_relu_backward.default elu_backward.default "
    "softplus_backward.default hardswish_backward.default hardsigmoid_backward.default "
    "mish_backward.default logit_backward.default native_dropout_backward.default "
    "log_sigmoid_backward.default softshrink_backward.default hardshrink_backward.default",
)
"""Element by element, and linear in the first operand: gradients of functions of one number."""

POINTWISE = (
    COPIES
    | SCALED
    | SUMS
    | PRODUCTS
    | QUOTIENTS
    | FIRST_LINEAR
    | frozenset(
        f"aten.{name}.{kind}"
        for name in ("add", "sub", "rsub", "div", "fmod", "remainder", "pow", "lerp", "floor_divide", "xlogy")
        for kind in ("Scalar", "Tensor_mode", "Scalar_mode", "Tensor_Scalar", "Tensor_Tensor", "Tensor")
    )
    | frozenset(
        f"aten.{name}.{kind}"
        for name in ("lt", "le", "gt", "ge", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor")
        for kind in ("Scalar", "Tensor")
    )
    | _names(
        "aten.",
        "exp.default exp2.default expm1.default log.default log2.default log10.default log1p.default "
        "sqrt.default rsqrt.default reciprocal.default square.default abs.default sign.default sgn.default "
        "sin.default cos.default tan.default asin.default acos.default atan.default sinh.default "
        "cosh.default tanh.default asinh.default acosh.default atanh.default atan2.default erf.default "
        "erfc.default erfinv.default floor.default ceil.default round.default trunc.default frac.default "
        "sigmoid.default relu.default gelu.default silu.default mish.default elu.default celu.default "
        "selu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default "
        "softplus.default softshrink.default hardshrink.default threshold.default logit.default "
        "relu6.default clamp.default clamp.Tensor clamp_min.default clamp_min.Tensor clamp_max.default "
        "clamp_max.Tensor maximum.default minimum.default fmax.default fmin.default hypot.default "
        "logaddexp.default logaddexp2.default copysign.Tensor nan_to_num.default isnan.default "
        "isinf.default isfinite.default bitwise_not.default logical_not.default logical_and.default "
        "logical_or.default logical_xor.default masked_fill.Scalar masked_fill.Tensor where.self "
        "where.ScalarSelf where.ScalarOther where.Scalar addcmul.default addcdiv.default sinc.default "
        "lgamma.default digamma.default deg2rad.default rad2deg.default signbit.default heaviside.default "
        "pow.Scalar erfcx.default special_erfcx.default copy.default _conj.default real.default "
        "native_dropout.default bernoulli.p bernoulli.default rand_like.default randn_like.default "
        "mse_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default "
        "log_sigmoid_forward.default isclose.default",
    )
)
"""Each element of a result depends on the elements at its place alone (with the usual broadcasting)."""

REDUCTION_SETTING = _names(
    "aten.", "mse_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default"
)
"""Element by element only with reduction "none": their results show which it is."""

REDUCTIONS = _names(
    "aten.",
    "sum.dim_IntList sum.default mean.dim mean.default amax.default amin.default max.dim min.dim "
    "max.default min.default argmax.default argmin.default logsumexp.default prod.dim_int prod.default "
    "any.dim any.default any.dims all.dim all.default all.dims var.correction var_mean.correction "
    "std.correction linalg_vector_norm.default nansum.default median.dim mode.default kthvalue.default "
    "count_nonzero.dim_IntList norm.ScalarOpt_dim norm.Scalar",
)
"""Some dims, or all, are reduced. Those that are sums make addends from parts; others need the dim whole."""

ADDING = _names("aten.", "sum.dim_IntList sum.default nansum.default count_nonzero.dim_IntList")

LINEAR_REDUCTIONS = _names("aten.", "sum.dim_IntList sum.default mean.dim mean.default")

ALONG_ONE = {
    "aten._softmax.default": 1,
    "aten._log_softmax.default": 1,
    "aten._safe_softmax.default": 1,
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
    "aten.cumsum.default": 1,
    "aten.cumprod.default": 1,
    "aten.logcumsumexp.default": 1,
    "aten.cummax.default": 1,
    "aten.cummin.default": 1,
    "aten.sort.default": 1,
    "aten.sort.stable": 2,
    "aten.argsort.default": 1,
    "aten.glu.default": 1,
}
"""Position of the dim along which the op works: it must be whole; shapes stay, and all else is cut freely."""

LINEAR_ALONG_ONE = {
    "aten.cumsum.default": 0,
    "aten._softmax_backward_data.default": 0,
    "aten._log_softmax_backward_data.default": 0,
}
"""Which of them are linear, and in which operand."""

ATTENTION = _names(
    "aten._scaled_dot_product_",
    "flash_attention_for_cpu.default flash_attention.default efficient_attention.default "
    "cudnn_attention.default fused_attention_overrideable.default",
)
ATTENTION_BACKWARD = _names(
    "aten._scaled_dot_product_",
    "flash_attention_for_cpu_backward.default flash_attention_backward.default "
    "efficient_attention_backward.default cudnn_attention_backward.default "
    "fused_attention_overrideable_backward.default",
)

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
        return _attention(op, specs)
    if op.target in ATTENTION_BACKWARD:
        return _attention_backward(op, specs)
    rule = RULES.get(op.target)
    return None if rule is None else rule(op, specs)


def _range(n: int) -> Labels:
    return tuple(range(n))


def _dim(value: object, count: int) -> int:
    return int(value) % max(count, 1)  # type: ignore[call-overload, no-any-return]


def _broadcast(spec: TensorSpec, shape: Sequence[int]) -> Labels:
    """Labels of an operand of an op with broadcasting, whose result has dims 0, 1, 2..."""
    skipped = len(shape) - len(spec.shape)
    return tuple(
        None if n == 1 and shape[skipped + d] != 1 else skipped + d for d, n in enumerate(spec.shape)
    )


def _pointwise(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    made = op.outputs[0]
    if made is None:
        return None
    shape = made.shape
    if op.target in REDUCTION_SETTING and any(len(s.shape) > len(shape) for s in specs):
        return None
    inputs = tuple(_broadcast(spec, shape) for spec in specs)
    linear: tuple[frozenset[int], ...] = ()
    if op.target in COPIES or op.target in SCALED:
        # What becomes an integer or a truth value is not linear any more.
        linear = _each(0) if made.dtype.startswith(("float", "bfloat", "complex")) else ()
    elif op.target in SUMS:
        linear = _all(2) if len(specs) == 2 else ()
    elif op.target in PRODUCTS:
        linear = _each(0, 1) if len(specs) == 2 else _each(0)
    elif op.target in QUOTIENTS or op.target in FIRST_LINEAR:
        linear = _each(0)
    elif op.target == "aten.where.self":
        linear = (frozenset((1, 2)),)
    elif op.target == "aten.masked_fill.Scalar" and op.args[2] == 0:
        linear = _each(0)
    return Dims(inputs, tuple(_range(len(shape)) for _ in op.outputs), linear=linear)


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
    return frozenset(_dim(d, count) for d in dims)


def _reduction(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    spec, made = specs[0], op.outputs[0]
    if made is None:
        return None
    count = len(spec.shape)
    reduced = _reduced(op, count)
    labels = _range(count)
    kept = len(made.shape) == count
    out = tuple((None if d in reduced else d) if kept else d for d in labels if kept or d not in reduced)
    adding = op.target in ADDING
    return Dims(
        (labels, *(() for _ in specs[1:])),
        tuple(out for _ in op.outputs),
        whole=frozenset() if adding else reduced,
        summed=reduced if adding else frozenset(),
        linear=_each(0) if op.target in LINEAR_REDUCTIONS else (),
    )


def _along_one(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    count = len(specs[0].shape)
    at = ALONG_ONE[op.target]
    given = op.args[at] if len(op.args) > at else dict(op.kwargs).get("dim", -1)
    labels = _range(count)
    position = LINEAR_ALONG_ONE.get(op.target)
    return Dims(
        tuple(labels[: len(spec.shape)] for spec in specs),
        tuple(labels for _ in op.outputs),
        whole=frozenset((_dim(given, count),)) if count else frozenset(),
        linear=() if position is None else _each(position),
    )


# --- products ------------------------------------------------------------------------------------------------


def _mm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    return Dims(((0, 1), (1, 2)), ((0, 2),), summed=frozenset((1,)), linear=_each(0, 1))


def _bmm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    return Dims(((3, 0, 1), (3, 1, 2)), ((3, 0, 2),), summed=frozenset((1,)), linear=_each(0, 1))


def _addmm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    made = op.outputs[0]
    assert made is not None
    to = {0: 0, 1: 2}
    bias = tuple(None if d is None else to[d] for d in _broadcast(specs[0], made.shape))
    linear = (frozenset((0, 1)), frozenset((0, 2)))
    return Dims(
        (bias, (0, 1), (1, 2)), ((0, 2),), summed=frozenset((1,)), linear=linear, added=frozenset((0,))
    )


def _baddbmm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    made = op.outputs[0]
    assert made is not None
    to = {0: 3, 1: 0, 2: 2}
    bias = tuple(None if d is None else to[d] for d in _broadcast(specs[0], made.shape))
    linear = (frozenset((0, 1)), frozenset((0, 2)))
    return Dims(
        (bias, (3, 0, 1), (3, 1, 2)),
        ((3, 0, 2),),
        summed=frozenset((1,)),
        linear=linear,
        added=frozenset((0,)),
    )


def _mv(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    return Dims(((0, 1), (1,)), ((0,),), summed=frozenset((1,)), linear=_each(0, 1))


def _dot(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    return Dims(((0,), (0,)), ((),), summed=frozenset((0,)), linear=_each(0, 1))


# --- dims that are moved, cut off, or put in -------------------------------------------------------------------


def _permute(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    order = list(range(count))
    if op.target == "aten.permute.default":
        order = [_dim(d, count) for d in op.args[1]]
    elif op.target == "aten.transpose.int":
        a, b = _dim(op.args[1], count), _dim(op.args[2], count)
        order[a], order[b] = order[b], order[a]
    elif count > 1:
        order.reverse()  # t: of two dims
    return Dims((_range(count),), (tuple(order),), linear=_each(0))


def _changed(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """One operand whose dims stay, but for sizes: those that change, and those named, must be whole."""
    made = op.outputs[0]
    if made is None or len(made.shape) != len(specs[0].shape):
        return None
    labels = _range(len(made.shape))
    whole = {d for d, (a, b) in enumerate(zip(specs[0].shape, made.shape, strict=True)) if a != b}
    zero = True
    if op.target == "aten.slice.Tensor":
        dim = _dim(op.args[1] if len(op.args) > 1 else 0, len(labels))
        step = op.args[4] if len(op.args) > 4 else 1
        if specs[0].shape[dim] != made.shape[dim] or step != 1:
            whole.add(dim)
    elif op.target == "aten.slice_backward.default":
        whole.add(_dim(op.args[2], len(labels)))
        if specs[0].shape == made.shape:
            whole.clear()
    elif op.target in ("aten.flip.default", "aten.roll.default"):
        at = 1 if op.target == "aten.flip.default" else 2
        dims = op.args[at] if len(op.args) > at else ()
        whole |= {_dim(d, len(labels)) for d in dims} if dims else set(labels)
    elif op.target in ("aten.tril.default", "aten.triu.default"):
        whole |= set(labels[-2:])
    elif op.target == "aten.constant_pad_nd.default":
        pads = op.args[1]
        whole |= {len(labels) - 1 - k // 2 for k, pad in enumerate(pads) if pad}
        zero = len(op.args) < 3 or op.args[2] == 0
    return Dims((labels,), (labels,), whole=frozenset(whole), linear=_each(0) if zero else ())


def _select(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    dim = _dim(op.args[1], count)
    labels = _range(count)
    return Dims((labels,), (labels[:dim] + labels[dim + 1 :],), whole=frozenset((dim,)), linear=_each(0))


def _select_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape) + 1
    dim = _dim(op.args[2], count)
    labels = _range(count)
    return Dims((labels[:dim] + labels[dim + 1 :],), (labels,), whole=frozenset((dim,)), linear=_each(0))


def _expand(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    made = op.outputs[0]
    assert made is not None
    return Dims((_broadcast(specs[0], made.shape),), (_range(len(made.shape)),), linear=_each(0))


def _repeat(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    made = op.outputs[0]
    if made is None:
        return None
    labels = _range(len(made.shape))
    skipped = len(made.shape) - len(specs[0].shape)
    whole = frozenset(d for d, times in enumerate(op.args[1]) if times != 1)
    return Dims((labels[skipped:],), (labels,), whole=whole, linear=_each(0))


def _stack(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    dim = _dim(op.args[1] if len(op.args) > 1 else 0, count + 1)
    labels = _range(count)
    out = (*labels[:dim], None, *labels[dim:])
    return Dims(tuple(labels for _ in specs), (out,), linear=_all(len(specs)))


def _unbind(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    dim = _dim(op.args[1] if len(op.args) > 1 else 0, count)
    labels = _range(count)
    out = labels[:dim] + labels[dim + 1 :]
    return Dims((labels,), tuple(out for _ in op.outputs), whole=frozenset((dim,)), linear=_each(0))


def _scattered(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """slice_scatter, select_scatter: the second operand is put into a dim of the first."""
    count = len(specs[0].shape)
    dim = _dim(op.args[2] if len(op.args) > 2 else 0, count)
    labels = _range(count)
    second = labels[:dim] + labels[dim + 1 :] if op.target == "aten.select_scatter.default" else labels
    return Dims((labels, second), (labels,), whole=frozenset((dim,)), linear=_all(2))


# --- rows that are looked up -----------------------------------------------------------------------------------


def _embedding(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[1].shape)
    rows, columns = count, count + 1
    index = _range(count)
    return Dims(((rows, columns), index), ((*index, columns),), whole=frozenset((rows,)), linear=_each(0))


def _embedding_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[1].shape)
    rows, columns = count, count + 1
    index = _range(count)
    return Dims(
        ((*index, columns), index),
        ((rows, columns),),
        whole=frozenset((rows,)),
        summed=frozenset(index),
        linear=_each(0),
    )


def _gather(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """gather, and the scatters into `self`: each other dim at its own place, if it is as long everywhere."""
    count = len(specs[0].shape)
    if any(len(spec.shape) != count for spec in specs) or not count:
        return None
    dim = _dim(op.args[1], count)
    labels = _range(count)
    shapes = [spec.shape for spec in specs]
    whole = {dim} | {d for d in labels if len({shape[d] for shape in shapes}) > 1}
    linear: tuple[frozenset[int], ...] = ()
    if op.target == "aten.gather.default":
        linear = _each(0)
    elif op.target in ("aten.scatter_add.default", "aten.scatter.src"):
        linear = (frozenset((0, 2)),)
    return Dims(tuple(labels for _ in specs), (labels,), whole=frozenset(whole), linear=linear)


def _index_select(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    dim = _dim(op.args[1], count)
    labels = _range(count)
    inside: Labels = (count,) if specs[1].shape else ()
    out = (*labels[:dim], *((count,) if inside else (None,)), *labels[dim + 1 :])
    return Dims((labels, inside), (out,), whole=frozenset((dim,)), linear=_each(0))


def _index(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """x[indices]: dims that are indexed are whole; so are the indices' own."""
    count = len(specs[0].shape)
    given = tuple(op.args[1])
    named = [d for d, arg in enumerate(given) if isinstance(arg, Ref)]
    made = op.outputs[0]
    if made is None or len(specs) != 1 + len(named):
        return None
    kept = [d for d in range(count) if d not in named]
    extra = len(made.shape) - len(kept)
    fresh = tuple(range(count, count + extra))
    beside = bool(named) and named == list(range(named[0], named[0] + len(named)))
    before = [d for d in kept if d < named[0]] if beside else []
    out = (*before, *fresh, *(d for d in kept if d not in before))
    inner = []
    for spec in specs[1:]:
        skipped = extra - len(spec.shape)
        inner.append(tuple(fresh[skipped + d] if n != 1 else None for d, n in enumerate(spec.shape)))
    return Dims((_range(count), *inner), (out,), whole=frozenset(named) | frozenset(fresh), linear=_each(0))


# --- norms and attention ---------------------------------------------------------------------------------------


def _norm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """native_layer_norm, _fused_rms_norm: the last dims are whole, each row is by itself."""
    count = len(specs[0].shape)
    normed = len(op.args[1])
    labels = _range(count)
    outs = []
    for spec in op.outputs:
        full = spec is not None and len(spec.shape) == count
        outs.append(
            labels
            if full and spec is not None and spec.shape == specs[0].shape
            else (*labels[: count - normed], *((None,) * (normed if full else 0)))
        )
    inputs = (labels, *(labels[count - len(spec.shape) :] for spec in specs[1:]))
    return Dims(inputs, tuple(outs), whole=frozenset(labels[count - normed :]))


def _norm_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """native_layer_norm_backward, _fused_rms_norm_backward: rows' gradients, and sums over rows."""
    count = len(specs[0].shape)
    normed = len(op.args[2])
    labels = _range(count)
    rows, last = labels[: count - normed], labels[count - normed :]
    inputs: list[Labels] = []
    for at, spec in enumerate(specs):
        if at < 2:
            inputs.append(labels)
        elif spec.shape == specs[0].shape[count - normed :]:
            inputs.append(last)
        else:  # mean, rstd
            inputs.append((*rows, *((None,) * (len(spec.shape) - len(rows)))))
    outs = [labels if at == 0 else last for at, _ in enumerate(op.outputs)]
    return Dims(tuple(inputs), tuple(outs), whole=frozenset(last), summed=frozenset(rows), linear=_each(0))


_B, _H, _S, _T, _D, _E = range(6)
"""Labels of attention: batch, heads, queries, keys, features of keys, features of values."""


def _heads(keys: TensorSpec, queries: TensorSpec) -> int | None:
    """One head of keys beside several of queries is not cut with them; fewer are, each with its queries."""
    return None if keys.shape[1] == 1 and queries.shape[1] != 1 else _H


def _mask(spec: TensorSpec) -> Labels:
    named = (_B, _H, _S, _T)[4 - len(spec.shape) :]
    return tuple(None if n == 1 else label for n, label in zip(spec.shape, named, strict=True))


def _attention(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    q, k, v = specs[:3]
    if len(q.shape) != 4:
        return None
    inputs: list[Labels] = [
        (_B, _H, _S, _D), (_B, _heads(k, q), _T, _D), (_B, _heads(v, q), _T, _E)
    ]  # fmt: skip
    inputs += [_mask(spec) for spec in specs[3:]]
    outs: list[Labels] = []
    for at, spec in enumerate(op.outputs):
        n = 0 if spec is None else len(spec.shape)
        outs.append((_B, _H, _S, _E) if at == 0 else (_B, _H, _S, None)[:n] if n >= 3 else (None,) * n)
    return Dims(tuple(inputs), tuple(outs), whole=frozenset((_S, _T, _D, _E)))


def _attention_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """Operands by their shapes: the gradient, q, k, v, [mask], out, log-sum-exp, and numbers."""
    if len(specs) < 6 or any(len(spec.shape) != 4 for spec in specs[:5]):
        return None
    _, q, k, v = specs[:4]
    queries: Labels = (_B, _H, _S, _E)
    inputs: list[Labels] = [
        queries, (_B, _H, _S, _D), (_B, _heads(k, q), _T, _D), (_B, _heads(v, q), _T, _E)
    ]  # fmt: skip
    for spec in specs[4:]:
        n = len(spec.shape)
        if n == 4 and spec.shape == specs[0].shape:
            inputs.append(queries)
        elif n == 4:
            inputs.append(_mask(spec) if spec.shape[-1] != 1 or spec.shape[1] == 1 else (_B, _H, _S, None))
        elif n == 3:
            inputs.append((_B, _H, _S))
        else:
            inputs.append((None,) * n)
    summed = frozenset((_H,)) if _heads(k, q) is None else frozenset()
    outs: list[Labels] = [
        (_B, _H, _S, _D), (_B, _heads(k, q), _T, _D), (_B, _heads(v, q), _T, _E)
    ]  # fmt: skip
    outs += [() if s is None else (_B, _H, _S, _T)[4 - len(s.shape) :] for s in op.outputs[3:]]
    return Dims(tuple(inputs), tuple(outs), whole=frozenset((_S, _T, _D, _E)), summed=summed, linear=_each(0))


def _topk(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    at = op.args[2] if len(op.args) > 2 else -1
    labels = _range(count)
    return Dims((labels,), tuple(labels for _ in op.outputs), whole=frozenset((_dim(at, count),)))


def _nll(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """Rows are by themselves only where each keeps its loss; else every dim is whole."""
    rows = len(specs[0].shape) - 1
    kept = op.outputs[0] is not None and len(op.outputs[0].shape) == 1 and rows == 1
    whole = frozenset((1,)) if kept else frozenset((0, 1))
    outs: list[Labels] = [(0,) if kept else (), ()]
    inputs = [(0, 1) if len(s.shape) == 2 else (0,) if at == 1 else (1,) for at, s in enumerate(specs)]
    return Dims(
        tuple(i[: len(s.shape)] for i, s in zip(inputs, specs, strict=True)), tuple(outs), whole=whole
    )


RULES: dict[str, Rule] = {
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.mv.default": _mv,
    "aten.dot.default": _dot,
    **dict.fromkeys(("aten.permute.default", "aten.transpose.int", "aten.t.default"), _permute),
    **dict.fromkeys(
        (
            *("aten.slice.Tensor", "aten.slice_backward.default", "aten.flip.default", "aten.roll.default"),
            *("aten.tril.default", "aten.triu.default", "aten.constant_pad_nd.default"),
        ),
        _changed,
    ),
    "aten.select.int": _select,
    "aten.select_backward.default": _select_backward,
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.stack.default": _stack,
    "aten.unbind.int": _unbind,
    **dict.fromkeys(("aten.slice_scatter.default", "aten.select_scatter.default"), _scattered),
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    **dict.fromkeys(
        (
            *("aten.gather.default", "aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value"),
            "aten.scatter_reduce.two",
        ),
        _gather,
    ),
    "aten.index_select.default": _index_select,
    "aten.index.Tensor": _index,
    **dict.fromkeys(("aten.native_layer_norm.default", "aten._fused_rms_norm.default"), _norm),
    **dict.fromkeys(
        ("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default"), _norm_backward
    ),
    "aten.topk.default": _topk,
    "aten.nll_loss_forward.default": _nll,
}


def rows_before(shape: Sequence[int], dim: int) -> int:
    """How many rows of what follows there are before and in `dim`: its position among a tensor's elements."""
    return math.prod(shape[dim + 1 :])
