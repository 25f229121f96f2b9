"""What follows from an op's rule: placements of its results from those of its operands; and how views,
permutations and copies put gathered slices in order (`stretto.ir.placements`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.dim_rules import SUMMED, Dims, results_along
from stretto.ir.placement import (
    EQUAL,
    LOCAL,
    SUM,
    NeedsEqualError,
    Placement,
    RefusedError,
    blocks_along,
    cuts_at,
    part,
    where_cut,
)
from stretto.ir.program import Op, TensorSpec

LOOKUPS = {
    "aten.embedding.default": ("part", LOCAL),
    "aten.embedding_dense_backward.default": ("local", part(0)),
}
"""At rows that a rank numbers by itself: what the operand beside them must be, what is made. Rows of a part
of a table are the rank's own, and what it adds up for these rows is its part of the table's gradient."""

EXPAND = "aten.expand.default"
"""Repeats dims of one element: where a rank has as many as it needs, the model alone may have more."""


def with_local(
    rule: Dims | None, names: Sequence[str], given: Sequence[Placement], op: Op
) -> tuple[Placement, ...]:
    """A rank's own numbers beside a part make a part, in place; anything else is the rank's own.

    A partial sum keeps its meaning only where the op adds it to them: each rank's mask is for the sum.
    """
    apart = _apart(rule, given)
    if apart:
        raise NeedsEqualError([names[at] for at in apart])
    if rule is None:
        return (LOCAL,) * max(len(op.outputs), 1)
    if op.target in LOOKUPS and given[1].kind == "local":
        kind, made = LOOKUPS[op.target]
        if given[0].kind != kind and not given[0].zero:
            raise RefusedError(f"{names[0]} is {given[0]}, and meets a rank's own rows")
        return (made,)
    into = op.target.startswith(("aten.scatter", "aten.index_put"))
    for position, kept in enumerate(given):
        if kept.kind != "part" or (into and position):
            continue
        if len(kept.at) > 1:
            continue  # along which dim it is a part, nothing here says
        dim, blocks = kept.at[0]
        label = rule.inputs[position][dim]
        stays = label is not None and (label not in rule.full or into)
        if stays and all(label in out for out in rule.outputs):
            return tuple(part(out.index(label), blocks) for out in rule.outputs)
    return (LOCAL,) * len(op.outputs)


def _apart(rule: Dims | None, given: Sequence[Placement]) -> list[int]:
    """Operands that an op with a rank's own operands does not only add up."""
    partial_sums = {at for at, kept in enumerate(given) if kept.kind == "sum"}
    own = {at for at, kept in enumerate(given) if kept.kind == "local"}
    fits = rule is not None and any(partial_sums | own <= together for together in rule.linear)
    return [] if fits else sorted(partial_sums)


def with_parts(
    op: Op,
    rule: Dims,
    names: Sequence[str],
    given: Sequence[Placement],
    specs: Sequence[TensorSpec],
) -> tuple[Placement, ...]:
    if op.target == EXPAND:
        given = (_before_view(rule, given[0], specs[0]),)
    parts = [at for at, p in enumerate(given) if p.kind == "part"]
    reasons: list[str] = []
    result: list[tuple[Placement, ...]] = []
    needed: list[str] = []
    for dim, blocks in given[parts[0]].at:
        label = rule.inputs[parts[0]][dim] if dim < len(rule.inputs[parts[0]]) else None
        if label is None:
            reasons.append(f"{names[parts[0]]} is {given[parts[0]]}, where it has one element for all")
            continue
        other = _beside(rule, names, given, specs, label, blocks)
        if other is not None:
            reasons.append(other)
            continue
        if label in rule.full:
            reasons.append(f"{names[parts[0]]} is {given[parts[0]]}, and the op needs all of that dim")
            continue
        sums = [names[at] for at, p in enumerate(given) if p.kind == "sum"]
        if sums:
            needed += sums
            continue
        if label in rule.summed and any(not given[at].zero for at in rule.added):
            reasons.append(f"{names[0]} would be added once by every rank")
            continue
        made = results_along(rule, label)
        if made is not None:
            kept = {SUMMED: SUM, None: EQUAL}
            result.append(tuple(part(at, blocks) if isinstance(at, int) else kept[at] for at in made))
    if needed and not result:
        raise NeedsEqualError(needed)
    if not result:
        raise RefusedError(reasons[0] if reasons else f"{names[parts[0]]} is {given[parts[0]]}")
    # Parts go before partial sums: a part may be a partial sum as well (`is_thin`).
    first = min(result, key=lambda made: sum(p.kind == "sum" for p in made))
    alike = [f for f in result if [p.kind for p in f] == [p.kind for p in first]]
    return tuple(
        Placement(
            "part",
            tuple(dict.fromkeys(a for f in alike for a in f[k].at)),
            or_sum=any(f[k].kind == "sum" for f in result),
        )
        if p.kind == "part"
        else p
        for k, p in enumerate(first)
    )


