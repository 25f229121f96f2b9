"""An all-reduce of which each rank keeps its own chunk becomes a reduce-scatter.

It moves half of the bytes, and the rest was computed for nobody. Sequence parallelism makes such pairs at its
borders: the embedding is summed and then cut, the gradient that the output head sums is cut by the norm.

    1. Find a start of an all-reduce ("sum") whose result is used by chunks along one dim of the same axis
       alone; copies between the two (a dropout that drops nothing) do not matter.
    2. In its place: the dim comes first and in one piece (a view where nothing stands before it, else a
       copy), then the reduce-scatter and its wait.
    3. Every chunk becomes a view of the wait. What views the chunk has the strides that follow; where they do
       not follow from the op alone, the all-reduce stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from stretto.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from stretto.ir.program import CHUNK, VIEW, WAIT, Const, Op, Ref, TensorSpec
from stretto.passes.graph import Graph
from stretto.passes.rewrite import dense_strides, rebuilt, restrided, viewed

COPIES = ("aten.clone.default",)


def reduce_scatter_chunks(graph: Graph) -> Graph:
    """See the module."""
    users = graph.users()
    made: dict[str, list[Op]] = {}
    gone: set[str] = set()
    origin: dict[str, str] = {}
    for start in graph.ops:
        if start.target != ALL_REDUCE.target or start.args[1] != "sum":
            continue
        found = _chunks(start, users, graph.roots)
        if found is None:
            continue
        chunks, between = found
        new = list(_scattered(start, chunks[0]))
        made[start.name] = new
        gone.update(between)
        for chunk in chunks:
            view = _view(chunk.name, new[-1].name, chunk.outputs[0], new[-1].alias)
            made[chunk.name] = [view]
        origin.update((op.name, start.name) for op in new)
    if not made:
        return graph
    ops: list[Op] = []
    for op in graph.ops:
        if op.name not in gone:
            ops += made.get(op.name, [op])
    dense = {name: op.outputs[0] for name, (op, *_) in made.items() if op.target == VIEW and op.name == name}
    return rebuilt(graph, restrided(ops, dense), origin=origin)


def _chunks(
    start: Op, users: dict[str, list[Op]], roots: frozenset[str]
) -> tuple[list[Op], list[str]] | None:
    """Step 1: the chunks, and the ops between start and chunks."""
    chunks: list[Op] = []
    between: list[str] = []
    reached = [start.name]
    while reached:
        name = reached.pop()
        if name in roots:
            return None
        for user in users.get(name, ()):
            if user.target == WAIT or user.target in COPIES:
                reached.append(user.name)
                between.append(user.name)
            elif user.target == CHUNK and user.args[2] == start.args[2]:
                chunks.append(user)
            else:
                return None
    if not chunks or any(chunk.args[1] != chunks[0].args[1] for chunk in chunks):
        return None
    views = [(chunk, TensorSpec(chunk.outputs[0].shape, chunk.outputs[0].dtype)) for chunk in chunks]  # type: ignore[union-attr]
    while views:
        op, spec = views.pop()
        for user in users.get(op.name, ()):
            if user.alias is not None and user.uses[0] == op.name:
                made = viewed(user, spec)
                if made is None:
                    return None
                views.append((user, made))
    return chunks, between


def _scattered(start: Op, chunk: Op) -> Iterator[Op]:
    """Step 2."""
    whole = start.outputs[0]
    assert whole is not None
    source, axis, size, dim = start.args[0], str(start.args[2]), int(start.args[3]), int(chunk.args[1])
    shape, dtype = whole.shape, whole.dtype
    part = shape[dim] // size
    name, module = start.name, start.module
    value: str = source.name
    if dim and math.prod(shape[:dim]) > 1:
        split = (*shape[:dim], size, part, *shape[dim + 1 :])
        order = (dim, *(d for d in range(len(split)) if d != dim))
        moved = tuple(split[d] for d in order)
        strides = dense_strides(split)
        yield _op(f"{name}_split", VIEW, (Ref(value), split), TensorSpec(split, dtype), module, value)
        permuted = TensorSpec(moved, dtype, tuple(strides[d] for d in order))
        yield _op(
            f"{name}_first", "aten.permute.default", (Ref(f"{name}_split"), order), permuted, module, value
        )
        yield replace(
            _op(
                f"{name}_copy",
                "aten.clone.default",
                (Ref(f"{name}_first"),),
                TensorSpec(moved, dtype),
                module,
            ),
            kwargs=(("memory_format", Const("memory_format", "contiguous_format")),),
        )
        value = f"{name}_copy"
    first = (size * shape[0], *(part if d == dim else n for d, n in enumerate(shape) if d)) if dim else shape
    scattered = TensorSpec((first[0] // size, *first[1:]), dtype)
    yield _op(f"{name}_rows", VIEW, (Ref(value), first), TensorSpec(first, dtype), module, value)
    yield _op(name, REDUCE_SCATTER.target, (Ref(f"{name}_rows"), "sum", axis, size), scattered, module)
    yield _op(f"{name}_wait", WAIT, (Ref(name),), scattered, module, name)


def _op(
    name: str, target: str, args: tuple[object, ...], spec: TensorSpec, module: str, alias: str | None = None
) -> Op:
    return Op(name, target, args, (), (spec,), alias, module=module)


def _view(name: str, source: str, spec: TensorSpec | None, alias: str | None) -> Op:
    """Step 3. The result is contiguous, whatever the chunk's strides were."""
    assert spec is not None
    plain = TensorSpec(spec.shape, spec.dtype)
    return Op(name, VIEW, (Ref(source), plain.shape), (), (plain,), alias)
