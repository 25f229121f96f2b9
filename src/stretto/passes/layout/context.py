"""Rules for a sequence that ranks share: attention of a rank's own queries, and means over all tokens.

1. Queries are sharded along the sequence, keys and values are gathered: a rank has its rows of what is hidden
   behind the diagonal. Backward, each rank has partial sums of the gradients of all keys and values, which
   are scattered at once.
2. A mean over tokens is the sum of what ranks add up over the sum of what they count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from stretto.ir.dims import operands
from stretto.ir.op_names import ATTENTION_BACKWARD, CAUSAL_AT
from stretto.ir.program import GETITEM, Const, Op, Ref
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.emit import REDUCE, SCATTER, SLICE, Emitter
from stretto.passes.layout.losses import MEAN, NLL, NLL_BACKWARD
from stretto.passes.layout.placement import PARTIAL, REPLICATED, AxisPlacement, fits, sharded
from stretto.passes.layout.program import StepProgram
from stretto.passes.layout.rules import Choice, OpGiven, Rule, rule_of

SEQUENCE_DIM = 1
"""Of batch leaves, behind the batch."""
QUERY_DIM = 2
"""Of (batch, heads, sequence, size of a head)."""
SUM = 2
"""PyTorch's number of the reduction."""
BATCH, EMBEDDING, SLICED = "batch/", "aten.embedding.default", "aten.slice.Tensor"
ARANGES = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")


def sequence_of(ahead: Ahead, full: Collection[str]) -> int:
    """The length of the sequence: of the ids (batch, sequence) that embeddings look up, or, where there are
    none, the longest dim 1 of leaves of the batch; 0 without any. full: leaves that every microbatch takes in
    full."""
    ids = [ahead.spec(op.args[1].name) for op in ahead.made.values() if op.target == EMBEDDING]
    lengths = [spec.shape[SEQUENCE_DIM] for spec in ids if spec is not None and len(spec.shape) == 2]
    if not lengths or max(lengths) == 1:
        lengths = [
            spec.shape[SEQUENCE_DIM]
            for name, spec in ahead.program.given.items()
            if name.startswith(BATCH) and len(spec.shape) > SEQUENCE_DIM and name[len(BATCH) :] not in full
        ]
    return max(lengths, default=0)


def rows_of_masks(ahead: Ahead) -> tuple[dict[str, AxisPlacement], frozenset[str]]:
    """Of masks, a rank needs the rows of its queries: how what they are made of is best placed for that, and
    all that they are made of."""
    best: dict[str, AxisPlacement] = {}
    above: set[str] = set()
    for op in reversed(ahead.made.values()):
        if op.target in CAUSAL_AT and op.target not in ATTENTION_BACKWARD:
            for name in operands(op)[3:]:
                spec = ahead.spec(name)
                if spec is not None and spec.shape[-2] > 1:
                    best[name] = sharded(len(spec.shape) - 2)
                above.add(name)
        if op.name in above:
            above.update(op.uses)
            if op.name in best and len(op.outputs) == 1:
                for name, at in ahead.before(op, best[op.name]):
                    best.setdefault(name, at)
    return best, frozenset(above)


def sequences(
    program: StepProgram, length: int, full: Collection[str], for_masks: Collection[str]
) -> dict[str, AxisPlacement]:
    """What is as long as the sequence, of which each rank computes its part: leaves of the batch, what is
    sliced of them, and positions. full: leaves that every microbatch takes in full; for_masks: what masks
    alone are made of."""
    result: dict[str, AxisPlacement] = {}
    leaves = {name for name in program.given if name.startswith(BATCH) and name[len(BATCH) :] not in full}
    tokens = {name: program.given[name] for name in leaves}
    for op, _ in program.ops:
        if op.target == SLICED and op.uses[0] in tokens and op.outputs[0] is not None:
            tokens[op.name] = op.outputs[0]
    for name, spec in tokens.items():
        if name not in for_masks and spec.shape[SEQUENCE_DIM : SEQUENCE_DIM + 1] == (length,):
            result[name] = sharded(SEQUENCE_DIM)
    for op, _ in program.ops:
        made = op.outputs[0] if op.target in ARANGES else None
        if made is not None and made.shape == (length,) and op.name not in for_masks:
            result[op.name] = sharded(0)
    return result


