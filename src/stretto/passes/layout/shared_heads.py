"""What the trace of a parameter says of its features: equal matrices that it packs (`blocks_of`), and heads,
which several ranks share where there are fewer heads of keys than ranks.

Where code views the features that a parameter makes as heads, of which there are fewer than ranks, `copies`
ranks in a row have the same head (`copies_of`). No name says so; the views of the trace do.

Forward, each of `copies` ranks has the same head. Where heads are repeated, each has those repetitions that
its own queries read. Backward, each has a partial sum of its head's gradient, which ops keep that are linear
in it; a sum over all heads is a partial sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stretto.ir.dim_rules import SUMMED, Dims, results_along
from stretto.ir.dims import operands
from stretto.ir.op_names import ATTENTION, ATTENTION_BACKWARD, COPIES, SCALED, SUMS
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import Op
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.placement import (
    PARTIAL,
    REPLICATED,
    SHARED_SUM,
    AxisPlacement,
    fits,
    sharded,
)
from stretto.passes.layout.program import SAME_DATA
from stretto.passes.layout.rules import SPLITS, Choice, OpGiven, Rule, rule_of


def copies_of(ahead: Ahead, parameter: str, placement: AxisPlacement) -> int:
    """How many ranks have the same of what a parameter makes, so that each has full heads. Heads are the
    first dim into which the first view that takes the features apart cuts them."""
    if placement.blocks > 1:
        return 1
    *_, (name, dim) = _features(ahead, parameter, placement.dim)
    for op in ahead.uses.get(name, ()):
        spec, made = ahead.spec(name), op.outputs[0] if op.outputs else None
        if op.target in VIEW_OPS and spec is not None and made is not None:
            dims = _begun(spec.shape, dim, made.shape)
            if dims:
                return ahead.size // math.gcd(ahead.size, made.shape[dims[0]])
    return 1


def blocks_of(ahead: Ahead, parameter: str, placement: AxisPlacement) -> int:
    """How many equal matrices a parameter packs: into as many pieces what it makes is split."""
    for name, dim in _features(ahead, parameter, placement.dim) if placement.blocks == 1 else ():
        spec = ahead.spec(name)
        for op in ahead.uses.get(name, ()):
            at = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0)
            if op.target in SPLITS and spec is not None and at % len(spec.shape) == dim:
                count, sizes = len(op.outputs), {made.shape[dim] for made in op.outputs if made is not None}
                fits_all = spec.shape[dim] % (count * ahead.size) == 0
                return count if len(sizes) == 1 and fits_all else 1
    return 1


def _features(ahead: Ahead, parameter: str, dim: int) -> Iterator[tuple[str, int]]:
    """Values that have a parameter's features, and their dim, up to the first view that takes these apart."""
    name = parameter
    while True:
        yield name, dim
        op = next((op for op in ahead.uses.get(name, ()) if op.target in FOLLOWED), None)
        made = None if op is None else op.outputs[0]
        if op is None or made is None:
            return
        specs = [spec for each in operands(op) if (spec := ahead.spec(each)) is not None]
        if op.target in VIEW_OPS:
            dims = _begun(specs[0].shape, dim, made.shape)
            if not dims or made.shape[dims[0]] != specs[0].shape[dim]:
                return
            dim = dims[0]
        else:
            rule = rule_of(op, specs)
            label = None if rule is None else rule.inputs[operands(op).index(name)][dim]
            if rule is None or label is None or label not in rule.outputs[0]:
                return
            dim = rule.outputs[0].index(label)
        name = op.name


def _begun(before: Sequence[int], dim: int, after: Sequence[int]) -> list[int]:
    """Dims of a view that begin where a dim does."""
    return [d for d in range(len(after)) if math.prod(after[:d]) == math.prod(before[:dim])]


