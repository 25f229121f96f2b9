"""Rules for what ops do with the dims of their tensors, and the labels that they are written in
(`stretto.ir.dims` is their table): norms, attention, losses; ops that move dims, cut them off or put them
in, and that look rows up.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    full: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    added: frozenset[int] = frozenset()


SUMMED = "summed"
"""In place of a result's dim: each rank has a partial sum of it."""


def results_along(rule: Dims, label: int) -> tuple[int | str | None, ...] | None:
    """Which dim of each result is cut where operands are cut along a label, or `SUMMED`; None: none, of what
    a kernel notes for its backward. Without an answer, results from parts are no parts of the result."""
    result: list[int | str | None] = []
    for out in rule.outputs:
        if label in out:
            result.append(out.index(label))
        elif label in rule.summed:
            result.append(SUMMED)
        elif len(rule.outputs) > 1 and all(of is None for of in out):
            result.append(None)
        else:
            return None
    return tuple(result)


def operands(op: Op) -> tuple[str, ...]:
    """Names of the values that an op reads, in order, as often as it reads them."""
    return (*refs(op.args), *refs(tuple(value for _, value in op.kwargs)))


def each(*positions: int) -> tuple[frozenset[int], ...]:
    """Linear in each of these operands by itself."""
    return tuple(frozenset((at,)) for at in positions)


def together(count: int) -> tuple[frozenset[int], ...]:
    """Linear in all operands together (a sum)."""
    return (frozenset(range(count)),)


