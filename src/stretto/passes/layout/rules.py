"""How operands of one op may be placed, and how its results are then: what the table of `stretto.ir.dims`
does not say. Sizes in arguments, pieces, and ops that are the same whatever they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.dim_rules import Dims
from stretto.ir.dims import dims_of, operands, reduced
from stretto.ir.placed_by_rule import joined
from stretto.ir.program import CHUNK, STARTS, WAIT, Arg, Op, Ref, TensorSpec
from stretto.passes.layout.emit import GATHER, LAYOUT_OPS, REDUCE, SCATTER, SLICE, Emitter
from stretto.passes.layout.kernels import SHARED_OP
from stretto.passes.layout.placement import (
    HIGHEST,
    REPLICATED,
    AxisPlacement,
    fits,
    local_shape,
    sharded,
)
from stretto.passes.layout.program import LIKE, NEW, SIZE_AT

CAT = "aten.cat.default"
SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default")

Emit = Callable[[Emitter, Op, Sequence[str]], Sequence[str]]
"""(emitter, op, local operands) -> local results: the value, or of several results the tuple's name alone or
each of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to compute an op. inputs, outputs: placements of its operands and results. emit: the ops that
    do it, where it is not the op itself on local operands. at_once: whether a sum is taken right behind."""

    inputs: tuple[AxisPlacement, ...]
    outputs: tuple[AxisPlacement, ...]
    emit: Emit | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class OpGiven:
    """What is known of an op. placements, specs: of its operands, as they are now; size: of the axis; wanted:
    how its result is, where that is a gradient or becomes one."""

    placements: tuple[AxisPlacement, ...]
    specs: tuple[TensorSpec, ...]
    size: int
    wanted: AxisPlacement | None = None

    @property
    def first(self) -> AxisPlacement:
        return self.placements[0]


Rule = Callable[[Op, OpGiven], Iterator[Choice]]


def as_kernel(op: Op) -> Op:
    """Attention that ranks of another axis share has the dims of its kernel."""
    return replace(op, target=op.target.removeprefix("layout.")) if op.target.startswith(SHARED_OP) else op


def rule_of(op: Op, specs: Sequence[TensorSpec]) -> Dims | None:
    """The op's row in the table of dims, where it is of all of its operands' dims."""
    op = as_kernel(op)
    rule = joined(op, specs) if op.target == CAT else dims_of(op, specs)
    if rule is None or any(len(labels) != len(s.shape) for labels, s in zip(rule.inputs, specs, strict=True)):
        return None
    return rule


def full(op: Op) -> Choice:
    """All is replicated: slow, and right."""
    return Choice((REPLICATED,) * len(operands(op)), (REPLICATED,) * max(len(op.outputs), 1))


def emit_op(choice: Choice, size: int) -> Emit:
    """The op itself, on local operands and with local sizes."""

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        left = list(local)
        sized = SIZE_AT.get(op.target)
        made = op.outputs[0]

        def changed(arg: Arg, at: int | None) -> Arg:
            if isinstance(arg, Ref):
                return Ref(left.pop(0))
            if not isinstance(arg, tuple):
                return arg
            if at is not None and at == sized and made is not None:
                return local_shape(choice.outputs[0], made.shape, size)
            return tuple(changed(item, None) for item in arg)

        args = [changed(arg, at) for at, arg in enumerate(op.args)]
        kwargs = {key: changed(value, None) for key, value in op.kwargs}
        if sized == 1 and "view" in op.target and not out.viewable(args[0].name, args[1]):
            args[0] = Ref(out.contiguous(args[0].name))
        parts = size if any(p.is_sharded for p in (*choice.inputs, *choice.outputs)) else 1
        flops, drawn, like = op.flops // parts, op.random, op.outputs
        name = out.emit(op.target, *args, name=op.name, kwargs=kwargs, flops=flops, random=drawn, like=like)
        return (name,)

    return emit


# --- rules ------------------------------------------------------------------------------------------------


def _highest(op: Op, given: OpGiven) -> Iterator[Choice]:
    """The greatest along dims of which one is sharded is the greatest of what ranks find."""
    if given.first.is_sharded and given.first.dim in reduced(op, len(given.specs[0].shape)):
        yield Choice((given.first,), (HIGHEST,), at_once=True)


def _pieces(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Along another dim every piece is sharded; along the dim that is split, pieces of full blocks are."""
    at, shape = given.first, given.specs[0].shape
    if at.is_partial:
        yield Choice((at,), (at,) * len(op.outputs))
    if not at.is_sharded:
        return
    pieces = [spec for spec in op.outputs if spec is not None]
    dim = (op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0)) % len(shape)
    made = [at] * len(pieces)
    if dim == at.dim:
        block = shape[dim] // at.blocks
        if any(piece.shape[dim] % block for piece in pieces):
            return
        made = [sharded(dim, piece.shape[dim] // block) for piece in pieces]
    if not all(fits(p, piece.shape, given.size) for p, piece in zip(made, pieces, strict=True)):
        return
    lengths = tuple(
        local_shape(p, piece.shape, given.size)[dim] for p, piece in zip(made, pieces, strict=True)
    )

    def emit(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
        return (out.emit("aten.split_with_sizes.default", Ref(local[0]), lengths, dim, name=op.name),)

    yield Choice((at,), tuple(made), emit)


def _joined(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Slices along the dim itself, one behind another: blocks."""
    count = max(len(given.specs[0].shape), 1)
    dim = (op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)) % count
    if all(p.is_sharded and p.dim == dim for p in given.placements):
        lengths = {s.shape[dim] // p.blocks for p, s in zip(given.placements, given.specs, strict=True)}
        if len(lengths) == 1:
            yield Choice(given.placements, (sharded(dim, sum(p.blocks for p in given.placements)),))


def _like(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Of a partial sum only shape, dtype and device count."""
    yield Choice((given.first,), (given.first if given.first.is_sharded else REPLICATED,))


def _new(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Of the operand only dtype and device count."""
    yield Choice((given.first,), (REPLICATED,))


def _of_another_axis(op: Op, given: OpGiven) -> Iterator[Choice]:
    """What communicates along another axis works along dim 0, or the dim that it says, and leaves others
    alone. A sum passes through whatever adds, and whatever only moves values."""
    at = given.first
    if op.target == WAIT or op.target in SUMMING:
        dims: tuple[int, ...] = ()
    elif op.target in (CHUNK, GATHER, SCATTER, SLICE):
        dims = (op.args[1],)
    else:
        dims = (0,)
    if (at.is_sharded and not {at.dim, at.within} & {*dims}) or (at.is_sum and passes_sums(op)):
        yield Choice((at,), (at,))


def passes_sums(op: Op) -> bool:
    """Whether an op communicates along another axis, and leaves partial sums such."""
    return RULES.get(op.target) is _of_another_axis and not (op.target in SUMMING and "max" in op.args)


SUMMING = (REDUCE, ALL_REDUCE.target)

RULES: dict[str, Rule] = {
    **dict.fromkeys((*STARTS, WAIT, CHUNK, *LAYOUT_OPS), _of_another_axis),
    "aten.amax.default": _highest,
    **dict.fromkeys(SPLITS, _pieces),
    CAT: _joined,
    **dict.fromkeys(LIKE, _like),
    **dict.fromkeys(NEW, _new),
}
