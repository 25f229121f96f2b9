"""Rules for norms, attention and losses (`stretto.ir.dims`)."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir.dim_labels import Dims, Labels, each, labels_of
from stretto.ir.program import Op, TensorSpec


def norm(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """native_layer_norm, _fused_rms_norm: the last dims are whole, each row is by itself."""
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
    return Dims(inputs, tuple(outs), whole=frozenset(labels[count - normed :]))


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
    return Dims(tuple(inputs), tuple(outs), whole=frozenset(last), summed=frozenset(rows), linear=each(0))


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
    return Dims(tuple(inputs), tuple(outs), whole=frozenset((_S, _T, _D, _E)))


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
    return Dims(tuple(inputs), tuple(outs), whole=frozenset((_S, _T, _D, _E)), summed=summed, linear=each(0))


_NONE, _MEAN = 0, 1
"""How PyTorch numbers reductions of losses."""


def _rows(labels: Sequence[int]) -> Labels:
    """All dims but the classes, which are dim 1, or the only one."""
    return (*labels[:1], *labels[2:]) if len(labels) > 1 else ()


def nll(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """Classes are whole. Rows are by themselves where each keeps its loss, and added up in a sum; of a mean,
    every dim is whole."""
    labels = labels_of(len(specs[0].shape))
    rows, reduction = _rows(labels), op.args[3]
    inputs = (labels, rows, labels[-1:] if len(labels) == 1 else (1,))
    classes = frozenset(labels) - frozenset(rows)
    return Dims(
        inputs[: len(specs)],
        (rows, ()) if reduction == _NONE else ((), ()),
        whole=frozenset(labels) if reduction == _MEAN else classes,
        summed=frozenset() if reduction in (_NONE, _MEAN) else frozenset(rows),  # type: ignore[arg-type]
    )


def nll_backward(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """Rows are by themselves, given the weight of all of them."""
    labels = labels_of(len(specs[1].shape))
    rows = _rows(labels)
    classes = tuple(label for label in labels if label not in rows)
    each_row = rows if specs[0].shape else ()
    inputs = (each_row, labels, rows, *((classes,) if len(specs) > 4 else ()), ())
    return Dims(inputs, (labels,), whole=frozenset(classes), linear=each(0))
