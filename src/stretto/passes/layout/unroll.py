"""The members of an axis of time, one behind another in one program on one rank.

    gather     a concatenation of what the members have
    reduce     their sum, or the greatest
    slice      a view
    scatter    a view of the sum

So an axis need not be one of ranks: what `shard` makes for chunks of a sequence, unrolled, is the same step
in chunks (AMPipe), whose collectives along other axes run under each other's compute. What does not depend on
the chunk is computed once, and draws as in the uncut step.

Members are equal, and a chunk is several of them where chunks are not: sizes along what is sharded are as
many times larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.program import VIEWS, Arg, Op, Ref
from stretto.passes.layout.emit import GATHER, LAYOUT_OPS, REDUCE, SLICE, Emitter, MisfitError
from stretto.passes.layout.placement import AxisPlacement
from stretto.passes.layout.program import SIZE_AT, Origin, StepProgram
from stretto.passes.layout.rules import SPLITS
from stretto.passes.layout.shard import ShardedProgram
from stretto.passes.rewrite import with_uses


@dataclass(frozen=True, slots=True)
class Unrolled:
    """chunks: value of one member -> what it is in each chunk."""

    program: StepProgram
    chunks: Mapping[str, tuple[str, ...]]


def unroll(made: ShardedProgram, axis: str, members: Sequence[int]) -> Unrolled:
    """See the module. members: of each chunk. Nothing that is given is sharded along the axis. Raises
    MisfitError."""
    return _Walk(made, axis, members).run()


class _Walk:
    """of: value -> what it is in each chunk. joined: parts, and along which dim -> what they are together."""

    def __init__(self, made: ShardedProgram, axis: str, members: Sequence[int]) -> None:
        self.made, self.axis, self.members = made, axis, members
        program = made.program
        self.out = Emitter("", 1, program.given, [op.name for op, _ in program.ops])
        self.of: dict[str, tuple[str, ...]] = {name: (name,) * len(members) for name in program.given}
        self.joined: dict[tuple[tuple[str, ...], int], str] = {}
        partial = {program.roots[root] for root in made.partial}
        self.partial = dict.fromkeys(partial, "")

    def run(self) -> Unrolled:
        for op, origin in self.made.program.ops:
            self.out.origin, self.out.module = origin, op.module
            self._process(op, origin)
            if op.name in self.partial:
                self.partial[op.name] = total(self.out, self.of[op.name])
        program = self.made.program
        roots = {
            root: self.partial[value] if root in self.made.partial else self.of[value][0]
            for root, value in program.roots.items()
        }
        return Unrolled(replace(program, ops=tuple(self.out.ops), roots=roots), self.of)

    def _process(self, op: Op, origin: Origin) -> None:
        count = len(self.members)
        if op.target in LAYOUT_OPS and op.args[-2] == self.axis:
            self.of[op.name] = tuple(self._communicated(op, self.of[op.args[0].name]))
        elif all(len(set(self.of[name])) == 1 for name in op.uses):
            self.out.keep(with_uses(op, lambda name: self.of[name][0]), origin)
            self.of[op.name] = (op.name,) * count
        else:
            self.of[op.name] = tuple(self._of_chunk(op, k) for k in range(count))

    def _communicated(self, op: Op, parts: Sequence[str]) -> Sequence[str]:
        count = len(self.members)
        if op.target == REDUCE:
            return [total(self.out, parts, op.args[1] == "max")] * count
        dim, blocks = op.args[1], op.args[2]
        if op.target == GATHER:
            return [self._joined(parts, dim, blocks)] * count
        full = parts[0] if op.target == SLICE else total(self.out, parts)
        cut = [self._part(full, dim, blocks, k) for k in range(count)]
        if blocks == 1:
            self.joined[tuple(cut), dim] = full
        return cut

    def _blocks(self, x: str, dim: int, blocks: int) -> str:
        """With the blocks as a dim of their own, before that of their elements."""
        shape = self.out.specs[x].shape
        return self.out.view(x, (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]))

    def _joined(self, parts: Sequence[str], dim: int, blocks: int) -> str:
        """Parts put together, once."""
        if blocks == 1:
            key = tuple(parts), dim
            if key not in self.joined:
                name, refs = f"{parts[-1]}_joined", tuple(map(Ref, parts))
                self.joined[key] = self.out.emit("aten.cat.default", refs, dim, name=name)
            return self.joined[key]
        full = self._joined([self._blocks(part, dim, blocks) for part in parts], dim + 1, 1)
        shape = self.out.specs[full].shape
        return self.out.view(full, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))

    def _part(self, x: str, dim: int, blocks: int, k: int) -> str:
        wide, at = (x, dim) if blocks == 1 else (self._blocks(x, dim, blocks), dim + 1)
        each = self.out.specs[wide].shape[at] // sum(self.members)
        start, end = each * sum(self.members[:k]), each * sum(self.members[: k + 1])
        part = self.out.emit("aten.slice.Tensor", Ref(wide), at, start, end, name=f"{x}_chunk")
        if blocks == 1:
            return part
        shape = self.out.specs[part].shape
        return self.out.view(part, (*shape[:dim], shape[dim] * shape[at], *shape[at + 1 :]))

    def _of_chunk(self, op: Op, k: int) -> str:
        def arg(value: Arg) -> Arg:
            if isinstance(value, Ref):
                return Ref(self.of[value.name][k])
            return tuple(map(arg, value)) if isinstance(value, tuple) else value

        times, placed = self.members[k], self.made.local.get(op.name)
        args, sized = list(op.args), SIZE_AT.get(op.target)
        if sized is not None and placed is not None:
            args[sized] = _scaled(op.args[sized], placed, times)
        if op.target in SPLITS:
            source, dim = self.made.local.get(op.args[0].name), op.args[2]
            if source is not None and source.is_sharded and source.dim == dim:
                args[1] = tuple(length * times for length in op.args[1])
        args = [arg(value) for value in args]
        kwargs = {key: arg(value) for key, value in op.kwargs}
        if op.target in VIEWS and not self.out.viewable(args[0].name, args[1]):
            args[0] = Ref(self.out.contiguous(args[0].name))
        name = self.out.emit(
            op.target, *args, name=op.name, kwargs=kwargs, flops=op.flops * times, random=op.random
        )
        made = op.outputs[0] if len(op.outputs) == 1 and placed is not None else None
        if made is not None and self.out.specs[name].shape != _scaled(made.shape, placed, times):
            raise MisfitError(f"{op.target} ({op.module}) makes {self.out.specs[name]} of a chunk")
        return name


def _scaled(shape: Sequence[int], placement: AxisPlacement | None, times: int) -> tuple[int, ...]:
    """The shape of so many members together."""
    if placement is None or not placement.is_sharded:
        return tuple(shape)
    return tuple(n * times if dim == placement.dim else n for dim, n in enumerate(shape))


def total(out: Emitter, partials: Sequence[str], largest: bool = False) -> str:
    """The sum of values, or of each element the largest."""
    result, *rest = partials
    for other in rest:
        target = "aten.maximum.default" if largest else "aten.add.Tensor"
        result = out.emit(target, Ref(result), Ref(other), name=f"{result}_sum")
    return result
