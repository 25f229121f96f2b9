"""Attention that ranks or chunks share, in steps: a chunk's queries meet the keys of one rank in each.

Until here it is one op, "layout." before the kernel's name, of what a rank has, so that passes along other
axes lay it out as attention. One program is for all ranks, so each step has the same shapes on all of them:

    1. Keys and values come, once for all chunks: "gathered" at once, or by a "ring" of messages, each sent on
       while it is used. With "ulysses" nothing comes: queries, keys and values are exchanged for all tokens
       of fewer heads. Without other ranks all are at hand.
    2. Of a causal sequence a rank has blocks r and 2 N - 1 - r of 2 N. In step 0 it meets its own keys,
       causal. In step s it meets those of rank r - s: the later half of its queries sees the earlier half of
       keys; and the earlier halves meet where r - s >= 0, else the later ones. Halves are picked by the
       rank's coordinate, so that all ranks compute as much, and nothing behind the diagonal.
       A chunk has its part of each block (`kernel_calls`).
    3. Results of steps are merged by their log-sum-exp, in float32 at least (Milakov and Gimelshein, "Online
       normalizer calculation for softmax", arXiv 1805.02867).
    4. Backward, each step takes the merged result and its log-sum-exp, as flash attention does (Dao et al.
       2022, arXiv 2205.14135, algorithm 4). Gradients of keys and values, summed over chunks, are scattered
       at the end, or travel with them around the ring (Liu et al. 2023, arXiv 2310.01889).

What a chunk makes does not wait for what another makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

from stretto.errors import UsageError
from stretto.ir.collectives import ALL_GATHER, PERMUTE_NEXT, PERMUTE_PREVIOUS, REDUCE_SCATTER
from stretto.ir.program import GETITEM, Op, Ref, TensorSpec
from stretto.passes.layout.attention import ROWS
from stretto.passes.layout.context_ops import HEADS, Merged, StepOps, Summed, sum_of_first, summed_in
from stretto.passes.layout.emit import SLICE, Emitter
from stretto.passes.layout.kernel_calls import KernelCalls, Tile
from stretto.passes.layout.kernels import SHARED_OP, arguments
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import strides_of, with_uses

Pair = Callable[[Tile], tuple[str, str]]
"""Tile -> keys and values."""


def in_steps(program: StepProgram) -> StepProgram:
    """The program without ops of shared attention."""
    return _Walk(program).run()


class _Walk:
    """now: value that is gone -> the one in its place. made: shared op -> its results; of: result -> whose it
    is. changed: values that are not in memory as they were."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        kept = [op.name for op, _ in program.ops if not op.target.startswith(SHARED_OP)]
        self.out = Emitter("", 1, program.given, kept)
        self.now: dict[str, str] = {}
        self.made: dict[str, Sequence[str]] = {}
        self.of: dict[str, _Attention] = {}
        self.changed: set[str] = set()

    def run(self) -> StepProgram:
        for op, origin in self.program.ops:
            op = with_uses(op, lambda name: self.now.get(name, name))
            self.out.origin, self.out.module = origin, op.module
            if op.target.startswith(SHARED_OP):
                self._attention(op)
            elif op.target == GETITEM and op.args[0].name in self.made:
                self._becomes(op, self.made[op.args[0].name][op.args[1]])
            elif op.target == "aten.slice.Tensor" and op.args[0].name in self.of and len(op.args) == 4:
                dim, start, end = op.args[1:]
                made = op.args[0].name
                self._becomes(op, self.of[made].ops.rows(made, start, end, dim))
            elif self.changed.isdisjoint(op.uses):
                self.out.keep(op, origin)
            else:
                self._becomes(op, self.out.again(op, origin))
        roots = {root: self.now.get(value, value) for root, value in self.program.roots.items()}
        return replace(self.program, ops=tuple(self.out.ops), roots=roots)

    def _attention(self, op: Op) -> None:
        if "_backward" in op.target:
            attention = self.of[arguments(op)["logsumexp"].name]
            parts = attention.backward(op)
        else:
            attention = _Attention(self.out, op)
            parts = attention.forward()
        made = ["" for _ in op.outputs]
        for at, (of_chunks, spec) in enumerate(zip(parts, op.outputs, strict=False)):
            if spec is not None and of_chunks:
                is_part = len(of_chunks) > 1
                full = attention.ops.joined([_laid(self.out, one, spec, is_part) for one in of_chunks])
                made[at] = _laid(self.out, full, spec)
                attention.ops.cats[made[at]] = full
        self.made[op.name] = made
        self.of |= dict.fromkeys(made, attention)

    def _becomes(self, op: Op, name: str) -> None:
        self.now[op.name] = name
        if name and self.out.outputs[name] != op.outputs:
            self.changed.add(name)


