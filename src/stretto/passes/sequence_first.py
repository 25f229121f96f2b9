"""What is gathered along the sequence is used in the order in which it arrives, where no op minds the order.

Collectives work along the first dim, so of a batch of several a gathered sequence arrives rank by rank
(n, b, s), and is copied into (b, n, s); before it is scattered, it is copied back. Between the two an MLP
does the same to every token: its result is right in either order, and both copies are for nothing. So are
those of its backward. (Attention mixes the tokens of a sequence: it needs them in its own order.)

    1. Find joins (gathered, copied into the batch's order) and cuts (copied out of it, scattered).
    2. From every join, find the values that have a row for each token, through what makes them and what
       uses them. The order may change when each op is one that treats all rows alike, or sums over all of
       them (a weight's gradient, whose two factors then have the same order), and the ends are joins and
       cuts.
    3. There, the copies become views. No shape changes.

Sums over rows are regrouped: weights' gradients differ in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stretto.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from stretto.ir.program import VIEW, VIEWS, WAIT, Op, TensorSpec
from stretto.passes.graph import Graph
from stretto.passes.rewrite import live, rebuilt

POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        *(f"{op}.{kind}" for op in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")),
        *(
            f"{op}.default"
            for op in ("neg", "exp", "tanh", "sigmoid", "relu", "gelu", "silu", "erf", "rsqrt")
        ),
        *(f"{op}_backward.default" for op in ("gelu", "silu", "tanh", "sigmoid", "threshold")),
        *("pow.Tensor_Scalar", "clone.default", "_to_copy.default", "detach.default", "alias.default"),
        *("where.self", "le.Scalar", "gt.Scalar", "lt.Scalar", "ge.Scalar"),
    )
)
"""Element by element: each result depends on its own row alone."""


def sequence_first(graph: Graph) -> Graph:
    """See the module."""
    search = _Search(graph, {op.name: op for op in graph.ops}, graph.users(), graph.specs())
    views: dict[str, Op] = {}
    for join in search.joins:
        views.update(search.copies_around(join))
    if not views:
        return graph
    return rebuilt(graph, live([views.get(op.name, op) for op in graph.ops], graph.roots))


@dataclass(slots=True)
class _Search:
    """Steps 1 and 2. joins, cuts: the copy -> sizes (n, b, s) of its dims. seen: values that were met before;
    one that is met again belongs to what cannot change."""

    graph: Graph
    made: Mapping[str, Op]
    users: Mapping[str, list[Op]]
    specs: Mapping[str, TensorSpec]
    joins: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    cuts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for op in self.graph.ops:
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
        if view is None or view.target not in VIEWS or copy.name in self.graph.roots:
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
        rows = math.prod(sizes)
        if join in self.seen:
            return {}
        found = {join}
        todo = [join]
        ends: list[str] = []
        while todo:
            name = todo.pop()
            if name in self.seen or name in self.graph.roots:
                self.seen |= found
                return {}
            self.seen.add(name)
            if name in self.joins:
                ends.append(name)
                fits = self.joins[name] == sizes
            else:
                fits = self._spread(self.made[name], rows, found, todo)
            for user in self.users.get(name, ()):
                cut = self._cut_of(user)
                if cut is None:
                    fits = fits and self._through(user, name, rows, found, todo)
                else:
                    ends.append(cut)
                    fits = fits and self.cuts[cut] == sizes
            if not fits:
                self.seen |= found
                return {}
        return {end: self._as_view(end) for end in ends}

    def _cut_of(self, view: Op) -> str | None:
        """The cut that begins with this view, if it is for nothing else."""
        if view.target not in VIEWS or view.name in self.graph.roots:
            return None
        swaps = self.users.get(view.name, [])
        copies = self.users.get(swaps[0].name, []) if len(swaps) == 1 else []
        return copies[0].name if len(copies) == 1 and copies[0].name in self.cuts else None

    def _as_view(self, copy: str) -> Op:
        """Step 3."""
        op = self.made[copy]
        view = self.made[self.made[op.args[0].name].args[0].name]
        spec = op.outputs[0]
        assert spec is not None
        args = (view.args[0], spec.shape)
        return replace(op, target=VIEW, args=args, kwargs=(), alias=view.args[0].name)

    def _through(self, op: Op, name: str, rows: int, found: set[str], todo: list[str]) -> bool:
        """Whether a user allows another order of rows; what else has rows thereby is to be looked at."""
        if op.random:
            return False
        if op.target == "aten.t.default":
            # Transposed, it is for products that sum over all rows: weights' gradients.
            return op.name not in self.graph.roots and all(
                user.target == "aten.mm.default"
                and user.args[0].name == op.name
                and self._mates(user, found, todo)
                for user in self.users.get(op.name, ())
            )
        if op.target == "aten.mm.default" and op.args[1].name == name:
            left = self.made.get(op.args[0].name)
            if left is None or left.target != "aten.t.default":
                return False
            return self._add(left.args[0].name, found, todo)
        if op.target == "aten.sum.dim_IntList":
            spec = self.specs.get(name)
            dims = [int(d) for d in op.args[1]]
            return (
                spec is not None
                and dims == list(range(len(dims)))
                and math.prod(spec.shape[: len(dims)]) == rows
            )
        return self._spread(op, rows, found, todo) and self._add(op.name, found, todo)

    def _mates(self, product: Op, found: set[str], todo: list[str]) -> bool:
        return self._add(product.args[1].name, found, todo)

    def _spread(self, op: Op, rows: int, found: set[str], todo: list[str]) -> bool:
        """Whether the op makes rows of rows, one by one; its operands with rows are to be looked at."""
        spec = self.specs.get(op.name)
        if spec is None or spec.stride is not None or op.random or not _has_rows(spec, rows):
            return False
        if op.target in VIEWS:
            given = self.specs.get(op.args[0].name)
            whole = given is not None and given.stride is None and _has_rows(given, rows)
            return whole and self._add(op.args[0].name, found, todo)
        if op.target in ("aten.mm.default", "aten.addmm.default"):
            *bias, left, right = (ref.name for ref in op.args)
            if op.kwargs or right in found or any(name not in self.specs for name in bias):
                return False
            if any(len(self.specs[name].shape) > 1 for name in bias):
                return False  # it might have a row for each token
            return self._add(left, found, todo)
        if op.target not in POINTWISE:
            return False
        for name in op.uses:
            given = self.specs.get(name)
            if given is None:
                return False
            if given.shape == spec.shape and given.stride is None:
                if not self._add(name, found, todo):
                    return False
            elif given.numel != 1:
                return False
        return True

    def _add(self, name: str, found: set[str], todo: list[str]) -> bool:
        """False for what no op makes: the batch has an order of its own."""
        if name not in self.made:
            return False
        if name not in found:
            found.add(name)
            todo.append(name)
        return True


def _has_rows(spec: TensorSpec, rows: int) -> bool:
    """Whether the first dims together are the rows."""
    return rows in _products(spec.shape)


def _products(shape: tuple[int, ...]) -> Iterator[int]:
    product = 1
    for n in shape:
        product *= n
        yield product
