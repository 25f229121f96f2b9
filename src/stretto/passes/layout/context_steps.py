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
       A chunk has its part of each block. Of the keys that are at hand each part sees those up to its own.
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
from itertools import accumulate, pairwise
from typing import Any

from stretto.errors import UsageError
from stretto.ir.collectives import ALL_GATHER, PERMUTE_NEXT, REDUCE_SCATTER
from stretto.ir.program import DTYPE_BYTES, GETITEM, Arg, Const, Op, Ref, TensorSpec
from stretto.passes.layout.attention import ROWS
from stretto.passes.layout.context_ops import (
    HEADS,
    JOB_DEVICE,
    Half,
    Merged,
    StepOps,
    Summed,
    sum_of_first,
    summed_in,
)
from stretto.passes.layout.emit import SLICE, Emitter
from stretto.passes.layout.kernels import (
    ALIGNED_BYTES,
    CUDNN,
    EFFICIENT,
    FLASH,
    KERNELS,
    SHARED_OP,
    arguments,
    backward_of,
    call,
    gradient_of,
    mask_of,
)
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import spec_with, strides_of, with_uses


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
                self.now[op.name] = self.made[op.args[0].name][op.args[1]]
            elif op.target == "aten.slice.Tensor" and op.args[0].name in self.of:
                self._slice(op)
            elif self.changed.isdisjoint(op.uses):
                self.out.keep(op, origin)
            else:
                self._note(op, self.out.again(op, origin))
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
            if spec is not None:
                made[at] = attention.ops.joined([_laid(self.out, one, spec) for one in of_chunks])
        self.made[op.name] = made
        self.of |= dict.fromkeys(made, attention)

    def _slice(self, op: Op) -> None:
        """Of what chunks have made, what one has."""
        source, dim, start, end = op.args[0].name, *op.args[1:4]
        self.now[op.name] = self.of[source].ops.rows(source, start, end, dim)
        self._note(op, self.now[op.name])

    def _note(self, op: Op, name: str) -> None:
        if self.out.outputs[name] != op.outputs:
            self.changed.add(name)


def _laid(out: Emitter, name: str, like: TensorSpec) -> str:
    """The value with its dims in memory in the order of those of another, which later ops read."""
    spec, strides = out.specs[name], strides_of(like)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    dense = [
        math.prod(spec.shape[other] for other in order[order.index(dim) + 1 :]) for dim in range(len(order))
    ]
    if spec_with(spec.shape, spec.dtype, dense) == spec:
        return name
    back = [order.index(dim) for dim in range(len(order))]
    x = out.emit("aten.permute.default", Ref(name), tuple(order), name=f"{name}_order")
    return out.emit("aten.permute.default", Ref(out.contiguous(x)), tuple(back), name=f"{name}_laid")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows from start to end of each block of queries. is_all: whether there is no other."""

    number: int
    start: int
    end: int
    is_all: bool


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one call of the kernel computes. chunk: of the queries; step: 0 for a rank's own keys; seen: of
    these, how many, of which the last query sees all, and others fewer: 0 for no causal call."""

    chunk: int
    step: int
    queries: Half = None
    keys: Half = None
    seen: int = 0

    @property
    def name(self) -> str:
        chunk = f"chunk_{self.chunk}_" if self.chunk else ""
        return f"{chunk}step_{self.step}" + {None: "", 1: "_later"}.get(self.queries, f"_{self.queries}")


@dataclass(frozen=True, slots=True)
class _Call:
    """Of a tile's forward. mask: of a causal call for which the kernel takes one."""

    kernel: str
    made: str
    mask: str | None


