"""What is gathered along the sequence is used in the order in which it arrives, where no op minds the order.

Of a batch of several a gathered sequence arrives rank by rank (n, b, s), and is copied into (b, n, s); before
it is scattered, it is copied back. An MLP does the same to every token: both copies are for nothing.

    1. From every gather along the sequence, find the values that have a row for each token, through what
       makes them and what uses them. The order may change when each op treats all rows in the same way, or
       sums over all of them (a weight's gradient), as `stretto.ir.dims` says, and the ends are gathers and
       scatters along the sequence.
    2. These have the keyword `AS_IT_COMES`, and `lower` copies nothing. Sums over rows are regrouped:
       gradients of weights differ in last bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.ir.dims import Dims, dims_of, operands
from stretto.ir.program import VIEWS, Arg, Op, TensorSpec
from stretto.passes.layout.emit import AS_IT_COMES, GATHER, SCATTER
from stretto.passes.layout.program import StepProgram
from stretto.passes.no_ops import specs_in
from stretto.passes.rewrite import users_of

Rows = tuple[int, int]
"""Which dims of a value together are the rows: from the first up to the second."""


def sequence_first(program: StepProgram, _: Collection[str]) -> StepProgram:
    """See the module."""
    made = {op.name: op for op, _ in program.ops}
    search = _RowSearch(frozenset(program.roots.values()), made, users_of(made.values()), specs_in(program))
    ends = {end for op in made.values() if op.target == GATHER for end in search.ends_around(op)}
    ops = (
        (replace(op, kwargs=((AS_IT_COMES, True),)) if op.name in ends else op, at) for op, at in program.ops
    )
    return program.with_ops(ops, str) if ends else program


@dataclass(slots=True)
class _RowSearch:
    """Step 1. roots: values. seen: values that were met before; one that is met again belongs to what cannot
    change."""

    roots: frozenset[str]
    made: Mapping[str, Op]
    users: Mapping[str, list[Op]]
    specs: Mapping[str, TensorSpec]
    seen: set[str] = field(default_factory=set)

    def _end(self, op: Op, target: str) -> tuple[Arg, ...] | None:
        """How the op gathers, or scatters, several sequences along them: axis, size, batch, length."""
        if op.target != target:
            return None
        _, dim, blocks, *over = op.args
        shape = self.specs[op.name if target == GATHER else op.args[0].name].shape
        batch = blocks if dim == 0 else shape[0]
        is_of_several = batch > 1 and dim + (blocks > 1) == 1
        return (*over, batch, shape[dim] // blocks) if is_of_several else None

    def ends_around(self, join: Op) -> list[str]:
        """From one gather, all gathers and scatters; none when the order must stay."""
        like = self._end(join, GATHER)
        if join.name in self.seen or like is None:
            return []
        sharded = _Spread(self.made, self.specs, math.prod(like[2:]))
        result, todo = sharded.rows, sharded.todo
        sharded.leading(join.name)
        ends: list[str] = []
        while todo:
            name = todo.pop()
            if name in self.seen or name in self.roots:
                self.seen |= result.keys()
                return []
            self.seen.add(name)
            gather = self._end(self.made[name], GATHER)
            fits = gather == like if gather else sharded.made_by(self.made[name])
            ends += [name] if gather else []
            for user in self.users.get(name, ()):
                scatter = self._end(user, SCATTER)
                if scatter is None:
                    fits = fits and sharded.used_by(user, name)
                else:
                    fits = fits and scatter == like and result[name] == (0, user.args[1] + 1)
                    ends.append(user.name)
            if not fits:
                self.seen |= result.keys()
                return []
        return ends


class _Spread:
    """Step 2: which values have rows, and where. todo: those to be looked at."""

    def __init__(self, made: Mapping[str, Op], specs: Mapping[str, TensorSpec], count: int) -> None:
        self._made = made
        self._specs = specs
        self._count = count
        self.rows: dict[str, Rows] = {}
        self.todo: list[str] = []

    def leading(self, name: str) -> bool:
        """The value's first dims are the rows; False where that cannot be."""
        shape = self._specs[name].shape
        sizes = [math.prod(shape[:k]) for k in range(len(shape) + 1)]
        return self._count in sizes and self._add(name, (0, sizes.index(self._count)))

    def made_by(self, op: Op) -> bool:
        """Whether the op, whose result has rows, allows another order of them."""
        begin, end = self.rows[op.name]
        if op.target in VIEWS:
            return begin == 0 and self._of_view(op.name, op.args[0].name)
        rule = self._rule(op)
        return rule is not None and self._operands(op, rule, rule.outputs[0][begin:end])

    def used_by(self, op: Op, name: str) -> bool:
        """Whether the op that reads a value with rows allows another order of them."""
        begin, end = self.rows[name]
        if op.target in VIEWS:
            return begin == 0 and op.name in self._specs and self._of_view(name, op.name)
        rule = self._rule(op)
        if rule is None:
            return False
        labels = rule.inputs[operands(op).index(name)][begin:end]
        if not self._operands(op, rule, labels):
            return False
        if rule.summed.issuperset(labels):
            return True  # a weight's gradient: a sum over all rows
        at = _place(rule.outputs[0], labels)
        return at is not None and self._add(op.name, at)

    def _rule(self, op: Op) -> Dims | None:
        names = operands(op)
        if op.random or len(op.outputs) != 1 or any(name not in self._specs for name in names):
            return None
        return dims_of(op, [self._specs[name] for name in names])

    def _operands(self, op: Op, rule: Dims, labels: Sequence[int | None]) -> bool:
        """Whether rows with these labels may have another order, in all operands that have them."""
        if None in labels or not rule.full.isdisjoint(labels):
            return False
        for name, has in zip(operands(op), rule.inputs, strict=True):
            at = _place(has, labels)
            if at is None and not set(labels).isdisjoint(has):
                return False
            if at is not None and not self._add(name, at):
                return False
        return True

    def _of_view(self, name: str, other: str) -> bool:
        """Whether both are in one piece with rows first, of which one is a view of the other."""
        contiguous = all(self._specs[one].stride is None for one in (name, other) if one in self._specs)
        return contiguous and other in self._specs and self.leading(other)

    def _add(self, name: str, rows: Rows) -> bool:
        """False for what no op makes: the batch has an order of its own."""
        if name not in self._made:
            return False
        if name not in self.rows:
            self.rows[name] = rows
            self.todo.append(name)
        return self.rows[name] == rows


def _place(has: Sequence[int | None], labels: Sequence[int | None]) -> Rows | None:
    """Which of some dims have these labels, one after the other."""
    count = len(labels)
    return next(((k, k + count) for k in range(len(has) - count + 1) if has[k : k + count] == labels), None)
