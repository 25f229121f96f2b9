"""What the steps of a shared attention are made of: parts of rows, the rank that keys come from, sums.

One program is for all ranks. What differs is picked by the rank's coordinate, as data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from stretto.ir.op_names import OWN, names
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import GETITEM, INDEX, VIEW, WAIT, Arg, Const, Op, Ref
from stretto.passes.layout.attention import ROWS
from stretto.passes.layout.emit import EXCHANGE, Emitter
from stretto.passes.layout.kernels import OVER
from stretto.passes.layout.rules import CAT

HEADS = 1
"""A dim of (batch, heads, sequence, features)."""

JOB_DEVICE = Const("device", "job")
_FULL_NAMES = ("aten.", "comm.", "axis.", "layout.", OWN, GETITEM)

_SAME_ORDER = VIEW_OPS | names("clone _to_copy contiguous")

Half = int | str | None
"""Which block of rows: its number, None for all, or "either", the half that the rank's coordinate says."""


def summed_in(dtype: str) -> str:
    return dtype if dtype == "float64" else "float32"


class StepOps:
    """Emits ops for one attention. start: how names begin; kind, halves, lengths: see `emit`; random: whether
    the kernel draws. blocks: of rows that are one behind another; of "ulysses", those of ranks; at_hand:
    whether all keys are; cats: result -> the same as it was joined."""

    def __init__(self, out: Emitter, op: Op) -> None:
        self.out, self.start, self.random = out, op.name, op.random
        self.axis, self.size, self.kind, self.halves, self.met, self.lengths = dict(op.kwargs)[OVER]
        self.blocks = 2 if self.halves else self.size if self.kind == "ulysses" else 1
        self.at_hand = self.size == 1 or self.kind == "ulysses"
        self._names: dict[str, str] = {}
        self.cats: dict[str, str] = {}

    def emit(self, what: str, target: str, *args: Arg, flops: int = 0, **kwargs: Arg) -> str:
        """An op of PyTorch's, by its name, or another by its target."""
        target = target if target.startswith(_FULL_NAMES) else f"aten.{target}"
        random = self.random and "attention" in target
        name = f"{self.start}_{what}"
        return self.out.emit(target, *args, name=name, kwargs=kwargs, flops=flops, random=random)

    def once(self, what: str, make: Callable[[], str]) -> str:
        """What all steps of a direction read."""
        key = f"{self.start}_{what}"
        if key not in self._names:
            self._names[key] = make()
        return self._names[key]

    def shape(self, x: str) -> tuple[int, ...]:
        return self.out.specs[x].shape

    def dtype(self, x: str) -> str:
        return self.out.specs[x].dtype

    def view(self, x: str, shape: Sequence[int], what: str) -> str:
        if self.shape(x) == tuple(shape):
            return x
        if not self.out.viewable(x, shape):
            x = self.out.contiguous(x)
        return self.emit(what, VIEW, Ref(x), tuple(shape))

    def converted(self, x: str, dtype: str, what: str) -> str:
        if self.dtype(x) == dtype:
            return x
        return self.emit(what, "_to_copy.default", Ref(x), dtype=Const("dtype", dtype))

    def communicated(self, target: str, x: str, what: str, *how: Arg) -> str:
        start = self.emit(what, target, Ref(self.out.contiguous(x)), *how, self.axis, self.size)
        return self.emit(f"{what}_wait", WAIT, Ref(start))

    def behind(self, x: str, made: str, what: str) -> str:
        """The value itself, once `made` is there, which is of the same dtype."""
        return self.emit(f"{what}_behind", "to.other", Ref(x), Ref(made))

    def exchanged(self, x: str, before: int, after: int, what: str) -> str:
        return self.emit(what, EXCHANGE, Ref(x), before, after, self.axis, self.size)

    def unrepeated(self, x: str) -> tuple[str, int]:
        """What a value of repeated heads is made of, and how often each is repeated; itself, and 1."""
        op = self.out.made.get(x)
        while op is not None and op.target != "aten.expand.default":
            op = self.out.made.get(op.args[0].name) if op.target in _SAME_ORDER else None
        base = None if op is None else self.out.made.get(op.args[0].name)
        if op is None or base is None or base.target != "aten.unsqueeze.default":
            return x, 1
        heads = base.args[0].name
        batch, count, *rest = self.shape(heads)
        times = self.shape(x)[HEADS] // count
        same = self.shape(x) == (batch, count * times, *rest) and op.args[1] == (batch, count, times, *rest)
        return (heads, times) if same and self.dtype(heads) == self.dtype(x) else (x, 1)

    def repeated(self, x: str, times: int, what: str) -> str:
        """Each head so often, one behind another."""
        if times == 1:
            return x
        batch, heads, *rest = self.shape(x)
        wide = self.emit(f"{what}_one", "unsqueeze.default", Ref(x), 2)
        wide = self.emit(f"{what}_several", "expand.default", Ref(wide), (batch, heads, times, *rest))
        return self.view(wide, (batch, heads * times, *rest), f"{what}_repeated")

    def added_heads(self, x: str, times: int, what: str) -> str:
        """The gradient of heads from that of their repetitions."""
        if times == 1:
            return x
        batch, heads, *rest = self.shape(x)
        apart = self.view(x, (batch, heads // times, times, *rest), f"{what}_repetitions")
        return self.emit(f"{what}_added", "sum.dim_IntList", Ref(apart), (2,))

    def in_first(self, x: str, times: int, what: str) -> str:
        """A gradient of repetitions whose sum is that of the heads, which later ops take: one has all."""
        if times == 1:
            return x
        batch, heads, *rest = self.shape(x)
        wide = self.emit(f"{what}_one", "unsqueeze.default", Ref(x), 2)
        pads = (*(0 for _ in range(2 * len(rest))), 0, times - 1)
        padded = self.emit(f"{what}_first", "constant_pad_nd.default", Ref(wide), pads, 0.0)
        return self.view(padded, (batch, heads * times, *rest), what)

    # --- rows -----------------------------------------------------------------------------------------------

    def joined(self, parts: Sequence[str], dim: int = ROWS) -> str:
        """One behind another."""
        if len(parts) == 1:
            return parts[0]
        refs, name = tuple(map(Ref, parts)), f"{parts[-1]}_joined"
        key = f"{refs} {dim}"
        if key not in self._names:
            self._names[key] = self.out.emit(CAT, refs, dim, name=name)
        return self._names[key]

    def rows(self, x: str, start: int, end: int, dim: int = ROWS, own: bool = False) -> str:
        """A slice; of what was joined, the parts of it. own: whether they are a rank's own."""
        if (start, end) == (0, self.shape(x)[dim]):
            return x
        x = self.cats.get(x, x)
        inside: list[str] = []
        at = 0
        op = self.out.made.get(x)
        for part in op.args[0] if op is not None and op.target == CAT and op.args[1:] == (dim,) else ():
            before, at = at, at + self.shape(part.name)[dim]
            if start <= before and at <= end:
                inside.append(part.name)
        if inside and sum(self.shape(part)[dim] for part in inside) == end - start:
            return self.joined(inside, dim)
        source = Ref(self.own(x) if own else x)
        return self.out.emit("aten.slice.Tensor", source, dim, start, end, name=f"{x}_rows")

    def own(self, x: str) -> str:
        """A rank's part of the sequence, of which it goes on with some rows."""
        return self.once(f"own_{x}", lambda: self.emit("own", OWN, Ref(x), self.axis)) if self.axis else x

    def parts(self, x: str) -> list[str]:
        """Rows of chunks, one chunk behind another."""
        ends = [*accumulate(self.lengths)] or [self.shape(x)[ROWS]]
        own = self.kind == "ulysses"  # of the others' blocks, chunks are parts that were joined
        return [self.rows(x, start, end, own=own) for start, end in pairwise((0, *ends))]

    def of_blocks(self, x: str, what: str) -> str:
        """(batch, heads, blocks, rows of one, ...)"""
        batch, heads, rows, *rest = self.shape(x)
        shape = (batch, heads, self.blocks, rows // self.blocks, *rest)
        return self.once(f"blocks_of_{x}", lambda: self.view(x, shape, f"{what}_blocks"))

    def half(self, x: str, which: Half, step: int, what: str) -> str:
        """Rows of (batch, heads, sequence, ...)."""
        return x if which is None else self.picked(self.of_blocks(x, what), which, step, what)

    def picked(self, halves: str, which: Half, step: int, what: str, dim: int = ROWS) -> str:
        """One of two blocks along a dim: rows of (batch, heads, blocks, rows of one, ...)."""
        if which != "either":
            return self.once(
                f"{which}_of_{halves}_{dim}",
                lambda: self.emit(f"{what}_half", "select.int", Ref(halves), dim, which),
            )
        picked = self.emit(f"{what}_half", "index_select.default", Ref(halves), dim, Ref(self.either(step)))
        return self.emit(what, "select.int", Ref(picked), dim, 0)

    def either(self, step: int) -> str:
        """0 where the keys of a step are of an earlier rank, 1 where they are of a later one; an index."""
        return self._of_step(self._later(), "either", step)

    def _later(self) -> str:
        """Of each step, `either`."""

        def make() -> str:
            later = self.emit("wraps", "lt.Tensor", Ref(self._rank()), Ref(self._numbers()))
            return self.emit("half_of", "_to_copy.default", Ref(later), dtype=Const("dtype", "int64"))

        return self.once("half_of", make)

    def chosen(self, which: Half, step: int, dtype: str) -> str:
        """(2, 1, 1): 1 for the half, 0 for the other."""
        return self._of_half(which, step, f"chosen_{which}_{dtype}", lambda: self._chosen(which, dtype))

    def uncounted(self, which: Half, step: int, dtype: str) -> str:
        """(2, 1): what is added to a log-sum-exp, 0 for the half, -inf for the other."""

        def make() -> str:
            chosen = self.once(f"chosen_{which}_{dtype}", lambda: self._chosen(which, dtype))
            log = self.emit("counted", "log.default", Ref(chosen))
            return self.view(log, self.shape(log)[:-1], "counted_rows")

        return self._of_half(which, step, f"counted_{which}_{dtype}", make)

    def _chosen(self, which: Half, dtype: str) -> str:
        """`chosen` of all steps."""
        two = Ref(self.once("two", lambda: self.emit("two", "arange.default", 2, device=JOB_DEVICE)))
        if which == "either":
            later = self.view(self._later(), (self.size, 1), "half_of_steps")
            is_half = self.emit("is_half", "eq.Tensor", Ref(later), two)
        else:
            is_half = self.emit("is_half", "eq.Scalar", two, which)
        wide = self.view(is_half, (*self.shape(is_half), 1, 1), "of_halves")
        return self.converted(wide, dtype, "chosen")

    def _of_half(self, which: Half, step: int, what: str, make: Callable[[], str]) -> str:
        """What `make` makes of a half; of "either", of all steps."""
        made = self.once(what, make)
        if which != "either":
            return made
        return self.once(f"{what}_{step}", lambda: self.emit(what, "select.int", Ref(made), 0, step))

    # --- whose keys -----------------------------------------------------------------------------------------

    def _rank(self) -> str:
        return self.once("rank", lambda: self.emit("rank", INDEX, self.axis, self.size))

    def _numbers(self) -> str:
        return self.once(
            "numbers", lambda: self.emit("numbers", "arange.default", self.size, device=JOB_DEVICE)
        )

    def _of_step(self, every: str, what: str, step: int) -> str:
        name = f"{what}_{step}"
        return self.once(name, lambda: self.emit(name, "slice.Tensor", Ref(every), 0, step, step + 1))

    def sources(self) -> str:
        """Of each step, the rank whose keys come in it; of each rank, the step in which its keys come."""

        def make() -> str:
            way = self.emit("way", "sub.Tensor", Ref(self._rank()), Ref(self._numbers()))
            return self.emit("sources", "remainder.Scalar", Ref(way), self.size)

        return self.once("sources", make)

    def source(self, step: int) -> str:
        return self._of_step(self.sources(), "source", step)

    def columns(self, mask: str, step: int) -> str:
        """The columns of a mask that are the keys of a step."""
        *rows, count = self.shape(mask)
        blocks, at = 2 if self.halves else 1, len(rows) + 1
        each = count // blocks // self.size

        def make() -> str:
            # What hides all is finite: a row that sees nothing in one step counts nothing then.
            hidden = self.emit("mask", "clamp_min.default", Ref(mask), self.lowest(mask) / 4)
            of_ranks = self.view(hidden, (*rows, blocks, self.size, each), "mask_of_ranks")
            if blocks == 1:
                return of_ranks
            first, second = (self.emit("mask_half", "select.int", Ref(of_ranks), at - 1, k) for k in range(2))
            second = self.emit("mask_back", "flip.default", Ref(second), (at - 1,))
            return self.emit("mask_halves", "stack.default", (Ref(first), Ref(second)), at - 1)

        every = self.once(f"columns_{mask}", make)
        picked = self.emit(f"mask_{step}", "index_select.default", Ref(every), at, Ref(self.source(step)))
        return self.view(picked, (*rows, blocks * each), f"mask_{step}_columns")

    def lowest(self, x: str) -> float:
        return torch.finfo(getattr(torch, self.dtype(x))).min


class Merged:
    """Partial results of some queries, merged by their log-sum-exp. split: kept by halves."""

    def __init__(self, ops: StepOps, value: str, lse: str, split: bool = False) -> None:
        self.ops, self.dtype = ops, summed_in(ops.dtype(value))
        self.value, self.lse = self._wide(value, lse)
        if split:
            self.value, self.lse = ops.of_blocks(self.value, "made"), ops.of_blocks(self.lse, "lse")

    def _wide(self, value: str, lse: str) -> tuple[str, str]:
        ops = self.ops
        return ops.converted(value, self.dtype, "made_wide"), ops.converted(lse, self.dtype, "lse_wide")

    def add(self, value: str, lse: str) -> None:
        emit = self.ops.emit
        value, lse = self._wide(value, lse)
        apart = emit("apart", "sub.Tensor", Ref(lse), Ref(self.lse))
        share = emit("share", "unsqueeze.default", Ref(emit("part", "sigmoid.default", Ref(apart))), -1)
        self.value = emit("merged", "lerp.Tensor", Ref(self.value), Ref(value), Ref(share))
        self.lse = emit("merged_lse", "logaddexp.default", Ref(self.lse), Ref(lse))

    def add_to_half(self, value: str, lse: str, which: Half, step: int) -> None:
        """For the other half it counts nothing."""
        ops, emit = self.ops, self.ops.emit
        value, lse = (emit("one", "unsqueeze.default", Ref(x), ROWS) for x in self._wide(value, lse))
        uncounted = Ref(ops.uncounted(which, step, self.dtype))
        self.add(value, emit("of_half", "add.Tensor", Ref(lse), uncounted))

    def result(self, rows: int, dtype: str) -> tuple[str, str]:
        ops = self.ops
        batch, heads = ops.shape(self.value)[:2]
        value = ops.view(self.value, (batch, heads, rows, ops.shape(self.value)[-1]), "made_rows")
        return ops.converted(value, dtype, "made"), ops.view(self.lse, (batch, heads, rows), "lse_all")


class Summed:
    """A gradient of rows, added up. value: "" for nothing yet. split: kept by halves."""

    def __init__(self, ops: StepOps, dtype: str, value: str = "", split: bool = False) -> None:
        self.ops, self.dtype, self.value = ops, dtype, ""
        if value:
            self.add(ops.of_blocks(value, "sum") if split else value)

    def add(self, value: str) -> None:
        if self.value:
            self.value = self.ops.emit("sum", "add.Tensor", Ref(self.value), Ref(value))
        else:
            self.value = self.ops.converted(value, self.dtype, "sum")

    def add_to_half(self, value: str, which: Half, step: int) -> None:
        emit = self.ops.emit
        wide = Ref(emit("one", "unsqueeze.default", Ref(value), ROWS))
        chosen = Ref(self.ops.chosen(which, step, self.dtype))
        if self.value:
            self.value = emit("sum", "addcmul.default", Ref(self.value), wide, chosen)
        else:
            self.value = emit("sum", "mul.Tensor", wide, chosen)


def sum_of_first(ops: StepOps, dtype: str, found: Sequence[tuple[int, str]]) -> list[str]:
    """The sum of gradients of the first so many keys each, as long as the longest: its parts."""
    (_, value), *rest = sorted(found, key=lambda one: -one[0])
    value = ops.converted(value, dtype, "sum")
    behind: list[str] = []
    for count, other in rest:
        length = ops.shape(value)[ROWS]
        if count < length:
            behind.insert(0, ops.rows(value, count, length))
            value = ops.rows(value, 0, count)
        value = ops.emit("sum", "add.Tensor", Ref(value), Ref(other))
    return [value, *behind]
