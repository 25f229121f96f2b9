"""An all-reduce of which each rank keeps its own chunk becomes a reduce-scatter: half of the bytes.

`cut_before_adding` comes first: a rank's chunk of a reduction that something was added to is its chunk of
both. A sequence-parallel rank keeps its slice of what experts and their router return together.

    1. Find a chunk of an all-reduce ("sum") of the same axis, with views and additions of tensors of the same
       shape between the two, of which no one else reads anything.
    2. The all-reduce is made of the shape that the chunk has; the chunk comes right behind it.
    3. What was added is cut too, and added to it. Every element is the sum that it was.

`reduce_scatter_chunks`:

    1. Find a start of an all-reduce ("sum") whose result is used by chunks along one dim of the same axis
       alone; copies between the two (a dropout that drops nothing) do not matter.
    2. In its place: the dim comes first and contiguous, then the reduce-scatter and its wait.
    3. Every chunk becomes a view of the wait. What views the chunk has the strides that follow; where they do
       not follow from the op alone, the all-reduce stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from stretto.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from stretto.ir.program import CHUNK, VIEW, VIEWS, WAIT, Const, Op, Ref, TensorSpec
from stretto.passes.rewrite import Graph, dense_strides, rebuilt, restrided, viewed

ADD = "aten.add.Tensor"
RESHAPES = (*VIEWS, "aten.reshape.default")


def cut_before_adding(graph: Graph) -> Graph:
    """See the module."""
    result = _Cut(graph)
    made: dict[str, list[Op]] = {}
    gone: set[str] = set()
    origin: dict[str, str] = {}
    for chunk in graph.ops:
        if chunk.target != CHUNK:
            continue
        path = result.path(chunk.args[0].name, chunk)
        if path is None or len(path) < 3:
            continue
        start, wait, *between = path
        made[start.name], made[wait.name] = result.summed(start, wait, chunk)
        made[chunk.name] = list(result.added(wait, between, chunk))
        gone.update(op.name for op in between)
        origin.update((op.name, start.name) for op in made[start.name])
        origin.update((op.name, chunk.name) for op in made[chunk.name])
    if not made:
        return graph
    ops = [new for op in graph.ops if op.name not in gone for new in made.get(op.name, [op])]
    sums = {op.name: op.outputs[0] for news in made.values() for op in news if op.target == ADD}
    return rebuilt(
        graph, restrided(ops, sums), origin={new: old for new, old in origin.items() if new != old}
    )


class _Cut:
    def __init__(self, graph: Graph) -> None:
        self._made = {op.name: op for op in graph.ops}
        self._users = graph.users()
        self._roots = graph.roots
        self._specs: Mapping[str, TensorSpec] = graph.specs()

    def path(self, name: str, chunk: Op) -> list[Op] | None:
        """Step 1: the start, its wait, and what is between it and a value that only one op reads."""
        op = self._made.get(name)
        if op is None or name in self._roots or len(self._users[name]) != 1 or len(op.outputs) != 1:
            return None
        full = self._specs[chunk.args[0].name]
        if op.target == ALL_REDUCE.target:
            same = op.args[1] == "sum" and op.args[2] == chunk.args[2]
            return [op] if same and self._fits(op.args[0].name, full) else None
        spec = op.outputs[0]
        reshaped = op.target in RESHAPES
        if spec is None or spec.dtype != full.dtype or spec.stride is not None or spec.numel != full.numel:
            return None
        if op.target == ADD:
            if op.kwargs or len(op.args) != 2 or len(op.uses) != 2:
                return None
            if any(self._specs.get(used, full).shape != spec.shape for used in op.uses):
                return None
            if any(self._specs[used].dtype != spec.dtype for used in op.uses if used in self._specs):
                return None
        elif op.target != WAIT and not reshaped:
            return None
        for at, used in enumerate(op.uses[: 1 if reshaped else None]):
            before = self.path(used, chunk)
            if before is not None:
                other = op.uses[1 - at] if op.target == ADD else None
                if other is None or (other in self._specs and self._fits(other, full)):
                    return [*before, op]
        return None

    def _fits(self, other: str, unsharded: TensorSpec) -> bool:
        """Whether what is summed or added can be seen in the shape of the full tensor."""
        spec = self._specs[other]
        return spec.shape == unsharded.shape or spec.stride is None

    def summed(self, start: Op, wait: Op, chunk: Op) -> tuple[list[Op], list[Op]]:
        """Step 2: the start and the wait."""
        full = self._specs[chunk.args[0].name]
        before, source = self._shaped(start.args[0].name, full, start)
        args = (Ref(source), *start.args[1:])
        return [*before, replace(start, args=args, outputs=(full,))], [replace(wait, outputs=(full,))]

    def added(self, wait: Op, between: list[Op], chunk: Op) -> Iterator[Op]:
        """Step 3, in the chunk's place."""
        full, slice_ = self._specs[chunk.args[0].name], chunk.outputs[0]
        assert slice_ is not None
        adding = [op for op in between if op.target == ADD]
        own = f"{chunk.name}_0" if adding else chunk.name
        yield replace(chunk, name=own, args=(Ref(wait.name), *chunk.args[1:]), alias=wait.name)
        reached = {wait.name}
        total = own
        for op in between:
            if op.target == ADD:
                at = op.uses.index(next(used for used in op.uses if used in reached))
                name = chunk.name if op is adding[-1] else f"{op.name}_cut"
                before, other = self._shaped(op.uses[1 - at], full, chunk, f"{name}_1")
                yield from before
                cut = f"{name}_part"
                yield replace(chunk, name=cut, args=(Ref(other), *chunk.args[1:]), alias=other)
                both = (Ref(total), Ref(cut)) if at == 0 else (Ref(cut), Ref(total))
                spec = TensorSpec(slice_.shape, slice_.dtype)
                yield Op(name, ADD, both, (), (spec,), module=op.module)
                total = name
            reached.add(op.name)

    def _shaped(self, name: str, unsharded: TensorSpec, like: Op, called: str = "") -> tuple[list[Op], str]:
        """A value in the shape of the full tensor, and the view that it needs."""
        if self._specs[name].shape == unsharded.shape:
            return [], name
        view = f"{called or like.name}_shaped"
        spec = TensorSpec(unsharded.shape, unsharded.dtype)
        return [Op(view, VIEW, (Ref(name), unsharded.shape), (), (spec,), name, module=like.module)], view


