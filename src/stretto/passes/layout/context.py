"""Rules for a sequence that ranks share: attention of a rank's own queries, and means over all tokens.

1. Attention is one op of a rank's own queries, keys and values, with its rows of a mask: what its keys miss
   comes in `context_steps`. Of a causal sequence a rank has two blocks, an early and a late one, so that all
   compute as much.
2. A mean over tokens is the sum of what ranks add up over the sum of what they count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from stretto.ir.dims import operands
from stretto.ir.op_names import MIXTURE, MIXTURE_BACKWARD, OWN
from stretto.ir.program import GETITEM, Op, Ref, TensorSpec
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.attention import ROWS, first_of, placed, results_of, with_over
from stretto.passes.layout.context_ops import Half
from stretto.passes.layout.emit import REDUCE, Emitter
from stretto.passes.layout.kernels import BACKWARDS, KERNELS, arguments, mask_of
from stretto.passes.layout.losses import MEAN, NLL, NLL_BACKWARD
from stretto.passes.layout.mask_blocks import blocks_seen
from stretto.passes.layout.placement import PARTIAL, REPLICATED, AxisPlacement, sharded
from stretto.passes.layout.program import StepProgram
from stretto.passes.layout.rules import Choice, OpGiven, Rule, emit_op
from stretto.passes.rewrite import with_uses

SEQUENCE_DIM = 1
"""Of batch leaves, behind the batch."""
SUM = 2
"""PyTorch's number of the reduction."""
FLOPS_A_BYTE = 1000
"""Flops under which a message's byte may be hidden. An H100 computes 990 TFLOP/s and sends 450 GB/s in a
node, 50 between nodes: 2,200 and 20,000."""
BATCH, EMBEDDING, SLICED = "batch/", "aten.embedding.default", "aten.slice.Tensor"
Pairs = tuple[tuple[Half, Half], ...]
"""Halves of queries that meet halves of keys."""
Met = tuple[Pairs, ...]
"""Those of each step."""
CAUSAL: Pairs = ((1, 0), ("either", "either"))
ALL: Pairs = ((None, None),)
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


def rows_of_masks(ahead: Ahead, blocks: int) -> tuple[dict[str, AxisPlacement], frozenset[str]]:
    """Of masks, a rank needs the rows of its queries: how what they are made of is best placed for that, and
    all that they are made of."""
    best: dict[str, AxisPlacement] = {}
    above: set[str] = set()
    for op in reversed(ahead.made.values()):
        mask = mask_of(op) if op.target.removeprefix("layout.") in KERNELS else None
        spec = None if mask is None else ahead.spec(mask)
        if mask is not None and spec is not None:
            above.add(mask)
            if spec.shape[-2] > 1:
                best[mask] = sharded(len(spec.shape) - 2, blocks)
        if op.name in above:
            above.update(op.uses)
            if op.name in best and len(op.outputs) == 1:
                for name, at in ahead.before(op, best[op.name]):
                    best.setdefault(name, at)
    return best, frozenset(above)


def sequences(
    program: StepProgram, length: int, full: Collection[str], for_masks: Collection[str], blocks: int
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
            result[name] = sharded(SEQUENCE_DIM, blocks)
    for op, _ in program.ops:
        made = op.outputs[0] if op.target in ARANGES else None
        if made is not None and made.shape == (length,) and op.name not in for_masks:
            result[op.name] = sharded(0, blocks)
    return result


def blocks_of(kind: str) -> int:
    """Of the sequence, that a rank has."""
    return 1 if kind == "ulysses" else 2


def _kind(queries: TensorSpec, keys: TensorSpec, size: int) -> str:
    """What "auto" is: in a step, half of a rank's queries meet half of its keys twice."""
    batch, heads, rows, features = queries.shape
    half = rows // size // 2
    flops = 2 * 4 * batch * heads * half * half * features
    return "ring" if flops > FLOPS_A_BYTE * (2 * keys.nbytes // size) else "gathered"


def met_in_steps(ahead: Ahead, mask: str, size: int) -> Met:
    """Of each step, which halves of a rank's queries meet which of the keys that come, on any rank. A mask
    that hides what is behind the diagonal, by blocks, has the pairs of causal attention."""
    last = 2 * size - 1
    seen = blocks_seen(ahead, mask, last + 1, last + 1)

    def of_rank(rank: int, step: int) -> set[tuple[Half, Half]]:
        queries, keys = ((r, last - r) for r in (rank, (rank - step) % size))
        either = 0 if rank >= step else 1
        found = {(i, j) for i, q in enumerate(queries) for j, k in enumerate(keys) if (q, k) in seen}
        return {("either", "either") if pair == (either, either) else pair for pair in found}

    steps = [set().union(*(of_rank(rank, step) for rank in range(size))) for step in range(size)]
    if all(pairs <= {*CAUSAL} for pairs in steps[1:]):
        return tuple(tuple(pair for pair in CAUSAL if pair in pairs) for pairs in steps)
    return tuple(ALL if pairs else () for pairs in steps)


def _attention(kind: str, met: Callable[[str, int], Met], op: Op, given: OpGiven) -> Iterator[Choice]:
    """Step 1. kind: as the setting `cp_kind`. met: as `met_in_steps`, of a mask and a number of ranks."""
    first, hidden = first_of(op), mask_of(op)
    queries, keys = given.specs[first : first + 2]
    if kind == "auto":
        kind = _kind(queries, keys, given.size)
    rows, mask = sharded(ROWS, blocks_of(kind)), REPLICATED
    unlike = arguments(op)["is_causal"] and queries.shape[ROWS] != keys.shape[ROWS]
    of_mask = first and any(op.outputs[3:])  # its gradient
    if given.placements[first] != rows or unlike or of_mask:
        return
    shape = () if hidden is None else given.specs[operands(op).index(hidden)].shape
    if shape[-2:-1] > (1,) and kind != "ulysses":
        mask = sharded(len(shape) - 2, rows.blocks)
    inputs, results = placed(op, given, rows, rows, mask), results_of(op, rows, rows)

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        plain = (CAUSAL if arguments(op)["is_causal"] else ALL,) * out.size
        met_by = plain if hidden is None else met(hidden, out.size)
        over = (out.axis, out.size, kind, rows.blocks > 1, met_by, ())
        return emit_op(Choice(inputs or (), results), out.size)(out, with_over(op, over), local)

    if inputs is not None:
        yield Choice(inputs, results, emit)


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


def rules_of(kind: str, ahead: Ahead) -> dict[str, Rule]:
    """Rules along the sequence. kind: as the setting `cp_kind`."""
    attention = partial(_attention, kind, cache(partial(met_in_steps, ahead)))
    return {**dict.fromkeys((*KERNELS, *BACKWARDS), attention), NLL: _mean, NLL_BACKWARD: _mean_backward}


def with_own_tokens(program: StepProgram, axis: str) -> StepProgram:
    """Experts see a rank's tokens in an order of its own. axis: along which the program is one rank's."""
    out = Emitter(axis, 1, program.given, [op.name for op, _ in program.ops])
    own: dict[str, str] = {}
    for op, origin in program.ops:
        out.origin, out.module = origin, op.module
        if op.target in (MIXTURE, MIXTURE_BACKWARD):
            tokens = {arg.name for arg in op.args if isinstance(arg, Ref)}  # parameters are in a list
            for name in sorted(tokens - own.keys()):
                own[name] = out.emit(OWN, Ref(name), axis, name=f"{op.name}_own")
            op = with_uses(op, lambda name: own.get(name, name))
        out.keep(op, origin)
    return replace(program, ops=tuple(out.ops))
