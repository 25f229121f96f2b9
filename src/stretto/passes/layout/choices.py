"""The ways in which one op can be computed on what ranks have: how operands are placed, and results then.

They come from the table by which layouts are proved (`stretto.ir.dims`), from what views do to slices, and
from the rules of this room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.dim_rules import SUMMED, Dims, results_along
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import Op
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.lookups import LOOKUPS
from stretto.passes.layout.placement import (
    PARTIAL,
    REPLICATED,
    SHARED_SUM,
    AxisPlacement,
    fits,
    sharded,
    viewed,
)
from stretto.passes.layout.program import KEEP_PARTIAL
from stretto.passes.layout.rules import RULES, Choice, OpGiven, Rule, as_kernel, full
from stretto.passes.layout.shared_heads import SHARED, along_shared, along_two
from stretto.passes.layout.values import Values


@dataclass(slots=True)
class OpChoices:
    """asked: wishes, value -> placement; wanted: placements of gradients, and of what they are made of;
    summed_later: gradients that may stay partial, and what they are views and copies of. more, of_time: rules
    of this axis alone, and whether it is one of time, as of `shard`."""

    values: Values
    ahead: Ahead
    asked: dict[str, AxisPlacement]
    wanted: Mapping[str, AxisPlacement]
    summed_later: Collection[str]
    size: int
    more: Mapping[str, Rule]
    of_time: bool = False

    def of(self, op: Op, names: Sequence[str]) -> Iterator[Choice]:
        """names: the op's operands. The first is to compute all in full."""
        yield full(op)
        if not names or (op.random and self.of_time):
            return
        placed, spec = self.values.placed, self.values.spec
        given = OpGiven(
            tuple(placed[name] for name in names),
            tuple(spec[name] for name in names),
            self.size,
            self.wanted.get(op.name),
        )
        op = as_kernel(op)
        for rules in (LOOKUPS, RULES, SHARED, self.more):
            if op.target in rules:
                yield from rules[op.target](op, given)
        if op.target in VIEW_OPS:
            yield from self._view(op, names[0])
            return
        reads = self.ahead.reads(op)
        if reads is None or reads.rule is None:
            return
        rule = reads.rule
        yield from self._partial(op, names, rule, given)
        yield from along_two(op, rule, given)
        for label, blocks, copies in dict.fromkeys(self._labels(op, names, rule)):
            if copies > 1:
                yield from along_shared(op, rule, given, label, blocks, copies)
            else:
                yield from self._along(op, rule, given, label, blocks)

    def wish(self, name: str) -> AxisPlacement | None:
        """How a partial sum is best scattered; None where it is best summed."""
        at = self.asked.get(name) or self.ahead.best(name, self.values.placed, self.asked, self.values.fixed)
        spec = self.ahead.spec(name)
        return at if at is not None and spec is not None and fits(at, spec.shape, self.size) else None

    def _is_summed_later(self, name: str) -> bool:
        return self.ahead.is_summed_later(name, lambda value: self.wish(value) is not None)

    def _known(self, name: str) -> Iterator[AxisPlacement]:
        """Placements that an operand has, or may have where its sum is scattered."""
        if not self.values.placed[name].is_partial:
            yield from self.values.forms[name]
        elif self.values.placed[name].is_sum:
            wish = self.wish(name)
            if wish is not None:
                yield wish

    def _view(self, op: Op, name: str) -> Iterator[Choice]:
        made = op.outputs[0]
        assert made is not None
        for at in dict.fromkeys((self.values.placed[name], *self._known(name))):
            after = viewed(at, self.values.spec[name].shape, made.shape, self.size)
            # Chunks may be of unequal length, and no even part of another dim.
            if after is not None and (after.within is None or not self.of_time):
                yield Choice((at,), (after,))

    def _partial(self, op: Op, names: Sequence[str], rule: Dims, given: OpGiven) -> Iterator[Choice]:
        """Partial sums of operands in which the op is linear make partial sums."""
        same = all(spec is None or spec.dtype == given.specs[0].dtype for spec in op.outputs)
        # Sums are taken in the dtype of what is added.
        keeps = op.target in KEEP_PARTIAL and (same or op.name in self.summed_later)
        for together in rule.linear:
            sums = {k for k in together if given.placements[k].is_sum}
            later = same and not op.flops and all(self._is_summed_later(names[k]) for k in sums)
            shared = sums == together and all(given.placements[k] == SHARED_SUM for k in sums)
            if sums and (keeps or shared or later):
                inputs = tuple(
                    given.placements[k] if k in sums else PARTIAL if k in together else REPLICATED
                    for k in range(len(given.specs))
                )
                made = SHARED_SUM if shared and not op.flops else PARTIAL
                yield Choice(inputs, (made,) * len(op.outputs))

    def _along(self, op: Op, rule: Dims, given: OpGiven, label: int, blocks: int) -> Iterator[Choice]:
        """Slices along one label of the op's rule."""
        made = results_along(rule, label)
        if label in rule.full or (label in rule.summed and rule.added) or made is None:
            return
        inputs = tuple(
            sharded(labels.index(label), blocks) if label in labels else REPLICATED for labels in rule.inputs
        )
        outputs = tuple(
            sharded(dim, blocks) if isinstance(dim, int) else PARTIAL if dim == SUMMED else REPLICATED
            for dim in made
        )
        of_inputs = zip(inputs, given.specs, strict=True)
        of_outputs = zip(outputs, op.outputs, strict=True)
        if all(fits(at, spec.shape, self.size) for at, spec in of_inputs) and all(
            spec is None or fits(at, spec.shape, self.size) for at, spec in of_outputs
        ):
            yield Choice(inputs, outputs)

    def _labels(self, op: Op, names: Sequence[str], rule: Dims) -> Iterator[tuple[int, int, int]]:
        """(label, blocks, copies) along which operands are sharded, or may be, or the result is wanted."""
        for name, labels in zip(names, rule.inputs, strict=True):
            for at in self._known(name):
                single = at.is_sharded and at.within is None and at.dim < len(labels)
                label = labels[at.dim] if single else None
                if label is not None:
                    yield label, at.blocks, at.copies
        want = self.wanted.get(op.name)
        if want is not None and len(rule.outputs) == 1:
            label = rule.outputs[0][want.dim]
            if label is not None and want.copies == 1:
                yield label, want.blocks, 1