COPY = "aten.clone.default"


def reduce_scatter_chunks(graph: Graph) -> Graph:
    """See the module."""
    users = graph.users()
    made: dict[str, list[Op]] = {}
    gone: set[str] = set()
    origin: dict[str, str] = {}
    for start in graph.ops:
        if start.target != ALL_REDUCE.target or start.args[1] != "sum":
            continue
        result = _chunks(start, users, graph.roots)
        if result is None:
            continue
        chunks, between = result
        new = list(_scattered(start, chunks[0]))
        made[start.name] = new
        gone.update(between)
        for chunk in chunks:  # step 3; contiguous, whatever the chunk's strides were
            assert chunk.outputs[0] is not None
            plain = replace(chunk.outputs[0], stride=None)
            view = Op(chunk.name, VIEW, (Ref(new[-1].name), plain.shape), (), (plain,), new[-1].alias)
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
            if user.target in (WAIT, COPY):
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
    full = start.outputs[0]
    assert full is not None
    source, axis, size, dim = start.args[0], str(start.args[2]), int(start.args[3]), int(chunk.args[1])
    shape, dtype = full.shape, full.dtype
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
        source = Ref(f"{name}_split")
        yield _op(f"{name}_first", "aten.permute.default", (source, order), permuted, module, value)
        value = f"{name}_copy"
        copied = _op(value, COPY, (Ref(f"{name}_first"),), TensorSpec(moved, dtype), module)
        yield replace(copied, kwargs=(("memory_format", Const("memory_format", "contiguous_format")),))
    first = (size * shape[0], *(part if d == dim else n for d, n in enumerate(shape) if d)) if dim else shape
    scattered = TensorSpec((first[0] // size, *first[1:]), dtype)
    yield _op(f"{name}_rows", VIEW, (Ref(value), first), TensorSpec(first, dtype), module, value)
    yield _op(name, REDUCE_SCATTER.target, (Ref(f"{name}_rows"), "sum", axis, size), scattered, module)
    yield _op(f"{name}_wait", WAIT, (Ref(name),), scattered, module, name)


def _op(
    name: str, target: str, args: tuple[object, ...], spec: TensorSpec, module: str, alias: str | None = None
) -> Op:
    return Op(name, target, args, (), (spec,), alias, module=module)
