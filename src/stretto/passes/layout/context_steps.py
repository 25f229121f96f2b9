"""Attention of a sequence that ranks share, in steps: a rank's queries meet the keys of one rank in each.

Until here it is one op, "layout." before the kernel's name, of what a rank has, so that passes along other
axes lay it out as attention. One program is for all ranks, so each step has the same shapes on all of them:

    1. Keys and values come: "gathered" at once, or by a "ring" of messages, each sent on while it is used.
       With "ulysses" nothing comes: queries, keys and values are exchanged for all tokens of fewer heads.
    2. Of a causal sequence a rank has blocks r and 2 N - 1 - r of 2 N. In step 0 it meets its own keys,
       causal. In step s it meets those of rank r - s: the later half of its queries sees the earlier half of
       keys; and the earlier halves meet where r - s >= 0, else the later ones. Halves are picked by the
       rank's coordinate, so that all ranks compute as much, and nothing behind the diagonal.
    3. Results of steps are merged by their log-sum-exp, in float32 at least (Milakov and Gimelshein, "Online
       normalizer calculation for softmax", arXiv 1805.02867).
    4. Backward, each step takes the merged result and its log-sum-exp, as flash attention does (Dao et al.
       2022, arXiv 2205.14135, algorithm 4). Gradients of keys and values are scattered at the end, or travel
       with them around the ring (Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.errors import UsageError
from stretto.ir.collectives import ALL_GATHER, PERMUTE_NEXT, REDUCE_SCATTER
from stretto.ir.program import GETITEM, Op, Ref
from stretto.passes.layout.context_ops import HEADS, ROWS, Half, Merged, StepOps, Summed, summed_in
from stretto.passes.layout.emit import SHARED_OP, SLICE, Emitter
from stretto.passes.layout.kernels import BACKWARDS, KERNELS, Kernel
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import strides_of, with_uses


def in_steps(program: StepProgram) -> StepProgram:
    """The program without ops of shared attention."""
    kept = [op.name for op, _ in program.ops if not op.target.startswith(SHARED_OP)]
    out = Emitter("", 1, program.given, kept)
    now: dict[str, str] = {}
    made: dict[str, Sequence[str]] = {}
    forwards: dict[str, _Attention] = {}
    for op, origin in program.ops:
        op = with_uses(op, lambda name: now.get(name, name))
        out.origin, out.module = origin, op.module
        if op.target == GETITEM and op.args[0].name in made:
            now[op.name] = made[op.args[0].name][op.args[1]]
        elif not op.target.startswith(SHARED_OP):
            out.keep(op, origin)
        elif "_backward" in op.target:
            lse = op.args[BACKWARDS[op.target.removeprefix("layout.")].lse].name
            made[op.name] = _laid(out, forwards[lse].backward(op), op)
        else:
            attention = _Attention(out, op)
            made[op.name] = _laid(out, attention.forward(), op)
            forwards[made[op.name][1]] = attention
    roots = {root: now.get(value, value) for root, value in program.roots.items()}
    return replace(program, ops=tuple(out.ops), roots=roots)


def _laid(out: Emitter, made: Sequence[str], op: Op) -> list[str]:
    """Results with the strides that the op's have, which later ops read."""
    result = list(made)
    for at, (name, spec) in enumerate(zip(made, op.outputs, strict=True)):
        if not name or spec is None or out.specs[name].stride == spec.stride:
            continue
        strides = strides_of(spec)
        order = sorted(range(len(spec.shape)), key=lambda dim: -strides[dim])
        back = [order.index(dim) for dim in range(len(order))]
        x = out.emit("aten.permute.default", Ref(name), tuple(order), name=f"{name}_order")
        x = out.contiguous(x)
        result[at] = out.emit("aten.permute.default", Ref(x), tuple(back), name=f"{name}_laid")
    return result


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one call of the kernel computes. step: 0 for a rank's own keys."""

    step: int
    queries: Half = None
    keys: Half = None
    causal: bool = False

    @property
    def name(self) -> str:
        return f"step_{self.step}" + {None: "", 1: "_later", "either": "_either"}[self.queries]