def _laid(out: Emitter, name: str, like: TensorSpec, is_part: bool = False) -> str:
    """The value with its dims in memory in the order of those of another, which later ops read, and, but for
    a part of that, nothing between its elements. Nothing but the backward reads a log-sum-exp."""
    spec, strides, count = out.specs[name], strides_of(out.specs[name]), len(like.shape)
    order = sorted(range(count), key=lambda dim: -strides_of(like)[dim])
    in_order = sorted(order, key=lambda dim: -strides[dim]) == order
    if count == 3 or (in_order and (is_part or strides[order[0]] * spec.shape[order[0]] == spec.numel)):
        return name
    back = [order.index(dim) for dim in range(count)]
    x = out.emit("aten.permute.default", Ref(name), tuple(order), name=f"{name}_order")
    return out.emit("aten.permute.default", Ref(out.contiguous(x)), tuple(back), name=f"{name}_laid")


@dataclass(frozen=True, slots=True)
class _Order:
    """Steps whose keys come from the ranks before, one by one, and those whose keys come from the ranks
    behind. Gradients go the other way."""

    ahead: range
    behind: range

    @classmethod
    def of(cls, ops: StepOps, of_gradients: bool = False) -> _Order:
        """Nothing is sent over most of the steps that see nothing; where all see, all go one way."""
        size = 1 if ops.at_hand else ops.size
        seen = (0, *(step for step in range(1, size) if ops.met[step]), size)
        ends = max(pairwise(seen), key=lambda two: (two[1] - two[0], -two[0] if of_gradients else two[0]))
        return cls(range(1, ends[0] + 1), range(ends[1], size))


