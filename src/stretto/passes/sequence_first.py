"""What is gathered along the sequence is used in the order in which it arrives, where no op minds the order.

Of a batch of several a gathered sequence arrives rank by rank (n, b, s), and is copied into (b, n, s); before
it is scattered, it is copied back. An MLP does the same to every token: both copies are for nothing.

    1. Find joins (gathered, copied into the batch's order) and cuts (copied out of it, scattered).
    2. From every join, find the values that have a row for each token, through what makes them and what
       uses them. The order may change when each op treats all rows in the same way, or sums over all of them
       (a weight's gradient), as `stretto.ir.dims` says, and the ends are joins and cuts.
    3. There, the copies become views. Sums over rows are regrouped: weights' gradients differ in last bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from stretto.ir.dims import Dims, dims_of, operands
from stretto.ir.program import VIEW, VIEWS, WAIT, Op, TensorSpec
from stretto.passes.layout.program import StepProgram
from stretto.passes.no_ops import live_ops, specs_in
from stretto.passes.rewrite import users_of

Rows = tuple[int, int]
"""Which dims of a value together are the rows: from the first up to the second."""


def sequence_first(program: StepProgram, _: Collection[str]) -> StepProgram:
    """See the module."""
    made = {op.name: op for op, _ in program.ops}
    search = _RowSearch(frozenset(program.roots.values()), made, users_of(made.values()), specs_in(program))
    views: dict[str, Op] = {}
    for join in search.joins:
        views.update(search.copies_around(join))
    if not views:
        return program
    return live_ops(program.with_ops(((views.get(op.name, op), at) for op, at in program.ops), str))


@dataclass(slots=True)
class _RowSearch:
    """Steps 1 and 2. roots: values. joins, cuts: the copy -> sizes (n, b, s) of its dims. seen: values that
    were met before; one that is met again belongs to what cannot change."""

    roots: frozenset[str]
    made: Mapping[str, Op]
    users: Mapping[str, list[Op]]
    specs: Mapping[str, TensorSpec]
    joins: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    cuts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for op in self.made.values():
            if op.target == "aten.clone.default":
                self._end(op)

    def _end(self, copy: Op) -> None:
        """Step 1 for one copy: of a view of four dims or more, of which the first two are swapped."""
        swap = self.made.get(copy.args[0].name)
        if swap is None or swap.target != "aten.permute.default" or copy.outputs[0] is None:
            return
        order, shape = tuple(swap.args[1]), copy.outputs[0].shape
        view = self.made.get(swap.args[0].name)
        if order != (1, 0, *range(2, len(order))) or len(order) < 3 or copy.outputs[0].stride is not None:
            return
        if view is None or view.target not in VIEWS or copy.name in self.roots:
            return
        came = self.made.get(view.args[0].name)
        start = self.made.get(came.args[0].name) if came is not None and came.target == WAIT else None
        if start is not None and start.target == ALL_GATHER.target and start.args[-1] == shape[1]:
            self.joins[copy.name] = shape[1], shape[0], shape[2]
            return
        after = self.users.get(copy.name, [])
        goes = self.users.get(after[0].name, []) if len(after) == 1 and after[0].target in VIEWS else after
        if len(goes) == 1 and goes[0].target == REDUCE_SCATTER.target and goes[0].args[-1] == shape[0]:
            self.cuts[copy.name] = shape[0], shape[1], shape[2]

    def copies_around(self, join: str) -> dict[str, Op]:
        """Steps 2 and 3 from one join: copy -> the view that takes its place; {} when the order must stay."""
        sizes = self.joins[join]
        if join in self.seen:
            return {}
        sharded = _Spread(self.made, self.specs, math.prod(sizes))
        result, todo = sharded.rows, sharded.todo
        sharded.leading(join)
        ends: list[str] = []
        while todo:
            name = todo.pop()
            if name in self.seen or name in self.roots:
                self.seen |= result.keys()
                return {}
            self.seen.add(name)
            if name in self.joins:
                ends.append(name)
                fits = self.joins[name] == sizes
            else:
                fits = sharded.made_by(self.made[name])
            for user in self.users.get(name, ()):
                cut = self._cut_of(user)
                if cut is None:
                    fits = fits and sharded.used_by(user, name)
                else:
                    ends.append(cut)
                    fits = fits and self.cuts[cut] == sizes and result[name][0] == 0
            if not fits:
                self.seen |= result.keys()
                return {}
        return {end: self._as_view(end) for end in ends}

    def _cut_of(self, view: Op) -> str | None:
        """The cut that begins with this view, if it is for nothing else."""
        if view.target not in VIEWS or view.name in self.roots:
            return None
        swaps = self.users.get(view.name, [])
        copies = self.users.get(swaps[0].name, []) if len(swaps) == 1 else []
        return copies[0].name if len(copies) == 1 and copies[0].name in self.cuts else None

    def _as_view(self, copy: str) -> Op:
        """Step 3."""
        op = self.made[copy]
        view = self.made[self.made[op.args[0].name].args[0].name]
        args = (view.args[0], op.made.shape)
        return replace(op, target=VIEW, args=args, kwargs=(), alias=view.args[0].name)


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