def along_shared(
    op: Op, rule: Dims, given: OpGiven, label: int, blocks: int, copies: int
) -> Iterator[Choice]:
    """Slices along a label that ranks share."""
    made = results_along(rule, label)
    adding = frozenset(k for k, at in enumerate(given.placements) if at.adds and at.is_sharded)
    if made is None or label in rule.full or (adding and adding not in rule.linear):
        return
    if any(label not in rule.inputs[k] for k in adding) or (label in rule.summed and not adding):
        return

    def place(dim: int, adds: bool) -> AxisPlacement:
        return replace(sharded(dim, blocks), copies=copies, adds=adds)

    inputs = tuple(
        place(labels.index(label), k in adding) if label in labels else REPLICATED
        for k, labels in enumerate(rule.inputs)
    )
    outputs = tuple(
        place(dim, bool(adding)) if isinstance(dim, int) else PARTIAL if dim == SUMMED else REPLICATED
        for dim in made
    )
    if all(fits(at, spec.shape, given.size) for at, spec in zip(inputs, given.specs, strict=True)):
        yield Choice(inputs, outputs)


def along_two(op: Op, rule: Dims, given: OpGiven) -> Iterator[Choice]:
    """An op of one operand that is sharded along two dims."""
    at = given.first
    if at.within is None or len(given.specs) != 1 or len(rule.outputs) != 1:
        return
    labels, out = rule.inputs[0], rule.outputs[0]
    outer, inner = labels[at.dim], labels[at.within]
    if outer is None or inner is None or outer not in out or not rule.full.isdisjoint((outer, inner)):
        return
    if inner in out:
        yield Choice((at,), (replace(at, dim=out.index(outer), within=out.index(inner)),))
    elif inner in rule.summed:
        yield Choice((at,), (replace(at, dim=out.index(outer), within=None, adds=True),))


def _repeated(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Repetitions of a head that ranks share: each has those of its own queries."""
    at, made, behind = given.first, op.outputs[0], given.first.dim + 1
    if at.copies == 1 or at.adds or at.within is not None or made is None:
        return
    shape = given.specs[0].shape
    if len(made.shape) == len(shape) > behind and shape[behind] == 1 and made.shape[behind] % at.copies == 0:
        yield Choice((at,), (replace(at, within=behind),))


def _attention(op: Op, given: OpGiven) -> Iterator[Choice]:
    """Queries are sharded by heads, of which each rank's read the one head of keys that it has."""
    backward = op.target in ATTENTION_BACKWARD
    keys = (2, 3) if backward else (1, 2)
    queries, at = keys[0] - 1, given.placements[keys[0]]
    rule = rule_of(op, given.specs)
    if rule is None or given.placements[keys[1]] != at:
        return
    heads = rule.inputs[queries][1]
    of_one = at == REPLICATED and rule.inputs[keys[0]][1] is None and given.placements[queries] == sharded(1)
    if heads is None or not (of_one or (at.copies > 1 and at.dim == 1)):
        return
    inputs = tuple(
        at if k in keys else sharded(labels.index(heads)) if heads in labels else REPLICATED
        for k, labels in enumerate(rule.inputs)
    )
    outputs = [sharded(labels.index(heads)) if heads in labels else REPLICATED for labels in rule.outputs]
    if backward:
        outputs[1:3] = [SHARED_SUM if of_one else replace(at, adds=True)] * 2
    fitting = zip((*inputs, *outputs), (*given.specs, *op.outputs), strict=True)
    if all(spec is None or fits(place, spec.shape, given.size) for place, spec in fitting):
        yield Choice(inputs, tuple(outputs))


FOLLOWED = (
    VIEW_OPS
    | SAME_DATA
    | COPIES
    | SUMS
    | SCALED
    | {f"aten.{name}.default" for name in ("mm", "bmm", "addmm")}
)
"""From a parameter to its features' heads."""

SHARED: dict[str, Rule] = {
    "aten.expand.default": _repeated,
    **dict.fromkeys((*ATTENTION, *ATTENTION_BACKWARD), _attention),
}