def _before_view(rule: Dims, kept: Placement, spec: TensorSpec) -> Placement:
    """A part of one element that is repeated was viewed otherwise before, and no rank's shape changed: it is
    the same slice of other dims."""
    return kept if any(rule.inputs[0][dim] is not None for dim, _ in kept.at) else all_cuts(kept, spec)


def all_cuts(kept: Placement, spec: TensorSpec) -> Placement:
    """The same slices, along all dims of which they are some."""
    cuts = (cut for at in kept.at for cut in cuts_at(spec.shape, where_cut(spec.shape, *at)))
    return replace(kept, at=tuple(dict.fromkeys((*kept.at, *cuts))))


def _beside(
    rule: Dims,
    names: Sequence[str],
    given: Sequence[Placement],
    specs: Sequence[TensorSpec],
    label: int,
    blocks: int,
) -> str | None:
    """What does not fit beside a part along a label; None where all does."""
    for at, kept in enumerate(given):
        dims = [d for d, of in enumerate(rule.inputs[at]) if of == label]
        if kept.kind == "part":
            if not any(d in dims and b == blocks for d, b in kept.at):
                return f"{names[at]} is {kept}, beside values that are sharded otherwise"
        elif kept.zero or (kept.kind == "equal" and all(d in kept.uniform for d in dims)):
            continue
        elif dims and any(specs[at].shape[d] != blocks for d in dims):
            # Where a slice is one element of each block, the full value beside it is repeated.
            return f"{names[at]} is {kept} on every rank, beside values that are sharded"
        elif dims and kept.kind == "sum":
            return f"{names[at]} is {kept}, beside values that are sharded"
    return None


def full(
    op: Op, rule: Dims, given: Sequence[Placement], specs: Sequence[TensorSpec]
) -> tuple[Placement, ...]:
    """All operands are full: along which dims results are uniform."""
    if op.random or (op.target != EXPAND and not any(p.uniform for p in given)):
        return (EQUAL,) * len(op.outputs)
    made = []
    for out in rule.outputs:
        uniform = set()
        for d, label in enumerate(out):
            if label is None or label in rule.full:
                continue
            if all(
                k in kept.uniform or (op.target == EXPAND and spec.shape[k] == 1)
                for kept, labels, spec in zip(given, rule.inputs, specs, strict=True)
                for k, of in enumerate(labels)
                if of == label
            ):
                uniform.add(d)
        zero = bool(rule.linear) and any(all(given[k].zero for k in group) for group in rule.linear)
        made.append(Placement("equal", uniform=frozenset(uniform), zero=zero) if uniform or zero else EQUAL)
    return tuple(made)


VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default"),
        *("unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "flatten.using_ints"),
        "view_as.default",
    )
)
"""The same elements in the same order in another shape."""


def joined(op: Op, specs: Sequence[TensorSpec]) -> Dims:
    """The rule for a cat, of operands that have dims."""
    labels = tuple(range(len(specs[0].shape)))
    dim = (op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)) % len(labels)
    together_all = (frozenset(range(len(specs))),)
    return Dims((labels,) * len(specs), (labels,), full=frozenset((dim,)), linear=together_all)


def behind_one_another(
    rule: Dims, given: Sequence[Placement], specs: Sequence[TensorSpec]
) -> tuple[tuple[int, int], ...]:
    """What a cat makes of slices along its own dim: blocks."""
    (dim,) = rule.full
    blocks = blocks_along(dim, given, specs)
    return () if blocks is None else ((dim, blocks),)
