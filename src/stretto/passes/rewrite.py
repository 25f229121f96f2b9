"""Shared by passes: put one value in another's place, drop what is not needed, record the storage of
views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from stretto.ir.action import Phase
from stretto.ir.dims import dims_of
from stretto.ir.flow import PHASES
from stretto.ir.parameters import dense_strides as dense_strides
from stretto.ir.parameters import strides_of as strides_of
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import Arg, Edge, Op, Ref, Stage, TensorSpec

SLICE = "aten.slice.Tensor"
PERMUTED = ("aten.permute.default", "aten.transpose.int", "aten.t.default")


def with_uses(op: Op, name: Callable[[str], str]) -> Op:
    """The op with other values in the places of those that it uses, or is a view of; its own name stays."""
    alias = None if op.alias is None else name(op.alias)
    if alias == op.alias and all(name(used) == used for used in op.uses):
        return op

    def arg(value: Arg) -> Arg:
        if isinstance(value, Ref):
            return Ref(name(value.name))
        return tuple(arg(item) for item in value) if isinstance(value, tuple) else value

    args = tuple(arg(value) for value in op.args)
    return replace(op, args=args, kwargs=tuple((key, arg(value)) for key, value in op.kwargs), alias=alias)


def rooted(ops: Iterable[Op]) -> Iterator[Op]:
    """The ops, with every view's `alias` the value that owns its storage, through views of views."""
    owners: dict[str, str] = {}
    for op in ops:
        if op.alias is not None:
            source = next(arg.name for arg in op.args if isinstance(arg, Ref))
            owner = owners.get(source, source)
            owners[op.name] = owner
            op = op if op.alias == owner else replace(op, alias=owner)
        yield op


def changed(stage: Stage, news: Callable[[Op], Iterable[Op]]) -> Stage:
    """The stage with the ops that `news` gives for each of its ops in its place."""
    return replace(
        stage, ops={phase: tuple(new for op in ops for new in news(op)) for phase, ops in stage.ops.items()}
    )


def users_of(ops: Iterable[Op]) -> dict[str, list[Op]]:
    """Value -> the ops that use it."""
    result: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        for name in op.uses:
            result[name].append(op)
    return result


def stage_of(index: int, programs: Mapping[Phase, Sequence[Op]]) -> Stage:
    """A stage whose views are called after the storages that it has: a received value has one of its own,
    whatever it was a view of where it was made."""
    owned = rooted(op for phase in PHASES for op in programs[phase])
    return Stage(index, {phase: tuple(islice(owned, len(programs[phase]))) for phase in PHASES})


def read_as(
    programs: dict[Phase, tuple[Op, ...]], edge: Edge, name: str, made: Callable[[str], Sequence[Op]]
) -> None:
    """Lets a stage read what arrives over an edge under another name. programs: the stage's, which are
    changed. made: the ops that make `name`, for the module that reads first; they come before its op."""
    for phase in PHASES:
        programs[phase] = tuple(
            with_uses(op, lambda used: name if used == edge.value else used) for op in programs[phase]
        )
    ops = programs[edge.user_phase]
    first = next(at for at, op in enumerate(ops) if name in op.uses)
    programs[edge.user_phase] = (*ops[:first], *made(ops[first].module), *ops[first:])


def spec_with(shape: Sequence[int], dtype: str, strides: Sequence[int]) -> TensorSpec:
    """A spec, whose strides are left out where they are those of a contiguous tensor."""
    dense = all(s == d or n == 1 for s, d, n in zip(strides, dense_strides(shape), shape, strict=True))
    return TensorSpec(tuple(shape), dtype, None if dense else tuple(strides))


def viewed(op: Op, source: TensorSpec) -> TensorSpec | None:
    """What a view makes of a source, with its strides; None for another kind of view."""
    made = op.spec
    if made is None:
        return None
    if op.target in VIEW_OPS:
        return TensorSpec(made.shape, made.dtype) if source.stride is None else None
    strides = strides_of(source)
    if op.target == SLICE:
        dim, step = op.args[1] if len(op.args) > 1 else 0, op.args[4] if len(op.args) > 4 else 1
        steps = [stride * (step if d == dim % len(strides) else 1) for d, stride in enumerate(strides)]
        return spec_with(made.shape, made.dtype, steps)
    rule = dims_of(op, [source]) if op.target in PERMUTED else None
    if rule is None:
        return None
    return spec_with(made.shape, made.dtype, [strides[d] for d in rule.outputs[0] if d is not None])


def restrided(ops: Iterable[Op], specs: dict[str, TensorSpec | None]) -> list[Op]:
    """The ops, where views of values that have other strides now have those that follow. specs: of these
    values; those of the views come to it."""
    result = []
    for op in ops:
        source = specs.get(op.uses[0]) if op.alias is not None and op.uses else None
        spec = None if source is None else viewed(op, source)
        if spec is not None:
            specs[op.name] = spec
            op = replace(op, outputs=(spec,))
        result.append(op)
    return result


def live(ops: Iterable[Op], roots: Iterable[str]) -> list[Op]:
    """The ops from which a root can be reached, in order."""
    needed = set(roots)
    kept: list[Op] = []
    for op in reversed(list(ops)):
        if op.name in needed:
            needed.update(op.uses)
            kept.append(op)
    return kept[::-1]