def labels_of(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def dim_of(value: object, count: int) -> int:
    return int(value) % max(count, 1)  # type: ignore[call-overload, no-any-return]


def broadcast(spec: TensorSpec, shape: Sequence[int]) -> Labels:
    """Labels of an operand of an op with broadcasting, whose result has dims 0, 1, 2..."""
    skipped = len(shape) - len(spec.shape)
    return tuple(
        None if n == 1 and shape[skipped + d] != 1 else skipped + d for d, n in enumerate(spec.shape)
    )


def norm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """native_layer_norm, _fused_rms_norm: the last dims must be unsharded, each row is by itself."""
    count = len(specs[0].shape)
    normed = len(op.args[1])
    labels = labels_of(count)
    outs = []
    for spec in op.outputs:
        full = spec is not None and len(spec.shape) == count
        outs.append(
            labels
            if full and spec is not None and spec.shape == specs[0].shape
            else (*labels[: count - normed], *((None,) * (normed if full else 0)))
        )
    inputs = (labels, *(labels[count - len(spec.shape) :] for spec in specs[1:]))
    return Dims(inputs, tuple(outs), full=frozenset(labels[count - normed :]))


def norm_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """native_layer_norm_backward, _fused_rms_norm_backward: rows' gradients, and sums over rows."""
    count = len(specs[0].shape)
    normed = len(op.args[2])
    labels = labels_of(count)
    rows, last = labels[: count - normed], labels[count - normed :]
    inputs: list[Labels] = []
    for at, spec in enumerate(specs):
        if at < 2:
            inputs.append(labels)
        elif len(spec.shape) == normed != count or spec.shape == specs[0].shape[count - normed :]:
            inputs.append(last)
        else:  # mean, rstd
            inputs.append((*rows, *((None,) * (len(spec.shape) - len(rows)))))
    outs = [labels if at == 0 else last for at, _ in enumerate(op.outputs)]
    return Dims(tuple(inputs), tuple(outs), full=frozenset(last), summed=frozenset(rows), linear=each(0))


_B, _H, _S, _T, _D, _E = range(6)
"""Labels of attention: batch, heads, queries, keys, features of keys, features of values."""


def _heads(keys: TensorSpec, queries: TensorSpec) -> int | None:
    """One head of keys beside several of queries is not cut with them; fewer are, each with its queries."""
    return None if keys.shape[1] == 1 and queries.shape[1] != 1 else _H


def _mask(spec: TensorSpec) -> Labels:
    named = (_B, _H, _S, _T)[4 - len(spec.shape) :]
    return tuple(None if n == 1 else label for n, label in zip(spec.shape, named, strict=True))


def attention(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
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
    return Dims(tuple(inputs), tuple(outs), full=frozenset((_S, _T, _D, _E)))


def attention_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
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
    return Dims(tuple(inputs), tuple(outs), full=frozenset((_S, _T, _D, _E)), summed=summed, linear=each(0))


_NONE, _MEAN = 0, 1
"""How PyTorch numbers reductions of losses."""


def _rows(labels: Sequence[int]) -> Labels:
    """All dims but the classes, which are dim 1, or the only one."""
    return (*labels[:1], *labels[2:]) if len(labels) > 1 else ()


def nll(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """Classes must be unsharded. Rows are by themselves where each keeps its loss, and added up in a sum; of
    a mean, every dim must be unsharded."""
    labels = labels_of(len(specs[0].shape))
    rows, reduction = _rows(labels), op.args[3]
    inputs = (labels, rows, labels[-1:] if len(labels) == 1 else (1,))
    classes = frozenset(labels) - frozenset(rows)
    return Dims(
        inputs[: len(specs)],
        (rows, ()) if reduction == _NONE else ((), ()),
        full=frozenset(labels) if reduction == _MEAN else classes,
        summed=frozenset() if reduction in (_NONE, _MEAN) else frozenset(rows),  # type: ignore[arg-type]
    )


def nll_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """Rows are by themselves, given the weight of all of them."""
    labels = labels_of(len(specs[1].shape))
    rows = _rows(labels)
    classes = tuple(label for label in labels if label not in rows)
    each_row = rows if specs[0].shape else ()
    inputs = (each_row, labels, rows, *((classes,) if len(specs) > 4 else ()), ())
    return Dims(inputs, (labels,), full=frozenset(classes), linear=each(0))


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
    """One operand whose dims stay, but for sizes: those that change, and those named, must be unsharded."""
    made = op.outputs[0]
    if made is None or len(made.shape) != len(specs[0].shape):
        return None
    labels = labels_of(len(made.shape))
    unsharded = {d for d, (a, b) in enumerate(zip(specs[0].shape, made.shape, strict=True)) if a != b}
    zero = True
    if op.target in ("aten.flip.default", "aten.roll.default"):
        at = 1 if op.target == "aten.flip.default" else 2
        dims = op.args[at] if len(op.args) > at else ()
        unsharded |= {dim_of(d, len(labels)) for d in dims} if dims else set(labels)
    elif op.target in ("aten.tril.default", "aten.triu.default"):
        unsharded |= set(labels[-2:])
    elif op.target == "aten.constant_pad_nd.default":
        pads = op.args[1]
        unsharded |= {len(labels) - 1 - k // 2 for k, pad in enumerate(pads) if pad}
        zero = len(op.args) < 3 or op.args[2] == 0
    return Dims((labels,), (labels,), full=frozenset(unsharded), linear=each(0) if zero else ())


def complex_view(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """view_as_complex and back: the last dim of the real tensor is a number's two parts."""
    labels = labels_of(len(specs[0].shape))
    if op.target == "aten.view_as_complex.default":
        return Dims((labels,), (labels[:-1],), full=frozenset(labels[-1:]), linear=each(0))
    return Dims((labels,), ((*labels, len(labels)),), full=frozenset((len(labels),)), linear=each(0))


def expand(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    shape = op.made.shape
    return Dims((broadcast(specs[0], shape),), (labels_of(len(shape)),), linear=each(0))


def repeat(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    made = op.outputs[0]
    if made is None:
        return None
    labels = labels_of(len(made.shape))
    skipped = len(made.shape) - len(specs[0].shape)
    unsharded = frozenset(d for d, times in enumerate(op.args[1]) if times != 1)
    return Dims((labels[skipped:],), (labels,), full=unsharded, linear=each(0))


def mixture(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """Experts: tokens are by themselves, but where they share a capacity. Backward, gradients of parameters
    are summed over tokens."""
    backward, each = len(specs) - len(op.args[-2]) == 4, bool(op.args[-1])
    tokens, chosen = specs[1:3] if backward else specs[:2]
    count = len(tokens.shape) - 1
    rows, features, choices = labels_of(count), count, count + 1
    if chosen.shape[:count] != tokens.shape[:count] or len(chosen.shape) > count + 1:
        return None
    of_tokens: Labels = (*rows, features)
    of_choices: Labels = (*rows, choices)[: len(chosen.shape)]
    of_parameters: list[Labels] = [(None,) * len(spec.shape) for spec in specs[4 if backward else 3 :]]
    full = frozenset((features, choices, *(() if each else rows)))
    inputs = (of_tokens, of_choices, of_choices, *of_parameters)
    if not backward:
        return Dims(inputs, (of_tokens,), full=full)
    outputs = (of_tokens, of_choices, *of_parameters)
    return Dims((of_tokens, *inputs), outputs, full=full, summed=frozenset(rows))


# --- rows that are looked up ------------------------------------------------------------------------------


def embedding(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[1].shape)
    rows, columns = count, count + 1
    index = labels_of(count)
    return Dims(((rows, columns), index), ((*index, columns),), full=frozenset((rows,)), linear=each(0))


def embedding_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[1].shape)
    rows, columns = count, count + 1
    index = labels_of(count)
    return Dims(
        ((*index, columns), index),
        ((rows, columns),),
        full=frozenset((rows,)),
        summed=frozenset(index),
        linear=each(0),
    )


def index_select(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    count = len(specs[0].shape)
    dim = dim_of(op.args[1], count)
    labels = labels_of(count)
    inside: Labels = (count,) if specs[1].shape else ()
    out = (*labels[:dim], *((count,) if inside else (None,)), *labels[dim + 1 :])
    return Dims((labels, inside), (out,), full=frozenset((dim,)), linear=each(0))


def index(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """x[indices]: dims that are indexed must be unsharded; so must the indices' own."""
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
    return Dims((labels_of(count), *inner), (out,), full=frozenset(named) | frozenset(fresh), linear=each(0))


def index_put(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """x[indices] = values, which are broadcast from the last dim on."""
    read = index(op, specs[:-1])
    if read is None:
        return None
    (shown,), values = read.outputs, specs[-1].shape
    labels = shown[len(shown) - len(values) :]
    inner = tuple(None if n == 1 else label for n, label in zip(values, labels, strict=True))
    both = (frozenset((0, len(specs) - 1)),)
    return Dims((*read.inputs, inner), (read.inputs[0],), full=read.full, linear=both)


def into_rows(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """index_add and its like: rows of `self` that an index names get a number, or rows of a source."""
    count = len(specs[0].shape)
    labels = labels_of(count)
    source: list[Labels] = [labels if spec.shape else () for spec in specs[2:]]
    if any(len(spec.shape) not in (0, count) for spec in specs[2:]):
        return None
    index = (None,) * len(specs[1].shape)
    return Dims((labels, index, *source), (labels,), full=frozenset((dim_of(op.args[1], count),)))


def image(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """Batch and channels of an op of all else of an image, such as pooling."""
    count = 2 + int(next(letter for letter in op.target if letter.isdigit()))
    if any(len(spec.shape) != count for spec in specs):
        return None
    labels = labels_of(count)
    return Dims((labels,) * len(specs), (labels,) * len(op.outputs), full=frozenset(labels[2:]))