class _Attention:
    """One op, forward and backward. saved: of each tile, the kernel's call; exchanged: of "ulysses", what the
    backward reads again; all_pairs: of "gathered", the keys and values of all ranks; times: how often heads
    of keys are repeated, once they have come."""

    def __init__(self, out: Emitter, op: Op) -> None:
        self.op, self.ops, self.given = op, StepOps(out, op), arguments(op)
        self.kernel = op.target.removeprefix("layout.")
        self.q, self.k, self.v = (self.given[what].name for what in ("query", "key", "value"))
        self.mask = mask_of(op)
        self.causal = bool(self.given["is_causal"])
        self.at_hand = self.ops.size == 1 or self.ops.kind == "ulysses"
        self.steps = 1 if self.at_hand else self.ops.size
        shape = self.ops.shape(self.q)
        self.pairs = math.prod(shape[:3]) * self.ops.shape(self.k)[ROWS] * self.ops.size
        of_runs = 2 if self.ops.halves else 1
        ends = [*accumulate(length // of_runs for length in self.ops.lengths or (shape[ROWS],))]
        bounds = enumerate(pairwise((0, *ends)))
        self.chunks = [_Chunk(k, start, end, len(ends) == 1) for k, (start, end) in bounds]
        self.saved: dict[_Tile, _Call] = {}
        self.exchanged: list[tuple[str, ...]] = []
        self.all_pairs, self.times = "", 1

    # --- step 1 ---------------------------------------------------------------------------------------------

    def _came(self) -> Callable[[int], tuple[str, str]]:
        """step -> keys and values. Those of other ranks come side by side, along the features."""
        ops = self.ops
        pairs = {0: (self.k, self.v)}
        if self.at_hand:
            return lambda step: pairs[step]
        (own_k, times), (own_v, again) = ops.unrepeated(self.k), ops.unrepeated(self.v)
        if times != again:
            times, own_k, own_v = 1, self.k, self.v
        self.times, features = times, ops.shape(own_k)[-1]
        shape = (*ops.shape(own_k)[:-1], features + ops.shape(own_v)[-1])
        came: dict[int, str] = {}
        if not self.all_pairs:
            came[0] = ops.emit("pair", "cat.default", (Ref(own_k), Ref(own_v)), -1)
        if not self.all_pairs and ops.kind == "gathered":
            every = ops.communicated(ALL_GATHER.target, came[0], "pairs")
            self.all_pairs = ops.view(every, (ops.size, *shape), "pairs_of_ranks")

        def arrived(step: int) -> str:
            if ops.kind == "gathered":
                source = Ref(ops.source(step))
                found = ops.emit(f"pair_{step}", "index_select.default", Ref(self.all_pairs), 0, source)
                return ops.view(found, shape, f"pair_{step}")
            if step not in came:
                came[step] = ops.communicated(PERMUTE_NEXT.target, arrived(step - 1), f"pair_{step}")
            return came[step]

        def pair(step: int) -> tuple[str, str]:
            if step not in pairs:
                k, v = self._apart(arrived(step), features, f"keys_{step}")
                pairs[step] = (
                    ops.repeated(k, times, f"keys_{step}_k"),
                    ops.repeated(v, times, f"keys_{step}_v"),
                )
            return pairs[step]

        return pair

    def _apart(self, both: str, features: int, what: str) -> tuple[str, str]:
        emit, end = self.ops.emit, self.ops.shape(both)[-1]
        k = emit(f"{what}_k", "slice.Tensor", Ref(both), 3, 0, features)
        return k, emit(f"{what}_v", "slice.Tensor", Ref(both), 3, features, end)

    # --- step 2 ---------------------------------------------------------------------------------------------

    def _tiles(self, chunk: _Chunk, step: int) -> list[_Tile]:
        if not self.causal:
            return [_Tile(chunk.number, step)]
        if step:
            return [_Tile(chunk.number, step, 1, 0), _Tile(chunk.number, step, "either", "either")]
        count, blocks = self.ops.shape(self.k)[ROWS], 1 if chunk.is_all else self.ops.blocks
        ends = (count // blocks * block + chunk.end for block in range(blocks))
        if blocks == 1:
            return [_Tile(chunk.number, 0, seen=count if chunk.is_all else chunk.end)]
        return [_Tile(chunk.number, 0, block, seen=end) for block, end in enumerate(ends)]

    def _keys(self, tile: _Tile, pair: tuple[str, str]) -> list[str]:
        ops = self.ops
        if tile.seen:
            return [ops.rows(x, 0, tile.seen) for x in pair]
        named = zip("kv", pair, strict=True)
        return [ops.half(x, tile.keys, tile.step, f"{tile.name}_{n}") for n, x in named]

    def _mask(self, tile: _Tile) -> str | None:
        """That of a chunk's queries and a step's keys."""
        ops, mask, chunk = self.ops, self.mask, self.chunks[tile.chunk]
        if mask is None:
            return None
        *rest, rows, keys = ops.shape(mask)
        dim = len(rest)
        if not chunk.is_all and rows > 1:

            def of_chunk() -> str:
                blocks = ops.blocks
                if blocks == 1:
                    return ops.rows(mask, chunk.start, chunk.end, dim)
                wide = ops.view(mask, (*rest, blocks, rows // blocks, keys), "mask_blocks")
                wide = ops.rows(wide, chunk.start, chunk.end, dim + 1)
                return ops.view(wide, (*rest, blocks * (chunk.end - chunk.start), keys), "mask_rows")

            mask = ops.once(f"mask_{chunk.number}", of_chunk)
        return mask if self.at_hand else ops.columns(mask, tile.step)

    def _hidden(self, kernel: str, q: str, seen: int) -> str | None:
        """What is added to the scores of queries of which the last sees all keys, where the kernel takes what
        is causal from the upper left."""
        ops, out = self.ops, self.ops.out
        query = out.specs[q]
        rows, wide = query.shape[ROWS], seen
        if rows == seen or kernel == FLASH:
            return None
        if kernel == EFFICIENT:
            aligned = ALIGNED_BYTES // DTYPE_BYTES[query.dtype]
            wide = -(-seen // aligned) * aligned

        def make() -> str:
            dtype = Const("dtype", query.dtype)
            full = ops.emit("hidden", "full.default", (rows, wide), -math.inf, dtype=dtype, device=JOB_DEVICE)
            mask = ops.emit("hidden", "triu.default", Ref(full), seen - rows + 1)
            if wide > seen:
                mask = ops.emit("hidden", "slice.Tensor", Ref(mask), 1, 0, seen)
            if kernel == EFFICIENT:
                mask = ops.emit("hidden", "expand.default", Ref(mask), (*query.shape[:2], rows, seen))
            return mask

        return ops.once(f"hidden_{rows}_{seen}", make)

    def _flops(self, of: Op, q: str, k: str) -> int:
        return int(of.flops * math.prod(self.ops.shape(q)[:3]) * self.ops.shape(k)[ROWS] // self.pairs)

    # --- step 3 ---------------------------------------------------------------------------------------------

    def forward(self) -> list[list[str]]:
        """Of each result, that of chunks; of what kernels save beside the log-sum-exp, nothing."""
        queries = self._exchanged_forward() if self.ops.kind == "ulysses" else self.ops.parts(self.q)
        pair = self._came()
        made = [self._of_chunk(chunk, q, pair) for chunk, q in zip(self.chunks, queries, strict=True)]
        if self.ops.kind == "ulysses":
            self.exchanged = [(q, *one) for q, one in zip(queries, made, strict=True)]
            made = [(self.ops.exchanged(value, HEADS, ROWS, "rows"), lse) for value, lse in made]
        return [[value for value, _ in made], [lse for _, lse in made]]

    def _of_chunk(self, chunk: _Chunk, q: str, pair: Callable[[int], tuple[str, str]]) -> tuple[str, str]:
        ops = self.ops
        own = [self._called(tile, q, pair(0)) for tile in self._tiles(chunk, 0)]
        made, lse = ops.joined([value for value, _ in own]), ops.joined([lse for _, lse in own])
        if self.at_hand:
            return made, lse
        merged, later = Merged(ops, made, lse, split=self.causal), None
        for step in range(1, self.steps):
            for tile in self._tiles(chunk, step):
                made, lse = self._called(tile, q, pair(step))
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

    def _called(self, tile: _Tile, q: str, pair: tuple[str, str]) -> tuple[str, str]:
        ops, name = self.ops, tile.name
        q = ops.half(q, tile.queries, tile.step, f"{name}_q")
        k, v = self._keys(tile, pair)
        # What is causal from the upper left is so from the lower right where there are as many keys.
        later = tile.seen > ops.shape(q)[ROWS]
        kernel = FLASH if later and self.kernel == CUDNN else self.kernel
        hidden = self._hidden(kernel, q, tile.seen) if tile.seen else None
        causal = bool(tile.seen) and hidden is None
        args, kwargs = call(kernel, self._kernel_given(kernel, (q, k, v), hidden or self._mask(tile), causal))
        made = ops.emit(name, kernel, *args, flops=self._flops(self.op, q, k), **kwargs)
        self.saved[tile] = _Call(kernel, made, hidden)
        value, lse = (ops.emit(f"{name}_{n}", GETITEM, Ref(made), k) for k, n in enumerate(("made", "lse")))
        return value, self._plain_lse(lse, ops.shape(value)[:-1])

    def _kernel_given(
        self, kernel: str, tensors: Sequence[str], mask: str | None, causal: bool
    ) -> dict[str, Any]:
        """tensors: queries, keys, values."""
        return {
            **self.given,
            **dict(zip(("query", "key", "value"), map(Ref, tensors), strict=True)),
            KERNELS[kernel].mask: None if mask is None else Ref(mask),
            "is_causal": causal,
            "return_debug_mask": False,
            "compute_log_sumexp": True,
        }

    def _plain_lse(self, lse: str, shape: Sequence[int]) -> str:
        """(batch, heads, queries), as kernels pad it or have a dim behind."""
        if self.ops.shape(lse) == tuple(shape):
            return lse
        if len(self.ops.shape(lse)) > len(shape):
            return self.ops.view(lse, shape, "lse_rows")
        return self.ops.emit("lse_rows", "slice.Tensor", Ref(lse), ROWS, 0, shape[ROWS])

    def _without_empty(self, made: str, lse: str) -> tuple[str, str]:
        """Rows that a mask hides all keys from are 0, and have no gradient."""
        emit, mask = self.ops.emit, self.mask
        if mask is None:
            return made, lse
        empty = emit("empty", "lt.Scalar", Ref(lse), self.ops.lowest(mask) / 8)
        wide = emit("empty_rows", "unsqueeze.default", Ref(empty), -1)
        made = emit("made", "masked_fill.Scalar", Ref(made), Ref(wide), 0.0)
        return made, emit("lse", "masked_fill.Scalar", Ref(lse), Ref(empty), math.inf)

    # --- step 4 ---------------------------------------------------------------------------------------------

    def backward(self, op: Op) -> list[list[str]]:
        """Gradients of queries, of chunks; of keys and values."""
        ops, given = self.ops, arguments(op)
        ops.start, ops.random = op.name, False
        grads = ops.parts(gradient_of(given))
        if ops.kind == "ulysses":
            grads = [ops.exchanged(x, ROWS, HEADS, "grad_heads") for x in grads]
            rows = [(grad, *kept) for grad, kept in zip(grads, self.exchanged, strict=True)]
        else:
            self.q, self.k, self.v = (given[what].name for what in ("query", "key", "value"))
            kept = (ops.parts(given[what].name) for what in ("query", "out", "logsumexp"))
            rows = list(zip(grads, *kept, strict=True))
        pair, dtype = self._came(), summed_in(ops.dtype(self.q))
        of_queries: list[Summed] = []
        own: list[tuple[int, tuple[str, ...]]] = []
        for chunk, of_chunk in zip(self.chunks, rows, strict=True):
            found = [(tile, self._gradients(op, tile, of_chunk, pair(0))) for tile in self._tiles(chunk, 0)]
            dq = ops.joined([one[0] for _, one in found])
            wide = dq if self.at_hand else ops.converted(dq, dtype, f"{found[0][0].name}_dq_wide")
            of_queries.append(Summed(ops, wide, split=self.causal and not self.at_hand))
            count = ops.shape(self.k)[ROWS]
            own += [(tile.seen or count, self._of_keys(tile, dk, dv)) for tile, (_, dk, dv) in found]
        sums = [sum_of_first(ops, [(seen, values[n]) for seen, values in own]) for n in range(len(own[0][1]))]
        if self.at_hand:
            dq_rows = [one.value for one in of_queries]
            if ops.kind == "ulysses":
                dq_rows = [ops.exchanged(x, HEADS, ROWS, "dq_rows") for x in dq_rows]
                sums = [ops.exchanged(x, HEADS, ROWS, f"d{n}_rows") for n, x in zip("kv", sums, strict=True)]
            return [dq_rows, *([x] for x in sums)]
        of_pairs = [Summed(ops, sums[0]), *(Summed(ops) for _ in range(1, self.steps))]
        later = [Summed(ops) for _ in rows]
        for step in range(1, self.steps):
            for chunk, of_chunk in zip(self.chunks, rows, strict=True):
                for tile in self._tiles(chunk, step):
                    dq, dk, dv = self._gradients(op, tile, of_chunk, pair(step))
                    dq = ops.converted(dq, dtype, f"{tile.name}_dq_wide")
                    if tile.queries == "either":
                        of_queries[tile.chunk].add_to_half(dq, "either", step)
                    else:
                        (of_queries if tile.queries is None else later)[tile.chunk].add(dq)
                    (both,) = self._of_keys(tile, dk, dv)
                    if tile.keys is None:
                        of_pairs[step].add(both)
                    else:
                        of_pairs[step].add_to_half(both, tile.keys, step)
            if ops.kind == "ring":
                came = ops.communicated(PERMUTE_NEXT.target, of_pairs[step].value, f"back_{step}")
                last = step + 1 == self.steps
                of_pairs[0 if last else step + 1].value = self._added(of_pairs[0], came) if last else came
        for one, behind in zip(of_queries, later, strict=True):
            if behind.value:
                one.add_to_half(behind.value, 1, 0)
        dq_rows = [
            ops.converted(ops.view(one.value, ops.shape(q), "dq_rows"), ops.dtype(q), "dq")
            for one, (_, q, *_) in zip(of_queries, rows, strict=True)
        ]
        return [dq_rows, *([x] for x in self._of_own_keys(of_pairs))]

    def _of_keys(self, tile: _Tile, dk: str, dv: str) -> tuple[str, ...]:
        """What is summed over tiles: as keys and values come."""
        ops, name = self.ops, tile.name
        if self.at_hand:
            return dk, dv
        dk, dv = (ops.added_heads(x, self.times, f"{name}_d{n}") for n, x in (("k", dk), ("v", dv)))
        both = ops.emit(f"{name}_pair", "cat.default", (Ref(dk), Ref(dv)), -1)
        return (ops.converted(both, summed_in(ops.dtype(both)), f"{name}_pair_wide"),)

    def _of_own_keys(self, of_pairs: Sequence[Summed]) -> list[str]:
        """Gradients of a rank's keys and values."""
        ops = self.ops
        batch, heads, length, features = ops.shape(self.k)
        shape = (batch, heads // self.times, length, features + ops.shape(self.v)[-1])
        both = ops.converted(self._home(of_pairs, shape), ops.dtype(self.k), "back_own")
        own = zip("kv", self._apart(both, features, "back"), strict=True)
        return [ops.in_first(x, self.times, f"back_{n}_heads") for n, x in own]

    def _added(self, own: Summed, came: str) -> str:
        """The gradients of a rank's own keys by its own queries, and by those of others."""
        came = self.ops.view(came, self.ops.shape(own.value), "back_rows")
        return self.ops.emit("back_sum", "add.Tensor", Ref(own.value), Ref(came))

    def _home(self, of_pairs: Sequence[Summed], shape: tuple[int, ...]) -> str:
        """The gradients of a rank's own keys and values, by all ranks' queries."""
        ops = self.ops
        if ops.kind == "ring":
            return of_pairs[0].value
        parts = tuple(Ref(ops.view(one.value, shape, f"back_{s}")) for s, one in enumerate(of_pairs))
        steps = ops.emit("back_steps", "stack.default", parts, 0)
        every = ops.emit("back_ranks", "index_select.default", Ref(steps), 0, Ref(ops.sources()))
        # Halves keep a dim of their own, which shows along what the result is sharded.
        halves = (shape[1], 2, shape[2] // 2, shape[3]) if ops.halves else shape[1:]
        every = ops.view(every, (ops.size * shape[0], *halves), "back_all")
        return ops.view(ops.communicated(REDUCE_SCATTER.target, every, "back", "sum"), shape, "back_rows")

    def _gradients(
        self, op: Op, tile: _Tile, rows: Sequence[str], pair: tuple[str, str]
    ) -> tuple[str, str, str]:
        """rows: gradient, queries, result, log-sum-exp of a chunk."""
        ops, name, saved = self.ops, tile.name, self.saved[tile]
        named = zip(("grad", "q", "made", "lse"), rows, strict=True)
        grad, q, made, lse = (ops.half(x, tile.queries, tile.step, f"{name}_{n}") for n, x in named)
        k, v = self._keys(tile, pair)
        kernel, mask = saved.kernel, saved.mask or self._mask(tile)
        given = self._kernel_given(kernel, (q, k, v), mask, bool(tile.seen) and saved.mask is None)
        given |= dict.fromkeys(("grad_out", "grad_out_"), Ref(grad))
        given |= {"out": Ref(made), "logsumexp": Ref(self._kernel_lse(lse, kernel))}
        given |= dict(zip(("philox_seed", "philox_offset"), self._state(tile), strict=False))
        given |= {
            "max_q": ops.shape(q)[ROWS],
            "max_k": ops.shape(k)[ROWS],
            "cum_seq_q": None,
            "cum_seq_k": None,
        }
        target = backward_of(kernel)
        args, kwargs = call(target, {**given, "grad_input_mask": (True, True, True, False)})
        called = Ref(ops.emit(name, target, *args, flops=self._flops(op, q, k), **kwargs))
        dq, dk, dv = (ops.emit(f"{name}_d{n}", GETITEM, called, at) for at, n in enumerate("qkv"))
        return dq, dk, dv

    def _kernel_lse(self, lse: str, kernel: str) -> str:
        """As the kernel keeps it."""
        like = KERNELS[kernel]
        if like.lse_multiple == 1 and like.lse_dims == 3:
            return lse
        rows, lse = self.ops.shape(lse)[ROWS], self.ops.out.contiguous(lse)
        missing = -rows % like.lse_multiple
        if missing and len(self.ops.shape(lse)) == 3:
            lse = self.ops.emit("lse_padded", "constant_pad_nd.default", Ref(lse), (0, missing), math.inf)
        if like.lse_dims > len(self.ops.shape(lse)):
            lse = self.ops.emit("lse_column", "unsqueeze.default", Ref(lse), -1)
        return lse

    def _state(self, tile: _Tile) -> list[Arg]:
        """What a kernel has drawn by. Without dropout that is nothing, and calls of one kernel share it."""
        kernel, made = self.saved[tile].kernel, self.saved[tile].made
        if not self.given["dropout_p"]:
            made = next(one.made for one in self.saved.values() if one.kernel == kernel)

        def taken(at: int) -> str:
            return self.ops.emit(f"state_{at}", GETITEM, Ref(made), at)

        return [Ref(self.ops.once(f"{made}_{at}", lambda at=at: taken(at))) for at in KERNELS[kernel].state]  # type: ignore[misc]

    # --- all tokens of fewer heads --------------------------------------------------------------------------

    def _exchanged_forward(self) -> list[str]:
        """Queries of chunks. Keys, values and the mask become those of a rank's heads."""
        ops = self.ops
        for x in (self.q, self.k, self.v):
            heads = ops.shape(x)[HEADS]
            if heads % ops.size:
                raise UsageError(
                    f'cp_kind = "ulysses": {self.op.module} has {heads} heads on a rank, which {ops.size} '
                    'ranks cannot share equally: give cp_kind = "ring"'
                )
        heads = ops.shape(self.q)[HEADS]
        if self.mask is not None and ops.shape(self.mask)[-3:-2] == (heads,):
            dim = len(ops.shape(self.mask)) - 3
            self.mask = ops.emit("mask_heads", SLICE, Ref(self.mask), dim, 1, ops.axis, ops.size)
        self.k, self.v = (
            ops.exchanged(x, ROWS, HEADS, f"{n}_heads") for n, x in (("k", self.k), ("v", self.v))
        )
        return [ops.exchanged(x, ROWS, HEADS, "q_heads") for x in ops.parts(self.q)]