class _Attention:
    """One op, forward and backward. saved: of each tile, the kernel's call; exchanged: of "ulysses", what the
    backward reads again; all_pairs: of "gathered", the keys and values of all ranks; times: how often
    heads of keys are repeated, once they have come; made: of each step, in the direction that is being
    emitted, what its tiles have made."""

    def __init__(self, out: Emitter, op: Op) -> None:
        self.op, self.ops = op, StepOps(out, op)
        self.kernel: Kernel = KERNELS[self.ops.target]
        self.causal = self.kernel.is_causal(op)
        self.split = self.causal and self.ops.halves
        rows = self.ops.shape(op.args[0].name)[ROWS]
        self.area = rows * rows * self.ops.size
        self.saved: dict[_Tile, str] = {}
        self.exchanged: tuple[str, ...] = ()
        self.all_pairs, self.times = "", 1
        self.made: dict[int, list[str]] = defaultdict(list)

    # --- step 1 ---------------------------------------------------------------------------------------------

    def _pairs(self, k: str, v: str) -> Callable[[_Tile], tuple[str, str]]:
        """Tile -> keys and values. They come side by side, along the features."""
        ops = self.ops
        (own_k, times), (own_v, again) = ops.unrepeated(k), ops.unrepeated(v)
        if times != again:
            times, own_k, own_v = 1, k, v
        self.times, features = times, ops.shape(own_k)[-1]
        self.made.clear()
        came: dict[int, str] = {}
        if not self.all_pairs:
            own = ops.emit("pair", "cat.default", (Ref(own_k), Ref(own_v)), -1)
            came[0] = ops.of_halves(own, "pair") if self.split else own
        if not self.all_pairs and ops.kind == "gathered":
            every = ops.communicated(ALL_GATHER.target, came[0], "pairs")
            self.all_pairs = ops.view(every, (ops.size, *ops.shape(came[0])), "pairs_of_ranks")

        def arrived(step: int) -> str:
            if step not in came and ops.kind == "gathered":
                every, source = Ref(self.all_pairs), Ref(ops.source(step))
                found = ops.emit(f"pair_{step}", "index_select.default", every, 0, source)
                came[step] = ops.view(found, ops.shape(self.all_pairs)[1:], f"pair_{step}")
            elif step not in came:
                sent = arrived(step - 1)
                for made in self.made[step - 2] if step > 2 else ():  # so that no more than two are there
                    sent = ops.behind(sent, made, f"pair_{step - 1}")
                came[step] = ops.communicated(PERMUTE_NEXT.target, sent, f"pair_{step}")
            return came[step]

        def pair(tile: _Tile) -> tuple[str, str]:
            if not tile.step:
                return k, v
            both, name = arrived(tile.step), f"{tile.name}_keys"
            if tile.keys is not None:
                both = ops.picked(both, tile.keys, tile.step, name)
            own = zip("kv", self._apart(both, features, name), strict=True)
            of_k, of_v = (ops.repeated(x, times, f"{name}_{n}") for n, x in own)
            return of_k, of_v

        return pair

    def _apart(self, both: str, features: int, what: str) -> tuple[str, str]:
        emit, end = self.ops.emit, self.ops.shape(both)[-1]
        k = emit(f"{what}_k", "slice.Tensor", Ref(both), 3, 0, features)
        return k, emit(f"{what}_v", "slice.Tensor", Ref(both), 3, features, end)

    # --- step 2 ---------------------------------------------------------------------------------------------

    def _tiles(self) -> list[_Tile]:
        if not self.split:
            return [_Tile(step) for step in range(self.ops.size)]
        tiles = [_Tile(0, causal=True)]
        for step in range(1, self.ops.size):
            tiles += [_Tile(step, 1, 0), _Tile(step, "either", "either")]
        return tiles

    def _flops(self, op: Op, q: str, k: str) -> int:
        return int(op.flops * self.ops.shape(q)[ROWS] * self.ops.shape(k)[ROWS] // self.area)

    # --- step 3 ---------------------------------------------------------------------------------------------

    def forward(self) -> list[str]:
        """The op's results; of what kernels save beside the log-sum-exp, nothing."""
        ops, (q, k, v) = self.ops, (arg.name for arg in self.op.args[:3])
        rest = ["" for _ in self.op.outputs[2:]]
        if ops.kind == "ulysses":
            return [*self._forward_of_heads(q, k, v), *rest]
        pair = self._pairs(k, v)
        merged: Merged | None = None
        later: Merged | None = None
        for tile in self._tiles():
            made, lse = self._called(tile, q, *pair(tile))
            self.made[tile.step].append(made)
            if merged is None:
                merged = Merged(ops, made, lse, split=tile.causal)
            elif tile.queries is None:
                merged.add(made, lse)
            elif tile.queries == "either":
                merged.add_to_half(made, lse, "either", tile.step)
            elif later is None:
                later = Merged(ops, made, lse)
            else:
                later.add(made, lse)
        assert merged is not None
        if later is not None:
            merged.add_to_half(later.value, later.lse, 1, 0)
        made, lse = merged.result(ops.shape(q)[ROWS], ops.dtype(q))
        return [*self._without_empty(made, lse), *rest]

    def _called(self, tile: _Tile, q: str, k: str, v: str) -> tuple[str, str]:
        ops, name = self.ops, tile.name
        q = ops.half(q, tile.queries, tile.step, f"{name}_q")
        args, kwargs = self.kernel.arguments(self.op, (q, k, v), ops.columns(tile.step), tile.causal)
        made = ops.emit(name, ops.target, *args, flops=self._flops(self.op, q, k), **kwargs)
        self.saved[tile] = made
        value, lse = (ops.emit(f"{name}_{n}", GETITEM, Ref(made), k) for k, n in enumerate(("made", "lse")))
        return value, self._plain_lse(lse, ops.shape(value)[:-1])

    def _plain_lse(self, lse: str, shape: Sequence[int]) -> str:
        """(batch, heads, queries), as kernels pad it or have a dim behind."""
        if self.ops.shape(lse) == tuple(shape):
            return lse
        if len(self.ops.shape(lse)) > len(shape):
            return self.ops.view(lse, shape, "lse_rows")
        return self.ops.emit("lse_rows", "slice.Tensor", Ref(lse), ROWS, 0, shape[ROWS])

    def _without_empty(self, made: str, lse: str) -> tuple[str, str]:
        """Rows that a mask hides all keys from are 0, and have no gradient."""
        emit, mask = self.ops.emit, self.ops.mask
        if mask is None:
            return made, lse
        empty = emit("empty", "lt.Scalar", Ref(lse), self.ops.lowest(mask) / 8)
        wide = emit("empty_rows", "unsqueeze.default", Ref(empty), -1)
        made = emit("made", "masked_fill.Scalar", Ref(made), Ref(wide), 0.0)
        return made, emit("lse", "masked_fill.Scalar", Ref(lse), Ref(empty), math.inf)

    # --- step 4 ---------------------------------------------------------------------------------------------

    def backward(self, op: Op) -> list[str]:
        """Gradients of queries, keys and values."""
        ops, kernel = self.ops, BACKWARDS[op.target.removeprefix("layout.")]
        ops.start, ops.random = op.name, False
        grad, q, k, v = (arg.name for arg in op.args[:4])
        made, lse = op.args[kernel.made].name, op.args[kernel.lse].name
        rest = ["" for _ in op.outputs[3:]]
        if ops.kind == "ulysses":
            return [*self._backward_of_heads(op, kernel, grad), *rest]
        pair, dtype = self._pairs(k, v), summed_in(ops.dtype(q))
        of_queries, later = Summed(ops, dtype), Summed(ops, dtype)
        of_pairs = {step: Summed(ops, dtype) for step in range(ops.size)}
        tiles = self._tiles()
        for tile, after in zip(tiles, [*tiles[1:], None], strict=True):
            name = tile.name
            rows = [
                ops.half(x, tile.queries, tile.step, f"{name}_{n}")
                for n, x in (("grad", grad), ("q", q), ("made", made), ("lse", lse))
            ]
            dq, dk, dv = self._gradients(op, kernel, tile, (*rows[:2], *pair(tile), *rows[2:]))
            self.made[tile.step].append(dq)
            if tile.causal:
                of_queries = Summed(ops, dtype, dq, split=True)
            elif tile.queries == "either":
                of_queries.add_to_half(dq, "either", tile.step)
            else:
                (of_queries if tile.queries is None else later).add(dq)
            dk, dv = (ops.added_heads(x, self.times, f"{name}_d{n}") for n, x in (("k", dk), ("v", dv)))
            both = ops.emit(f"{name}_pair", "cat.default", (Ref(dk), Ref(dv)), -1)
            if tile.keys is None:
                of_pairs[tile.step].add(both)
            else:
                of_pairs[tile.step].add_to_half(both, tile.keys, tile.step)
            if ops.kind == "ring" and tile.step and (after is None or after.step != tile.step):
                sent = of_pairs[tile.step].value
                came = ops.communicated(PERMUTE_NEXT.target, sent, f"back_{tile.step}")
                of_pairs[(tile.step + 1) % ops.size].value = came if after else self._added(of_pairs[0], came)
        if later.value:
            of_queries.add_to_half(later.value, 1, 0)
        dq = ops.converted(ops.view(of_queries.value, ops.shape(q), "dq_rows"), ops.dtype(q), "dq")
        batch, heads, length, features = ops.shape(k)
        shape = (batch, heads // self.times, length, features + ops.shape(v)[-1])
        both = ops.converted(self._home(of_pairs, shape), ops.dtype(k), "back_own")
        own = zip("kv", self._apart(both, features, "back"), strict=True)
        return [dq, *(ops.in_first(x, self.times, f"back_{n}_heads") for n, x in own), *rest]

    def _added(self, own: Summed, came: str) -> str:
        """The gradients of a rank's own keys by its own queries, and by those of others."""
        came = self.ops.view(came, self.ops.shape(own.value), "back_rows")
        return self.ops.emit("back_sum", "add.Tensor", Ref(own.value), Ref(came))

    def _home(self, of_pairs: Mapping[int, Summed], shape: tuple[int, ...]) -> str:
        """The gradients of a rank's own keys and values, by all ranks' queries."""
        ops = self.ops
        if ops.kind == "ring":
            return of_pairs[0].value
        parts = tuple(Ref(ops.view(of_pairs[s].value, shape, f"back_{s}")) for s in range(ops.size))
        steps = ops.emit("back_steps", "stack.default", parts, 0)
        every = ops.emit("back_ranks", "index_select.default", Ref(steps), 0, Ref(ops.sources()))
        # Halves keep a dim of their own, which shows along what the result is sharded.
        halves = (shape[1], 2, shape[2] // 2, shape[3]) if ops.halves else shape[1:]
        every = ops.view(every, (ops.size * shape[0], *halves), "back_all")
        return ops.view(ops.communicated(REDUCE_SCATTER.target, every, "back", "sum"), shape, "back_rows")

    def _gradients(self, op: Op, kernel: Kernel, tile: _Tile, tensors: Sequence[str]) -> tuple[str, str, str]:
        """tensors: gradient, queries, keys, values, result, log-sum-exp."""
        ops, (*first, lse) = self.ops, tensors
        lengths = ops.shape(first[1])[ROWS], ops.shape(first[2])[ROWS]
        mask = self.ops.columns(tile.step) if ops.kind != "ulysses" else ops.mask
        given = (*first, self._kernel_lse(lse, kernel))
        state = self._state(kernel, tile)
        args, kwargs = kernel.arguments_backward(op, given, mask, tile.causal, lengths, state)
        flops = op.flops if ops.kind == "ulysses" else self._flops(op, first[1], first[2])
        target = op.target.removeprefix("layout.")
        made = Ref(ops.emit(tile.name, target, *args, flops=flops, **kwargs))
        dq, dk, dv = (ops.emit(f"{tile.name}_d{n}", GETITEM, made, at) for at, n in enumerate("qkv"))
        return dq, dk, dv

    def _kernel_lse(self, lse: str, kernel: Kernel) -> str:
        """As the kernel keeps it."""
        if kernel.lse_multiple == 1 and kernel.lse_dims == 3:
            return lse
        rows, lse = self.ops.shape(lse)[ROWS], self.ops.out.contiguous(lse)
        missing = -rows % kernel.lse_multiple
        if missing and len(self.ops.shape(lse)) == 3:
            lse = self.ops.emit("lse_padded", "constant_pad_nd.default", Ref(lse), (0, missing), math.inf)
        if kernel.lse_dims > len(self.ops.shape(lse)):
            lse = self.ops.emit("lse_column", "unsqueeze.default", Ref(lse), -1)
        return lse

    def _state(self, kernel: Kernel, tile: _Tile) -> list[str]:
        """What a kernel has drawn by. Without dropout that is nothing, and calls of one shape share it."""
        alike = [one for one in self.saved if (one.queries is None) == (tile.queries is None)]
        drawn = self.saved[tile if self.kernel.drops(self.op) else alike[0]]

        def taken(at: int) -> str:
            return self.ops.emit(f"state_{at}", GETITEM, Ref(drawn), at)

        return [self.ops.once(f"{drawn}_{at}", lambda at=at: taken(at)) for at in kernel.state_of]  # type: ignore[misc]

    # --- all tokens of fewer heads --------------------------------------------------------------------------

    def _forward_of_heads(self, *tensors: str) -> list[str]:
        ops, tile = self.ops, _Tile(0, causal=self.causal)
        for x in tensors:
            heads = ops.shape(x)[HEADS]
            if heads % ops.size:
                raise UsageError(
                    f'cp_kind = "ulysses": {self.op.module} has {heads} heads on a rank, which {ops.size} '
                    'ranks cannot share equally: give cp_kind = "ring"'
                )
        q, k, v = (ops.exchanged(x, ROWS, HEADS, f"{n}_heads") for n, x in zip("qkv", tensors, strict=True))
        if ops.mask is not None and ops.shape(ops.mask)[-3:-2] == (ops.shape(tensors[0])[HEADS],):
            dim = len(ops.shape(ops.mask)) - 3
            ops.mask = ops.emit("mask_heads", SLICE, Ref(ops.mask), dim, 1, ops.axis, ops.size)
        args, kwargs = self.kernel.arguments(self.op, (q, k, v), ops.mask, self.causal)
        self.saved[tile] = ops.emit("made", ops.target, *args, flops=self.op.flops, **kwargs)
        value, lse = (
            ops.emit(n, GETITEM, Ref(self.saved[tile]), at) for at, n in enumerate(("value", "lse"))
        )
        self.exchanged = (q, k, v, value, lse)
        plain = self._plain_lse(lse, ops.shape(value)[:-1])
        return [ops.exchanged(value, HEADS, ROWS, "rows"), plain]

    def _backward_of_heads(self, op: Op, kernel: Kernel, grad: str) -> list[str]:
        grad = self.ops.exchanged(grad, ROWS, HEADS, "grad_heads")
        tile = next(iter(self.saved))
        made = self._gradients(op, kernel, tile, (grad, *self.exchanged))
        return [self.ops.exchanged(x, HEADS, ROWS, f"d{n}_rows") for n, x in zip("qkv", made, strict=True)]