def _hidden(out: Emitter, start: str, keys: int, dtype: str) -> str:
    """What is added to the scores of a rank's queries: -inf behind the diagonal."""

    def op(what: str, name: str, *args: object, **kwargs: object) -> Ref:
        return Ref(out.emit(f"aten.{name}", *args, name=f"{start}_{what}", kwargs=kwargs))

    every = op("keys", "arange.default", keys, device=Const("device", "job"))
    own = Ref(out.emit(SLICE, every, 0, 1, out.axis, out.size, name=f"{start}_rows"))
    later = op("later", "lt.Tensor", op("column", "unsqueeze.default", own, 1), every)
    zeros = op("zeros", "zeros_like.default", later, dtype=Const("dtype", dtype))
    mask = op("hidden", "masked_fill.Scalar", zeros, later, -math.inf)
    for _ in range(2):
        mask = op("mask", "unsqueeze.default", mask, 0)
    return mask.name


def _attention(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Step 1."""
    backward, at = op.target in ATTENTION_BACKWARD, CAUSAL_AT.get(op.target)
    queries = 1 if backward else 0
    rule, placement = rule_of(op, given.specs), given.placements[queries]
    if rule is None or at is None or placement != sharded(QUERY_DIM):
        return
    causal = len(op.args) > at and op.args[at]
    keys = given.specs[queries + 1].shape[QUERY_DIM]
    if causal and ("attn_mask" in dict(op.kwargs) or keys != given.specs[queries].shape[QUERY_DIM]):
        return
    label = rule.inputs[queries][QUERY_DIM]
    inputs = tuple(sharded(labels.index(label)) if label in labels else REPLICATED for labels in rule.inputs)
    # What is scattered has keys where the queries' gradient has queries.
    outputs = tuple(
        sharded(labels.index(label)) if label in labels else sharded(QUERY_DIM) if backward else REPLICATED
        for labels in rule.outputs
    )
    for place, spec in zip((*inputs, *outputs), (*given.specs, *op.outputs), strict=True):
        if spec is not None and not fits(place, spec.shape, given.size):
            return

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        left, kwargs = list(local), dict(op.kwargs)
        args = [Ref(left.pop(0)) if isinstance(arg, Ref) else arg for arg in op.args]
        kwargs = {key: Ref(left.pop(0)) if isinstance(arg, Ref) else arg for key, arg in kwargs.items()}
        if causal:
            args[at] = False
            rows = out.specs[local[queries]]
            kwargs["attn_mask"] = Ref(_hidden(out, op.name, keys, rows.dtype))
        flops = op.flops // out.size
        made = out.emit(op.target, *args, name=op.name, kwargs=kwargs, flops=flops, random=op.random)
        if not backward:
            return (made,)
        parts = [Ref(out.emit(GETITEM, Ref(made), k, name=f"{op.name}_{k}")) for k in range(len(op.outputs))]
        how = (QUERY_DIM, 1, out.axis, out.size)
        scattered = [out.emit(SCATTER, part, *how, name=f"{part.name}_own") for part in parts[1:]]
        return parts[0].name, *scattered

    yield Choice(inputs, outputs, emit)


def _is_mean_of_rows(op: Op, logp: AxisPlacement, weighted: bool) -> bool:
    return op.args[4 if weighted else 3] == MEAN and logp.is_sharded and logp.dim == 0 and logp.copies == 1


def _mean(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Step 2."""
    at = given.first
    if op.args[2] is not None or len(given.specs[0].shape) != 2 or not _is_mean_of_rows(op, at, False):
        return

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        logp, target = map(Ref, local)
        of = Ref(out.emit(op.target, logp, target, None, SUM, op.args[4], name=f"{op.name}_own"))
        total, count = (out.emit(GETITEM, of, k, name=f"{op.name}_own_{k}") for k in range(2))
        count = out.emit(REDUCE, Ref(count), "sum", out.axis, out.size, name=f"{op.name}_count")
        return out.emit("aten.div.Tensor", Ref(total), Ref(count), name=f"{op.name}_mean"), count

    yield Choice((at, at), (PARTIAL, REPLICATED), emit)


def _mean_backward(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Written as of a sum, for a pass along another axis."""
    at = given.placements[1]
    if op.args[3] is not None or len(given.specs[1].shape) != 2 or not _is_mean_of_rows(op, at, True):
        return

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        grad, logp, target, count = map(Ref, local)
        each = Ref(out.emit("aten.div.Tensor", grad, count, name=f"{op.name}_each"))
        rest = (None, SUM, op.args[5], count)
        return (out.emit(op.target, each, logp, target, *rest, name=op.name),)

    yield Choice((REPLICATED, at, at, REPLICATED), (at,), emit)


CONTEXT: dict[str, Rule] = {
    **dict.fromkeys(CAUSAL_AT, _attention),
    NLL: _mean,
    NLL_BACKWARD: _mean_backward,
}
