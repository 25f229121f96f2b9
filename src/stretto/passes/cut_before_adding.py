"""A rank's chunk of a sum over ranks that something was added to is its chunk of both.

A sequence-parallel rank keeps its slice of what experts and their router give back together: the experts'
part is a sum over ranks, the router's is whole on all. What is summed whole is then cut.

    1. Find a chunk of what is an all-reduce ("sum") of the same axis, with views and additions of tensors of
       the same shape between the two, of which nobody else reads anything.
    2. The all-reduce is made of the shape that the chunk has; the chunk comes right behind it.
    3. What was added is cut too, and added to it.

`scatter` then makes a reduce-scatter of the two. Every element is the sum that it was. Touches `stretto.ir`
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.program import CHUNK, VIEW, VIEWS, WAIT, Op, Ref, TensorSpec
from stretto.passes.graph import Graph
from stretto.passes.rewrite import rebuilt, restrided

ADD = "aten.add.Tensor"
RESHAPES = (*VIEWS, "aten.reshape.default")


def cut_before_adding(graph: Graph) -> Graph:
    """See the module."""
    found = _Found(graph)
    made: dict[str, list[Op]] = {}
    gone: set[str] = set()
    origin: dict[str, str] = {}
    for chunk in graph.ops:
        if chunk.target != CHUNK:
            continue
        path = found.path(chunk.args[0].name, chunk)
        if path is None or len(path) < 3:
            continue
        start, wait, *between = path
        made[start.name], made[wait.name] = found.summed(start, wait, chunk)
        made[chunk.name] = list(found.added(wait, between, chunk))
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


class _Found:
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
        whole = self._specs[chunk.args[0].name]
        if op.target == ALL_REDUCE.target:
            alike = op.args[1] == "sum" and op.args[2] == chunk.args[2]
            return [op] if alike and self._fits(op.args[0].name, whole) else None
        spec = op.outputs[0]
        reshaped = op.target in RESHAPES
        if spec is None or spec.dtype != whole.dtype or spec.stride is not None or spec.numel != whole.numel:
            return None
        if op.target == ADD:
            if op.kwargs or len(op.args) != 2 or len(op.uses) != 2:
                return None
            if any(self._specs.get(used, whole).shape != spec.shape for used in op.uses):
                return None
            if any(self._specs[used].dtype != spec.dtype for used in op.uses if used in self._specs):
                return None
        elif op.target != WAIT and not reshaped:
            return None
        for at, used in enumerate(op.uses[: 1 if reshaped else None]):
            before = self.path(used, chunk)
            if before is not None:
                other = op.uses[1 - at] if op.target == ADD else None
                if other is None or (other in self._specs and self._fits(other, whole)):
                    return [*before, op]
        return None

    def _fits(self, other: str, whole: TensorSpec) -> bool:
        """Whether what is summed or added can be seen in the shape of the whole."""
        spec = self._specs[other]
        return spec.shape == whole.shape or spec.stride is None

    def summed(self, start: Op, wait: Op, chunk: Op) -> tuple[list[Op], list[Op]]:
        """Step 2: the start and the wait."""
        whole = self._specs[chunk.args[0].name]
        before, source = self._shaped(start.args[0].name, whole, start)
        args = (Ref(source), *start.args[1:])
        return [*before, replace(start, args=args, outputs=(whole,))], [replace(wait, outputs=(whole,))]

    def added(self, wait: Op, between: list[Op], chunk: Op) -> Iterator[Op]:
        """Step 3, in the chunk's place."""
        whole, slice_ = self._specs[chunk.args[0].name], chunk.outputs[0]
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
                before, other = self._shaped(op.uses[1 - at], whole, chunk, f"{name}_1")
                yield from before
                cut = f"{name}_part"
                yield replace(chunk, name=cut, args=(Ref(other), *chunk.args[1:]), alias=other)
                both = (Ref(total), Ref(cut)) if at == 0 else (Ref(cut), Ref(total))
                spec = TensorSpec(slice_.shape, slice_.dtype)
                yield Op(name, ADD, both, (), (spec,), module=op.module)
                total = name
            reached.add(op.name)

    def _shaped(self, name: str, whole: TensorSpec, like: Op, called: str = "") -> tuple[list[Op], str]:
        """A value in the shape of the whole, and the view that it needs."""
        if self._specs[name].shape == whole.shape:
            return [], name
        view = f"{called or like.name}_shaped"
        spec = TensorSpec(whole.shape, whole.dtype)
        return [Op(view, VIEW, (Ref(name), whole.shape), (), (spec,), name, module=like.module)], view
