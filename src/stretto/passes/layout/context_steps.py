"""Attention of a sequence that ranks share, in steps: the queries of a rank meet the keys of one rank in each.

Until here it is one op, "layout." before the kernel's name, with a rank's own queries, keys and values, so that
passes along other axes lay it out as attention. One program is for all ranks, so each step has the same shapes
on all of them:

    1. Keys and values come: "gathered" at once, or by a "ring" of messages, each sent on while it is used. With
       "ulysses" nothing comes; queries, keys and values are exchanged for all tokens of fewer heads.
    2. Of a causal sequence a rank has blocks r and 2 N - 1 - r of 2 N. In step 0 it meets its own keys, causal.
       In step s it meets those of rank r - s: the later half of its queries sees all of the earlier half of
       keys; and the earlier halves see each other where r - s >= 0, else the later ones do. Halves are picked by
       the rank's coordinate, so that no rank computes what is behind the diagonal.
    3. Results of steps are merged by their log-sum-exp, in float32 at least (Milakov and Gimelshein, "Online
       normalizer calculation for softmax", arXiv 1805.02867).
    4. Backward, each step takes the merged result and its log-sum-exp, as flash attention does (Dao et al. 2022,
       arXiv 2205.14135, algorithm 4). Gradients of keys and values are scattered at the end, or travel with
       them around the ring (Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from stretto.ir.collectives import ALL_GATHER, PERMUTE_NEXT, REDUCE_SCATTER
from stretto.ir.program import GETITEM, INDEX, VIEW, WAIT, Arg, Const, Op, Ref
from stretto.passes.layout.emit import EXCHANGE, ON_THE_RANK, OVER, SHARED_OP, SLICE, Emitter
from stretto.passes.layout.kernels import BACKWARDS, KERNELS, Kernel
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import strides_of, with_uses

HEADS, ROWS = 1, 2
"""Dims of (batch, heads, sequence, features)."""
_OTHERS = (
    *(VIEW, GETITEM, WAIT, INDEX, SLICE, EXCHANGE),
    *(kind.target for kind in (ALL_GATHER, PERMUTE_NEXT, REDUCE_SCATTER)),
)


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
            source, at = op.args[0].name, op.args[1]
            now[op.name] = made[source][at]
        elif not op.target.startswith(SHARED_OP):
            out.keep(op, origin)
        elif "_backward" in op.target:
            attention = forwards[op.args[BACKWARDS[op.target.removeprefix("layout.")].lse].name]
            made[op.name] = _laid(out, attention.backward(op), op)
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
    """What one call of the kernel computes. step: 0 for a rank's own keys. queries, keys: which half, None for
    all; "either": the half that the rank's coordinate says."""

    step: int
    queries: int | str | None = None
    keys: int | str | None = None
    causal: bool = False