class _Attention:
    """One op, forward and backward. exchanged: of "ulysses", what the backward reads again; all_pairs: of
    "gathered", the keys and values of all ranks; times: how often heads of keys are repeated, once they have
    come."""

    def __init__(self, out: Emitter, op: Op) -> None:
        self.op, self.ops = op, StepOps(out, op)
        self.calls = KernelCalls(self.ops, op)
        self.q, self.k, self.v = (self.calls.given[what].name for what in ("query", "key", "value"))
        self.order = _Order.of(self.ops)
        self.exchanged: list[tuple[str, ...]] = []
        self.all_pairs, self.times = "", 1

    # --- step 1 ---------------------------------------------------------------------------------------------

    def _came(self) -> Pair:
        """Keys and values of other ranks come side by side, along the features. Where one chunk reads them,
        those of a step go on once those before have been read, so that there are no more than two."""
        ops, calls = self.ops, self.calls
        calls.made.clear()
        (own_k, times), (own_v, again) = ops.unrepeated(self.k), ops.unrepeated(self.v)
        if times != again:
            times, own_k, own_v = 1, self.k, self.v
        self.times, features = times, ops.shape(own_k)[-1]

        @cache
        def arrived(step: int) -> str:
            if not step:
                own = ops.emit("pair", "cat.default", (Ref(own_k), Ref(own_v)), -1)
                return ops.of_blocks(own, "pair") if calls.in_halves else own
            if ops.kind == "ring":
                way, kind = (1, PERMUTE_NEXT) if step in self.order.ahead else (-1, PERMUTE_PREVIOUS)
                before = (step - way) % ops.size
                sent = arrived(before)
                for made in calls.made[before - way] if before and len(calls.ends) == 1 else ():
                    sent = ops.behind(sent, made, f"pair_{before}")
                return ops.communicated(kind.target, sent, f"pair_{step}")
            if not self.all_pairs:
                every = ops.communicated(ALL_GATHER.target, arrived(0), "pairs")
                self.all_pairs = ops.view(every, (ops.size, *ops.shape(arrived(0))), "pairs_of_ranks")
            found = ops.emit("pair", "index_select.default", Ref(self.all_pairs), 0, Ref(ops.source(step)))
            return ops.view(found, ops.shape(self.all_pairs)[1:], "pair")

        def pair(tile: Tile) -> tuple[str, str]:
            if not tile.step:
                return self.k, self.v
            both, name = arrived(tile.step), f"{tile.name}_keys"
            if tile.keys is not None:
                both = ops.picked(both, tile.keys, tile.step, name)
            k, v = (
                ops.repeated(x, times, f"{name}_{n}")
                for n, x in zip("kv", self._apart(both, features, name), strict=True)
            )
            return k, v

        return pair

    def _apart(self, both: str, features: int, what: str) -> tuple[str, str]:
        emit, end = self.ops.emit, self.ops.shape(both)[-1]
        k = emit(f"{what}_k", "slice.Tensor", Ref(both), 3, 0, features)
        return k, emit(f"{what}_v", "slice.Tensor", Ref(both), 3, features, end)

    def _all_tokens(self) -> list[str]:
        """Of fewer heads: keys, values and mask, and queries of chunks, which are returned."""
        ops, calls = self.ops, self.calls
        for x in (self.q, self.k, self.v):
            heads = ops.shape(x)[HEADS]
            if heads % ops.size:
                whose = self.op.module or "the model"
                raise UsageError(
                    f'cp_kind = "ulysses": {whose} has {heads} heads on a rank, which {ops.size} '
                    'ranks cannot share equally: give cp_kind = "ring"'
                )
        if calls.mask is not None and ops.shape(calls.mask)[-3:-2] == (ops.shape(self.q)[HEADS],):
            dim = len(ops.shape(calls.mask)) - 3
            calls.mask = ops.emit("mask_heads", SLICE, Ref(calls.mask), dim, 1, ops.axis, ops.size)
        queries = [ops.exchanged(x, ROWS, HEADS, "q_heads") for x in ops.parts(self.q)]
        named = (("k", self.k), ("v", self.v))
        self.k, self.v = (ops.exchanged(x, ROWS, HEADS, f"{n}_heads") for n, x in named)
        return queries

    # --- steps 2 and 3 --------------------------------------------------------------------------------------

    def forward(self) -> list[list[str]]:
        """Of the result, and the log-sum-exp, those of chunks. Of what kernels save besides, nothing."""
        ops, is_exchanged = self.ops, self.ops.kind == "ulysses"
        queries = self._all_tokens() if is_exchanged else ops.parts(self.q)
        pair = self._came()
        made = [self._of_chunk(chunk, q, pair) for chunk, q in enumerate(queries)]
        if is_exchanged:
            self.exchanged = [(q, *one) for q, one in zip(queries, made, strict=True)]
            made = [(ops.exchanged(value, HEADS, ROWS, "rows"), lse) for value, lse in made]
        return [[value for value, _ in made], [lse for _, lse in made]]

    def _of_chunk(self, chunk: int, q: str, pair: Pair) -> tuple[str, str]:
        ops, calls = self.ops, self.calls
        own = [calls.forward(tile, q, pair(tile)) for tile in calls.tiles(chunk, 0)]
        made, lse = ops.joined([value for value, _ in own]), ops.joined([lse for _, lse in own])
        if ops.at_hand:
            return made, lse
        merged = Merged(ops, made, lse, split=calls.in_halves)
        later: Merged | None = None
        for step in (*self.order.ahead, *reversed(self.order.behind)):
            for tile in calls.tiles(chunk, step):
                made, lse = calls.forward(tile, q, pair(tile))
                if tile.queries is None:
                    merged.add(made, lse)
                elif tile.queries == "either":
                    merged.add_to_half(made, lse, "either", step)
                elif later is None:
                    later = Merged(ops, made, lse)
                else:
                    later.add(made, lse)
        if later is not None:
            merged.add_to_half(later.value, later.lse, 1, 0)
        return self._without_empty(*merged.result(ops.shape(q)[ROWS], ops.dtype(q)))

    def _without_empty(self, made: str, lse: str) -> tuple[str, str]:
        """Rows that a mask hides all keys from are 0, and have no gradient."""
        emit, mask = self.ops.emit, self.calls.mask
        if mask is None:
            return made, lse
        empty = emit("empty", "lt.Scalar", Ref(lse), self.ops.lowest(mask) / 8)
        wide = emit("empty_rows", "unsqueeze.default", Ref(empty), -1)
        made = emit("made", "masked_fill.Scalar", Ref(made), Ref(wide), 0.0)
        return made, emit("lse", "masked_fill.Scalar", Ref(lse), Ref(empty), math.inf)

    # --- step 4 ---------------------------------------------------------------------------------------------

    def backward(self, op: Op) -> list[list[str]]:
        """Gradients of queries, and of a mask, of chunks; those of keys and values."""
        ops, calls, given = self.ops, self.calls, arguments(op)
        ops.start, ops.random = op.name, False
        grads = ops.parts(op.args[0].name)
        rows: list[tuple[str, ...]]
        if ops.kind == "ulysses":
            grads = [ops.exchanged(x, ROWS, HEADS, "grad_heads") for x in grads]
            rows = [(grad, *of_chunk) for grad, of_chunk in zip(grads, self.exchanged, strict=True)]
        else:
            self.k, self.v = given["key"].name, given["value"].name
            kept = (ops.parts(given[what].name) for what in ("query", "out", "logsumexp"))
            rows = list(zip(grads, *kept, strict=True))
        pair = self._came()
        of_queries: list[str] = []
        of_masks: list[str] = []
        own: list[tuple[int, list[str]]] = []
        for chunk, of_chunk in enumerate(rows):
            found: list[str] = []
            for tile in calls.tiles(chunk, 0):
                dq, dk, dv, *dm = calls.backward(op, tile, of_chunk, pair(tile))
                found.append(dq)
                of_masks += dm
                own.append((tile.seen or ops.shape(self.k)[ROWS], self._of_keys(tile, dk, dv)))
            of_queries.append(ops.joined(found))
        wide = ops.dtype(self.k) if ops.at_hand else summed_in(ops.dtype(self.k))
        sums = [
            sum_of_first(ops, wide, [(seen, values[n]) for seen, values in own])
            for n in range(len(own[0][1]))
        ]
        if ops.kind == "ulysses":
            of_all = ([ops.joined(parts)] for parts in sums)
            return [[ops.exchanged(x, HEADS, ROWS, "rows") for x in each] for each in (of_queries, *of_all)]
        if ops.at_hand:
            return [of_queries, *sums, of_masks]
        queries = [Summed(ops, wide, dq, split=calls.in_halves) for dq in of_queries]
        return self._of_others(op, rows, pair, queries, Summed(ops, wide, ops.joined(sums[0])))

    def _of_others(
        self, op: Op, rows: Sequence[Sequence[str]], pair: Pair, queries: Sequence[Summed], own: Summed
    ) -> list[list[str]]:
        """The same, with what comes of the keys of other ranks. rows: as of `KernelCalls.backward`; queries,
        own: gradients of queries, and of keys and values, by a rank's own keys."""
        ops, calls = self.ops, self.calls
        later = [Summed(ops, own.dtype) for _ in rows]
        pairs = [own, *(Summed(ops, own.dtype) for _ in range(1, ops.size))]
        order = _Order.of(ops, of_gradients=True)
        for step in (*reversed(order.ahead), *order.behind):
            for tile in [tile for chunk in range(len(rows)) for tile in calls.tiles(chunk, step)]:
                dq, dk, dv = calls.backward(op, tile, rows[tile.chunk], pair(tile))
                if tile.queries == "either":
                    queries[tile.chunk].add_to_half(dq, "either", step)
                else:
                    (queries if tile.queries is None else later)[tile.chunk].add(dq)
                (both,) = self._of_keys(tile, dk, dv)
                if tile.keys is None:
                    pairs[step].add(both)
                else:
                    pairs[step].add_to_half(both, tile.keys, step)
            if ops.kind == "ring":
                way, kind = (-1, PERMUTE_PREVIOUS) if step in order.ahead else (1, PERMUTE_NEXT)
                came = ops.communicated(kind.target, pairs[step].value, f"back_{step}")
                if (step + way) % ops.size:
                    pairs[step + way].value = came
                else:
                    pairs[0].add(ops.view(came, ops.shape(pairs[0].value), "back_rows"))
        for one, behind in zip(queries, later, strict=True):
            if behind.value:
                one.add_to_half(behind.value, 1, 0)
        found = [
            ops.converted(ops.view(one.value, ops.shape(q), "dq_rows"), ops.dtype(q), "dq")
            for one, (_, q, *_) in zip(queries, rows, strict=True)
        ]
        batch, heads, length, features = ops.shape(self.k)
        shape = (batch, heads // self.times, length, features + ops.shape(self.v)[-1])
        both = ops.converted(self._home(pairs, shape), ops.dtype(self.k), "back_own")
        apart = zip("kv", self._apart(both, features, "back"), strict=True)
        return [found, *([ops.in_first(x, self.times, f"back_{n}_heads")] for n, x in apart)]

    def _of_keys(self, tile: Tile, dk: str, dv: str) -> list[str]:
        """What is summed over tiles: as keys and values come."""
        ops, name = self.ops, tile.name
        if ops.at_hand:
            return [dk, dv]
        dk, dv = (ops.added_heads(x, self.times, f"{name}_d{n}") for n, x in (("k", dk), ("v", dv)))
        return [ops.emit(f"{name}_pair", "cat.default", (Ref(dk), Ref(dv)), -1)]

    def _home(self, of_pairs: Sequence[Summed], shape: tuple[int, ...]) -> str:
        """The gradients of a rank's own keys and values, by all ranks' queries."""
        ops = self.ops
        if ops.kind == "ring":
            return of_pairs[0].value
        none = partial(ops.emit, "back_none", "zeros_like.default", Ref(of_pairs[0].value))
        values = [one.value or ops.once("back_none", none) for one in of_pairs]
        parts = tuple(Ref(ops.view(value, shape, f"back_{s}")) for s, value in enumerate(values))
        steps = ops.emit("back_steps", "stack.default", parts, 0)
        every = ops.emit("back_ranks", "index_select.default", Ref(steps), 0, Ref(ops.sources()))
        every = ops.view(every, (ops.size * shape[0], *shape[1:]), "back_all")
        return ops.own(ops.communicated(REDUCE_SCATTER.target, every, "back", "sum"))
