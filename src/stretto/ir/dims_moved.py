"""Rules for ops that move dims, cut them off or put them in, and that look rows up (`stretto.ir.dims`)."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir.dim_labels import Dims, Labels, broadcast, dim_of, each, labels_of
from stretto.ir.program import Op, Ref, TensorSpec


def permute(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    order = list(range(count))
    if op.target == "aten.permute.default":
        order = [dim_of(d, count) for d in op.args[1]]
    elif op.target == "aten.transpose.int":
        a, b = dim_of(op.args[1], count), dim_of(op.args[2], count)
        order[a], order[b] = order[b], order[a]
    elif count > 1:
        order.reverse()  # t: of two dims
    return Dims((labels_of(count),), (tuple(order),), linear=each(0))


def changed(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """One operand whose dims stay, but for sizes: those that change, and those named, must be whole."""
    made = op.outputs[0]
    if made is None or len(made.shape) != len(specs[0].shape):
        return None
    labels = labels_of(len(made.shape))
    whole = {d for d, (a, b) in enumerate(zip(specs[0].shape, made.shape, strict=True)) if a != b}
    zero = True
    if op.target in ("aten.flip.default", "aten.roll.default"):
        at = 1 if op.target == "aten.flip.default" else 2
        dims = op.args[at] if len(op.args) > at else ()
        whole |= {dim_of(d, len(labels)) for d in dims} if dims else set(labels)
    elif op.target in ("aten.tril.default", "aten.triu.default"):
        whole |= set(labels[-2:])
    elif op.target == "aten.constant_pad_nd.default":
        pads = op.args[1]
        whole |= {len(labels) - 1 - k // 2 for k, pad in enumerate(pads) if pad}
        zero = len(op.args) < 3 or op.args[2] == 0
    return Dims((labels,), (labels,), whole=frozenset(whole), linear=each(0) if zero else ())


def complex_view(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """view_as_complex and back: the last dim of the real tensor is a number's two parts."""
    labels = labels_of(len(specs[0].shape))
    if op.target == "aten.view_as_complex.default":
        return Dims((labels,), (labels[:-1],), whole=frozenset(labels[-1:]), linear=each(0))
    return Dims((labels,), ((*labels, len(labels)),), whole=frozenset((len(labels),)), linear=each(0))


def expand(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    made = op.outputs[0]
    assert made is not None
    return Dims((broadcast(specs[0], made.shape),), (labels_of(len(made.shape)),), linear=each(0))


def repeat(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    made = op.outputs[0]
    if made is None:
        return None
    labels = labels_of(len(made.shape))
    skipped = len(made.shape) - len(specs[0].shape)
    whole = frozenset(d for d, times in enumerate(op.args[1]) if times != 1)
    return Dims((labels[skipped:],), (labels,), whole=whole, linear=each(0))


# --- rows that are looked up ------------------------------------------------------------------------------


def embedding(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[1].shape)
    rows, columns = count, count + 1
    index = labels_of(count)
    return Dims(((rows, columns), index), ((*index, columns),), whole=frozenset((rows,)), linear=each(0))


def embedding_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[1].shape)
    rows, columns = count, count + 1
    index = labels_of(count)
    return Dims(
        ((*index, columns), index),
        ((rows, columns),),
        whole=frozenset((rows,)),
        summed=frozenset(index),
        linear=each(0),
    )


def index_select(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    dim = dim_of(op.args[1], count)
    labels = labels_of(count)
    inside: Labels = (count,) if specs[1].shape else ()
    out = (*labels[:dim], *((count,) if inside else (None,)), *labels[dim + 1 :])
    return Dims((labels, inside), (out,), whole=frozenset((dim,)), linear=each(0))


def index(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """x[indices]: dims that are indexed are whole; so are the indices' own."""
    count = len(specs[0].shape)
    given = tuple(op.args[1])
    named = [d for d, arg in enumerate(given) if isinstance(arg, Ref)]
    if not named or len(specs) != 1 + len(named) or any(s.dtype in ("bool", "uint8") for s in specs[1:]):
        return None  # a mask has several dims
    kept = [d for d in range(count) if d not in named]
    extra = max(len(spec.shape) for spec in specs[1:])
    fresh = tuple(range(count, count + extra))
    beside = named == list(range(named[0], named[0] + len(named)))
    before = [d for d in kept if d < named[0]] if beside else []
    out = (*before, *fresh, *(d for d in kept if d not in before))
    inner = []
    for spec in specs[1:]:
        skipped = extra - len(spec.shape)
        inner.append(tuple(fresh[skipped + d] if n != 1 else None for d, n in enumerate(spec.shape)))
    return Dims((labels_of(count), *inner), (out,), whole=frozenset(named) | frozenset(fresh), linear=each(0))


def index_put(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """x[indices] = values, which are broadcast from the last dim on."""
    read = index(op, specs[:-1])
    if read is None:
        return None
    (shown,), values = read.outputs, specs[-1].shape
    labels = shown[len(shown) - len(values) :]
    inner = tuple(None if n == 1 else label for n, label in zip(values, labels, strict=True))
    both = (frozenset((0, len(specs) - 1)),)
    return Dims((*read.inputs, inner), (read.inputs[0],), whole=read.whole, linear=both)


def into_rows(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """index_add and its like: rows of `self` that an index names get a number, or rows of a source."""
    count = len(specs[0].shape)
    labels = labels_of(count)
    source: list[Labels] = [labels if spec.shape else () for spec in specs[2:]]
    if any(len(spec.shape) not in (0, count) for spec in specs[2:]):
        return None
    index = (None,) * len(specs[1].shape)
    return Dims((labels, index, *source), (labels,), whole=frozenset((dim_of(op.args[1], count),)))


def image(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """Batch and channels of an op of all else of an image, such as pooling."""
    count = 2 + int(next(letter for letter in op.target if letter.isdigit()))
    if any(len(spec.shape) != count for spec in specs):
        return None
    labels = labels_of(count)
    return Dims((labels,) * len(specs), (labels,) * len(op.outputs), whole=frozenset(labels[2:]))