@dataclass(slots=True)
class _Attention:
    """One op, forward and backward. saved: of each tile, what its kernel has saved; whole: of "ulysses", all
    that the backward reads again."""

    out: Emitter
    op: Op
    kernel: Kernel = field(init=False)
    axis: str = field(init=False)
    size: int = field(init=False)
    kind: str = field(init=False)
    halves: bool = field(init=False)
    causal: bool = field(init=False)
    mask: str | None = field(init=False)
    start: str = field(init=False)
    area: int = field(init=False)
    saved: dict[_Tile, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    gathered: str = ""
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        op = self.op
        self.axis, self.size, self.kind, self.halves = dict(op.kwargs)[OVER]
        self.kernel = KERNELS[op.target.removeprefix("layout.")]
        self.causal, self.mask = self.kernel.is_causal(op), self.kernel.mask_of(op)
        length = self.out.specs[op.args[0].name].shape[ROWS]
        self.area, self.start = length * length * self.size, op.name

    # --- ops ------------------------------------------------------------------------------------------------

    def _emit(self, what: str, target: str, *args: Arg, flops: int = 0, **kwargs: Arg) -> str:
        """An op of PyTorch's, by its name, or another by its target."""
        target = target if target in _OTHERS else f"aten.{target}"
        random = self.op.random and "attention" in target
        name = f"{self.start}_{what}"
        return self.out.emit(target, *args, name=name, kwargs=kwargs, flops=flops, random=random)

    def _shape(self, x: str) -> tuple[int, ...]:
        return self.out.specs[x].shape

    def _view(self, x: str, shape: Sequence[int], what: str) -> str:
        if self._shape(x) == tuple(shape):
            return x
        if not self.out.viewable(x, shape):
            x = self.out.contiguous(x)
        return self._emit(what, VIEW, Ref(x), tuple(shape))

    def _of_halves(self, x: str, what: str) -> str:
        """(batch, heads, 2, half, ...)"""
        batch, heads, rows, *rest = self._shape(x)
        return self._view(x, (batch, heads, 2, rows // 2, *rest), f"{what}_halves")

    def _half(self, x: str, which: int | str | None, step: int, what: str) -> str:
        """Rows of (batch, heads, sequence, ...)."""
        if which is None:
            return x
        split = self._of_halves(x, what)
        if which != "either":
            return self._emit(f"{what}_half", "select.int", Ref(split), ROWS, which)
        picked = self._emit(f"{what}_half", "index_select.default", Ref(split), ROWS, Ref(self._either(step)))
        return self._emit(what, "select.int", Ref(picked), ROWS, 0)

    def _once(self, what: str, make: Callable[[], str]) -> str:
        """What all steps of a direction read."""
        key = f"{self.start}_{what}"
        if key not in self.names:
            self.names[key] = make()
        return self.names[key]

    def _rank(self) -> str:
        return self._once("rank", lambda: self._emit("rank", INDEX, self.axis, self.size))

    def _numbers(self) -> str:
        return self._once(
            "numbers", lambda: self._emit("numbers", "arange.default", self.size, **ON_THE_RANK)
        )

    def _wraps(self) -> str:
        """Which steps meet keys of a later rank, as numbers: 0 for those of an earlier one, and 1."""

        def make() -> str:
            later = self._emit("wraps", "lt.Tensor", Ref(self._rank()), Ref(self._numbers()))
            return self._emit("half_of", "_to_copy.default", Ref(later), dtype=Const("dtype", "int64"))

        return self._once("half_of", make)

    def _either(self, step: int) -> str:
        return self._once(
            f"either_{step}",
            lambda: self._emit(f"either_{step}", "slice.Tensor", Ref(self._wraps()), 0, step, step + 1),
        )

    def _source(self, step: int) -> str:
        """The rank whose keys come in a step, as an index."""

        def make() -> str:
            way = self._emit("way", "sub.Tensor", Ref(self._rank()), Ref(self._numbers()))
            return self._emit("sources", "remainder.Scalar", Ref(way), self.size)

        every = self._once("sources", make)
        return self._once(
            f"source_{step}",
            lambda: self._emit(f"source_{step}", "slice.Tensor", Ref(every), 0, step, step + 1),
        )

    def _chosen(self, tile_half: int | str, step: int, dtype: str) -> str:
        """(2, 1, 1): 1 for the half, 0 for the other."""

        def make() -> str:
            two = self._once("two", lambda: self._emit("two", "arange.default", 2, **ON_THE_RANK))
            if tile_half == "either":
                chosen = self._emit("is_half", "eq.Tensor", Ref(two), Ref(self._either(step)))
            else:
                chosen = self._emit("is_half", "eq.Scalar", Ref(two), tile_half)
            return self._view(chosen, (2, 1, 1), "of_halves")

        key = tile_half if tile_half != "either" else f"either_{step}"
        chosen = self._once(f"chosen_{key}", make)
        return self._once(
            f"chosen_{key}_{dtype}",
            lambda: chosen
            if dtype == "bool"
            else self._emit("chosen", "_to_copy.default", Ref(chosen), dtype=Const("dtype", dtype)),
        )

    def _as(self, x: str, dtype: str, what: str) -> str:
        if self.out.specs[x].dtype == dtype:
            return x
        return self._emit(what, "_to_copy.default", Ref(x), dtype=Const("dtype", dtype))

    # --- step 1 ---------------------------------------------------------------------------------------------

    def _keys(self, k: str, v: str, what: str) -> Callable[[int], str]:
        """step -> keys and values, side by side: (batch, heads, sequence, features of both)."""
        own = self._emit(f"{what}_pair", "cat.default", (Ref(k), Ref(v)), -1)
        batch, *rest = self._shape(own)
        if self.kind == "gathered":
            if not self.gathered:
                every = self._communicated(ALL_GATHER.target, own, f"{what}_all")
                self.gathered = self._view(every, (self.size, batch, *rest), f"{what}_of_ranks")

            def picked(step: int) -> str:
                found = self._emit(
                    f"{what}_{step}", "index_select.default", Ref(self.gathered), 0, Ref(self._source(step))
                )
                return self._view(found, (batch, *rest), f"{what}_{step}_pair")

            return picked
        came = {0: own}

        def sent(step: int) -> str:
            if step not in came:
                came[step] = self._communicated(PERMUTE_NEXT.target, sent(step - 1), f"{what}_{step}")
            return came[step]

        return sent

    def _communicated(self, target: str, x: str, what: str, *how: Arg) -> str:
        start = self._emit(what, target, Ref(self.out.contiguous(x)), *how, self.axis, self.size)
        return self._emit(f"{what}_wait", WAIT, Ref(start))

    def _pair(self, both: str, of_keys: int, what: str) -> tuple[str, str]:
        last = len(self._shape(both)) - 1
        k = self._emit(f"{what}_k", "slice.Tensor", Ref(both), last, 0, of_keys)
        return k, self._emit(f"{what}_v", "slice.Tensor", Ref(both), last, of_keys, self._shape(both)[last])

    # --- step 2 ---------------------------------------------------------------------------------------------

    def _tiles(self) -> list[_Tile]:
        if not self.causal or not self.halves:
            return [_Tile(step) for step in range(self.size)]
        tiles = [_Tile(0, causal=True)]
        for step in range(1, self.size):
            tiles += [_Tile(step, 1, 0), _Tile(step, "either", "either")]
        return tiles

    def _mask_of(self, step: int) -> str | None:
        """The columns of a mask that are a rank's keys."""
        if self.mask is None:
            return None
        *rows, columns = self._shape(self.mask)
        parts = (2, self.size) if self.halves else (1, self.size)
        each = columns // parts[0] // self.size
        at = len(rows) + 1

        def make() -> str:
            # What hides all is finite: a row that sees nothing in one step counts nothing then.
            least = self._least(self.mask) / 4
            mask = self._emit("mask", "clamp_min.default", Ref(self.mask), least)
            mask = self._view(mask, (*rows, *parts, each), "mask_of_ranks")
            if not self.halves:
                return mask
            first, second = (self._emit("mask_half", "select.int", Ref(mask), at - 1, k) for k in range(2))
            second = self._emit("mask_back", "flip.default", Ref(second), (at - 1,))
            return self._emit("mask_halves", "stack.default", (Ref(first), Ref(second)), at - 1)

        every = self._once("mask", make)
        picked = self._emit(
            f"mask_{step}", "index_select.default", Ref(every), at, Ref(self._source(step))
        )
        return self._view(picked, (*rows, parts[0] * each), f"mask_{step}_columns")

    def _least(self, x: str | None) -> float:
        assert x is not None
        return torch.finfo(getattr(torch, self.out.specs[x].dtype)).min

    # --- step 3 ---------------------------------------------------------------------------------------------

    def forward(self) -> list[str]:
        """The op's results; of what kernels save beside the log-sum-exp, nothing."""
        q, k, v = (arg.name for arg in self.op.args[:3])
        if self.kind == "ulysses":
            return self._whole_forward(q, k, v)
        of_keys = self._shape(k)[-1]
        keys = self._keys(k, v, "keys")
        merged: _Merged | None = None
        later: _Merged | None = None
        for tile in self._tiles():
            kk, vv = (k, v) if not tile.step else self._pair(keys(tile.step), of_keys, f"keys_{tile.step}")
            made, lse = self._called(tile, q, kk, vv)
            if merged is None:
                merged = _Merged(self, made, lse, split=tile.causal)
            elif tile.queries is None:
                merged.add(made, lse)
            elif tile.queries == "either":
                merged.add_to_half(made, lse, tile.step)
            elif later is None:
                later = _Merged(self, made, lse)
            else:
                later.add(made, lse)
        assert merged is not None
        if later is not None:
            merged.add_to_half(later.value, later.lse, 1, half=1)
        made, lse = merged.result(self._shape(q)[ROWS], self.out.specs[q].dtype)
        if self.mask is not None:
            made, lse = self._without_empty(made, lse)
        return [made, lse, *("" for _ in self.op.outputs[2:])]

    def _called(self, tile: _Tile, q: str, k: str, v: str) -> tuple[str, str]:
        what = self._what(tile)
        q = self._half(q, tile.queries, tile.step, f"{what}_q")
        k, v = (
            self._half(x, tile.keys, tile.step, f"{what}_{name}") for name, x in zip("kv", (k, v), strict=True)
        )
        args, kwargs = self.kernel.arguments(self.op, (q, k, v), self._mask_of(tile.step), tile.causal)
        return self._kernel(tile, what, args, kwargs, (q, k))

    def _what(self, tile: _Tile) -> str:
        return f"step_{tile.step}" + {None: "", 1: "_later", "either": "_either"}[tile.queries]  # type: ignore[index]

    def _flops(self, op: Op, q: str, k: str) -> int:
        return op.flops * self._shape(q)[ROWS] * self._shape(k)[ROWS] // self.area

    def _kernel(
        self, tile: _Tile, what: str, args: Sequence[Arg], kwargs: Mapping[str, Arg], sizes: tuple[str, str]
    ) -> tuple[str, str]:
        target = self.op.target.removeprefix("layout.aten.")
        made = self._emit(what, target, *args, flops=self._flops(self.op, *sizes), **kwargs)
        self.saved[tile] = made
        value = self._emit(f"{what}_made", GETITEM, Ref(made), 0)
        lse = self._emit(f"{what}_lse", GETITEM, Ref(made), 1)
        return value, self._plain_lse(lse, self._shape(value)[:-1])

    def _plain_lse(self, lse: str, shape: Sequence[int]) -> str:
        """(batch, heads, queries), as kernels pad it or have a dim behind."""
        if self._shape(lse) == tuple(shape):
            return lse
        if len(self._shape(lse)) > len(shape):
            return self._view(lse, shape, "lse_rows")
        return self._emit("lse_rows", "slice.Tensor", Ref(lse), ROWS, 0, shape[ROWS])

    def _without_empty(self, made: str, lse: str) -> tuple[str, str]:
        """Rows that see no key are 0, and have no gradient."""
        empty = self._emit("empty", "lt.Scalar", Ref(lse), self._least(self.mask) / 8)
        wide = self._emit("empty_rows", "unsqueeze.default", Ref(empty), -1)
        made = self._emit("made", "masked_fill.Scalar", Ref(made), Ref(wide), 0.0)
        return made, self._emit("lse", "masked_fill.Scalar", Ref(lse), Ref(empty), math.inf)

    # --- step 4 ---------------------------------------------------------------------------------------------

    def backward(self, op: Op) -> list[str]:
        """Gradients of queries, keys and values."""
        self.start, self.op = op.name, replace(self.op, random=False)
        kernel = BACKWARDS[op.target.removeprefix("layout.")]
        grad, q, k, v = (arg.name for arg in op.args[:4])
        made, lse = op.args[kernel.made].name, op.args[kernel.lse].name
        rest = ["" for _ in op.outputs[3:]]
        if self.kind == "ulysses":
            return [*self._whole_backward(op, kernel, grad), *rest]
        of_keys, dtype = self._shape(k)[-1], self.out.specs[q].dtype
        sums = _accumulated(dtype)
        keys = self._keys(k, v, "keys")
        of_queries: _Summed | None = None
        later: _Summed | None = None
        of_pairs: dict[int, _Summed] = {}
        travelling = ""
        tiles = self._tiles()
        for at, tile in enumerate(tiles):
            kk, vv = (k, v) if not tile.step else self._pair(keys(tile.step), of_keys, f"keys_{tile.step}")
            what = self._what(tile)
            tensors = [
                self._half(x, tile.queries, tile.step, f"{what}_{name}")
                for name, x in (("grad", grad), ("q", q))
            ]
            tensors += [
                self._half(x, tile.keys, tile.step, f"{what}_{name}") for name, x in (("k", kk), ("v", vv))
            ]
            tensors += [
                self._half(x, tile.queries, tile.step, f"{what}_{name}") for name, x in (("out", made), ("lse", lse))
            ]
            dq, dk, dv = self._gradients(op, kernel, tile, tensors)
            dq = self._as(dq, sums, f"{what}_dq_sum")
            if of_queries is None:
                of_queries = _Summed(self, dq, split=tile.causal)
            elif tile.queries is None:
                of_queries.add(dq)
            elif tile.queries == "either":
                of_queries.add_to_half(dq, tile.queries, tile.step)
            elif later is None:
                later = _Summed(self, dq)
            else:
                later.add(dq)
            both = self._emit(f"{what}_pair", "cat.default", (Ref(dk), Ref(dv)), -1)
            both = self._as(both, sums, f"{what}_pair_sum")
            if tile.step not in of_pairs:
                came = travelling if tile.step > 1 else ""
                of_pairs[tile.step] = _Summed(self, came) if came else _Summed(self, "")
            if tile.keys is None:
                of_pairs[tile.step].add(both)
            else:
                of_pairs[tile.step].add_to_half(both, tile.keys, tile.step)
            last = at + 1 == len(tiles) or tiles[at + 1].step != tile.step
            if self.kind == "ring" and tile.step and last:
                travelling = self._communicated(
                    PERMUTE_NEXT.target, of_pairs[tile.step].value, f"back_{tile.step}"
                )
        assert of_queries is not None
        if later is not None:
            of_queries.add_to_half(later.value, 1, 0)
        dq = self._as(self._view(of_queries.value, self._shape(q), "dq_rows"), dtype, "dq")
        shape = (*self._shape(k)[:-1], of_keys + self._shape(v)[-1])
        both = self._home(of_pairs, travelling, shape)
        dk, dv = self._pair(self._as(both, dtype, "back_own"), of_keys, "back")
        return [dq, dk, dv, *rest]

    def _home(self, of_pairs: Mapping[int, _Summed], travelling: str, shape: tuple[int, ...]) -> str:
        """The gradients of a rank's own keys and values, of all ranks' queries."""
        if self.kind == "ring":
            own = self._view(of_pairs[0].value, shape, "back_0")
            came = self._view(travelling, shape, "back_rows")
            return self._emit("back_sum", "add.Tensor", Ref(own), Ref(came))
        parts = tuple(Ref(self._view(of_pairs[s].value, shape, f"back_{s}")) for s in range(self.size))
        every = self._emit("back_steps", "stack.default", parts, 0)
        every = self._emit("back_ranks", "index_select.default", Ref(every), 0, Ref(self._order()))
        # Halves keep a dim of their own, which shows along what the result is sharded.
        halves = (shape[1], 2, shape[2] // 2, shape[3]) if self.halves else shape[1:]
        every = self._view(every, (self.size * shape[0], *halves), "back_all")
        return self._view(self._communicated(REDUCE_SCATTER.target, every, "back", "sum"), shape, "back_rows")

    def _order(self) -> str:
        """Of each rank, the step in which its keys come."""
        self._source(0)
        return self.names[f"{self.start}_sources"]

    def _gradients(
        self, op: Op, kernel: Kernel, tile: _Tile, tensors: Sequence[str]
    ) -> tuple[str, str, str]:
        what = self._what(tile)
        grad, q, k, v, made, lse = tensors
        state = self._state(kernel, tile)
        args, kwargs = kernel.arguments_backward(
            op,
            (grad, q, k, v, made, self._kernel_lse(lse, kernel)),
            self._mask_of(tile.step),
            tile.causal,
            (self._shape(q)[ROWS], self._shape(k)[ROWS]),
            state,
        )
        target = op.target.removeprefix("layout.aten.")
        name = self._emit(what, target, *args, flops=self._flops(op, q, k), **kwargs)
        dq, dk, dv = (
            self._emit(f"{what}_d{letter}", GETITEM, Ref(name), at) for at, letter in enumerate("qkv")
        )
        return dq, dk, dv

    def _kernel_lse(self, lse: str, kernel: Kernel) -> str:
        """As the kernel keeps it."""
        if kernel.lse_multiple > 1:
            rows = self._shape(lse)[ROWS]
            missing = -rows % kernel.lse_multiple
            lse = self.out.contiguous(lse)
            if missing:
                lse = self._emit("lse_padded", "constant_pad_nd.default", Ref(lse), (0, missing), math.inf)
        if kernel.lse_dims == 4:
            lse = self._emit("lse_column", "unsqueeze.default", Ref(self.out.contiguous(lse)), -1)
        return lse

    def _state(self, kernel: Kernel, tile: _Tile) -> tuple[str, ...]:
        """What a kernel has drawn by; without dropout it has drawn nothing, and calls of one shape share it."""
        alike = [one for one in self.saved if (one.queries is None) == (tile.queries is None)]
        drawn = self.saved[tile if self.kernel.drops(self.op) else alike[0]]
        result = []
        for at in kernel.state_of:
            key = f"{drawn}_state_{at}"
            if key not in self.names:
                self.names[key] = self._emit(f"state_{at}", GETITEM, Ref(drawn), at)
            result.append(self.names[key])
        return tuple(result)

    # --- all tokens of fewer heads --------------------------------------------------------------------------

    def _exchanged(self, x: str, before: int, after: int, what: str) -> str:
        return self._emit(what, EXCHANGE, Ref(x), before, after, self.axis, self.size)

    def _whole_forward(self, q: str, k: str, v: str) -> list[str]:
        q, k, v = (self._exchanged(x, ROWS, HEADS, f"{n}_heads") for n, x in zip("qkv", (q, k, v), strict=True))
        mask = self.mask
        if mask is not None and len(self._shape(mask)) == 4 and self._shape(mask)[HEADS] > 1:
            mask = self._emit("mask_heads", SLICE, Ref(mask), HEADS, 1, self.axis, self.size)
        self.mask = mask
        args, kwargs = self.kernel.arguments(self.op, (q, k, v), mask, self.causal)
        tile = _Tile(0)
        target = self.op.target.removeprefix("layout.aten.")
        made = self._emit("made", target, *args, flops=self.op.flops, **kwargs)
        self.saved[tile] = made
        value = self._emit("value", GETITEM, Ref(made), 0)
        lse = self._emit("lse", GETITEM, Ref(made), 1)
        self.whole = (q, k, v, value, lse)
        return [self._exchanged(value, HEADS, ROWS, "rows"), lse, *("" for _ in self.op.outputs[2:])]

    def _whole_backward(self, op: Op, kernel: Kernel, grad: str) -> list[str]:
        q, k, v, value, lse = self.whole
        grad = self._exchanged(grad, ROWS, HEADS, "grad_heads")
        args, kwargs = kernel.arguments_backward(
            op,
            (grad, q, k, v, value, lse),
            self.mask,
            self.causal,
            (self._shape(q)[ROWS], self._shape(k)[ROWS]),
            self._state(kernel, _Tile(0)),
        )
        made = self._emit("made", op.target.removeprefix("layout.aten."), *args, flops=op.flops, **kwargs)
        return [
            self._exchanged(self._emit(f"d{n}", GETITEM, Ref(made), at), HEADS, ROWS, f"d{n}_rows")
            for at, n in enumerate("qkv")
        ]


def _accumulated(dtype: str) -> str:
    return dtype if dtype == "float64" else "float32"


class _Merged:
    """Partial results of some queries, merged. split: kept by halves."""

    def __init__(self, of: _Attention, value: str, lse: str, split: bool = False) -> None:
        self.of = of
        self.dtype = _accumulated(of.out.specs[value].dtype)
        self.value, self.lse = self._wide(value, lse)
        if split:
            self.value, self.lse = of._of_halves(self.value, "made"), of._of_halves(self.lse, "lse")

    def _wide(self, value: str, lse: str) -> tuple[str, str]:
        return self.of._as(value, self.dtype, "made_wide"), self.of._as(lse, self.dtype, "lse_wide")

    def add(self, value: str, lse: str) -> None:
        emit = self.of._emit
        value, lse = self._wide(value, lse)
        apart = emit("apart", "sub.Tensor", Ref(lse), Ref(self.lse))
        share = emit("share", "unsqueeze.default", Ref(emit("part", "sigmoid.default", Ref(apart))), -1)
        self.value = emit("merged", "lerp.Tensor", Ref(self.value), Ref(value), Ref(share))
        self.lse = emit("merged_lse", "logaddexp.default", Ref(self.lse), Ref(lse))

    def add_to_half(self, value: str, lse: str, step: int, half: int | str = "either") -> None:
        """Of the other half it counts nothing."""
        of, emit = self.of, self.of._emit
        value, lse = self._wide(value, lse)
        value, lse = (emit("one", "unsqueeze.default", Ref(x), ROWS) for x in (value, lse))
        other = emit("other", "bitwise_not.default", Ref(of._chosen(half, step, "bool")))
        other = of._view(other, (2, 1), "other_half")
        batch, heads, _, rows = of._shape(lse)
        lse = emit("both", "expand.default", Ref(lse), (batch, heads, 2, rows))
        lse = emit("of_half", "masked_fill.Scalar", Ref(lse), Ref(other), -math.inf)
        self.add(value, lse)

    def result(self, rows: int, dtype: str) -> tuple[str, str]:
        of = self.of
        batch, heads = of._shape(self.value)[:2]
        value = of._view(self.value, (batch, heads, rows, of._shape(self.value)[-1]), "made_rows")
        return of._as(value, dtype, "made"), of._view(self.lse, (batch, heads, rows), "lse_all")


class _Summed:
    """A gradient of rows, added up. value: "" for nothing yet. split: kept by halves."""

    def __init__(self, of: _Attention, value: str, split: bool = False) -> None:
        self.of = of
        self.value = of._of_halves(value, "sum") if split else value

    def add(self, value: str) -> None:
        self.value = self.of._emit("sum", "add.Tensor", Ref(self.value), Ref(value)) if self.value else value

    def add_to_half(self, value: str, half: int | str, step: int) -> None:
        emit = self.of._emit
        wide = Ref(emit("one", "unsqueeze.default", Ref(value), ROWS))
        chosen = Ref(self.of._chosen(half, step, self.of.out.specs[value].dtype))
        if self.value:
            self.value = emit("sum", "addcmul.default", Ref(self.value), wide, chosen)
        else:
            self.value = emit("sum", "mul.Tensor", wide, chosen)
