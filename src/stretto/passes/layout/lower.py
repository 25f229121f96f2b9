"""Collectives of layouts become the program's: along dim 0, each a start and a wait.

What is sharded along another dim is brought to the front by a view, a permutation and a copy; where nothing
is before that dim, or rows may be in any order (`stretto.passes.sequence_first`), a view does.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from stretto.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Kind
from stretto.ir.program import CHUNK, WAIT, Op, Ref
from stretto.passes.layout.emit import AS_IT_COMES, EXCHANGE, GATHER, LAYOUT_OPS, REDUCE, SLICE, Emitter
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import with_uses


def lower(program: StepProgram, _: Collection[str] = ()) -> StepProgram:
    """See the module."""
    if all(op.target not in LAYOUT_OPS for op, _ in program.ops):
        return program
    kept = [op.name for op, _ in program.ops if op.target not in LAYOUT_OPS]
    out = Emitter("", 1, program.given, kept)
    now: dict[str, str] = {}
    for op, origin in program.ops:
        op = with_uses(op, lambda name: now.get(name, name))
        if op.target in LAYOUT_OPS:
            out.origin, out.module = origin, op.module
            now[op.name] = _lowered(out, op, op.args[0].name)
        else:
            out.keep(op, origin)
    roots = {root: now.get(value, value) for root, value in program.roots.items()}
    return replace(program, ops=tuple(out.ops), roots=roots)


def _moved(count: int, before: int, after: int) -> tuple[int, ...]:
    """The order of dims with one of them elsewhere."""
    order = [dim for dim in range(count) if dim != before]
    order.insert(after, before)
    return tuple(order)


def _lowered(out: Emitter, op: Op, x: str) -> str:
    axis, size, name = op.args[-2], op.args[-1], op.name

    def collective(kind: Kind, x: str, *how: str) -> str:
        start = out.emit(kind.target, Ref(out.contiguous(x)), *how, axis, size, name=name)
        return out.emit(WAIT, Ref(start), name=f"{name}_wait")

    def permuted(x: str, order: tuple[int, ...]) -> str:
        return out.contiguous(out.emit("aten.permute.default", Ref(x), order, name=f"{name}_order"))

    if op.target == REDUCE:
        return collective(ALL_REDUCE, x, op.args[1])
    made = op.outputs[0]
    assert made is not None
    if op.target == EXCHANGE:
        before, after = op.args[1:3]
        shape = out.specs[x].shape
        factors = (*shape[:after], size, shape[after] // size, *shape[after + 1 :])
        x = permuted(out.view(out.contiguous(x), factors), _moved(len(factors), after, 0))
        sent = out.specs[x].shape  # what goes to each rank, and then what comes from each
        x = collective(ALL_TO_ALL, out.view(x, (sent[0] * sent[1], *sent[2:])))
        return out.view(permuted(out.view(x, sent), _moved(len(sent), 0, before)), made.shape)
    dim, blocks = op.args[1:3]
    shape = made.shape if op.target == GATHER else out.specs[x].shape  # of the full value
    inner = shape[dim] // blocks // size
    factors = (*shape[:dim], *((blocks,) if blocks > 1 else ()), size, inner, *shape[dim + 1 :])
    ranks = dim + (blocks > 1)
    is_first = math.prod(factors[:ranks]) == 1 or AS_IT_COMES in dict(op.kwargs)
    rest = tuple(at for at in range(len(factors)) if at != ranks)
    if op.target == GATHER:
        x = collective(ALL_GATHER, x)
        if not is_first:
            x = out.view(x, (size, *(factors[at] for at in rest)), f"{name}_ranks")
            x = permuted(x, (*range(1, ranks + 1), 0, *range(ranks + 1, len(factors))))
        return out.view(x, shape, f"{name}_full")
    if op.target == SLICE:
        if blocks == 1:
            return out.contiguous(out.emit(CHUNK, Ref(x), dim, axis, size, name=name))
        x = out.emit(CHUNK, Ref(out.view(x, factors)), ranks, axis, size, name=name)
        return out.view(x, made.shape, f"{name}_blocks")
    x = out.contiguous(x)
    if not is_first:
        x = permuted(out.view(x, factors, f"{name}_factors"), (ranks, *rest))
    # Blocks keep a dim of their own, which shows along what the result is sharded.
    local = (*shape[:dim], blocks, inner, *shape[dim + 1 :]) if blocks > 1 else made.shape
    x = out.view(x, (size * local[0], *local[1:]), f"{name}_rows")
    return out.view(collective(REDUCE_SCATTER, x, "sum"), made.shape, f"{name}_joined")
