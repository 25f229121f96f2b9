"""Calls of an attention's kernel: which queries meet which keys in one, and what the kernel is given.

Of a causal sequence, a part of a chunk's queries sees the keys that are at hand up to its own. That is
causal from the lower right, where the last query sees all keys. Flash attention on CUDA takes it so, and
later chunks have it in the place of cuDNN's; other kernels get a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stretto.ir.program import DTYPE_BYTES, GETITEM, Arg, Const, Op, Ref
from stretto.passes.layout.attention import ROWS
from stretto.passes.layout.context_ops import JOB_DEVICE, Half, StepOps
from stretto.passes.layout.kernels import (
    ALIGNED_BYTES,
    CUDNN,
    EFFICIENT,
    FLASH,
    KERNELS,
    arguments,
    backward_of,
    call,
    kernel_of,
    mask_of,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one call computes. chunk: of the queries; step: 0 for keys that are at hand; seen: of a causal
    call, how many of these, from the first; else 0."""

    chunk: int
    step: int
    queries: Half = None
    keys: Half = None
    seen: int = 0

    @property
    def name(self) -> str:
        chunk = f"chunk_{self.chunk}_" if self.chunk else ""
        which = "later" if self.queries == 1 else self.queries
        return f"{chunk}step_{self.step}" + ("" if which is None else f"_{which}")


class KernelCalls:
    """Of one op, and its backward. ends: of chunks in each block; pairs: of queries and keys, as the op's
    flops count them; saved: of each tile, the kernel, its call, and what it adds to scores."""

    def __init__(self, ops: StepOps, op: Op) -> None:
        self.op, self.ops, self.given = op, ops, arguments(op)
        self.kernel, self.mask = kernel_of(op), mask_of(op)
        self.causal = bool(self.given["is_causal"])
        shape, self.count = ops.shape(self.given["query"].name), ops.shape(self.given["key"].name)[ROWS]
        self.pairs = math.prod(shape[:3]) * self.count * ops.size
        self.ends = [*accumulate(n // (2 if ops.halves else 1) for n in ops.lengths or (shape[ROWS],))]
        self.saved: dict[Tile, tuple[str, str, str | None]] = {}

    def tiles(self, chunk: int, step: int) -> list[Tile]:
        ops, blocks = self.ops, self.ops.blocks
        if not self.causal:
            return [Tile(chunk, step)]
        if step:
            return [Tile(chunk, step, 1, 0), Tile(chunk, step, "either", "either")]
        count = self.count * (ops.size if ops.kind == "ulysses" else 1)
        if len(self.ends) == 1:
            return [Tile(chunk, 0, seen=count)]
        return [
            Tile(chunk, 0, k if blocks > 1 else None, seen=count // blocks * k + self.ends[chunk])
            for k in range(blocks)
        ]

    def forward(self, tile: Tile, q: str, pair: tuple[str, str]) -> tuple[str, str]:
        """The result, and the log-sum-exp of each row."""
        ops, name = self.ops, tile.name
        q = ops.half(q, tile.queries, tile.step, f"{name}_q")
        k, v = self._keys(tile, pair)
        later = len(self.ends) > 1 and tile.seen > ops.shape(q)[ROWS]
        kernel = FLASH if later and self.kernel == CUDNN else self.kernel
        hidden = self._hidden(kernel, q, tile.seen) if later and kernel != FLASH else None
        args, kwargs = call(kernel, self._given(tile, kernel, hidden, (q, k, v)))
        made = ops.emit(name, kernel, *args, flops=self._flops(self.op, q, k), **kwargs)
        self.saved[tile] = kernel, made, hidden
        value, lse = (ops.emit(f"{name}_{n}", GETITEM, Ref(made), k) for k, n in enumerate(("made", "lse")))
        shape = ops.shape(value)[:-1]
        if len(ops.shape(lse)) > len(shape):
            return value, ops.view(lse, shape, "lse_rows")
        return value, ops.rows(lse, 0, shape[ROWS])

    def backward(self, op: Op, tile: Tile, rows: Sequence[str], pair: tuple[str, str]) -> list[str]:
        """Gradients of queries, keys and values. rows: gradient, queries, result, log-sum-exp of a chunk."""
        ops, name, (kernel, _, hidden) = self.ops, tile.name, self.saved[tile]
        named = zip(("grad", "q", "made", "lse"), rows, strict=True)
        grad, q, made, lse = (ops.half(x, tile.queries, tile.step, f"{name}_{n}") for n, x in named)
        k, v = self._keys(tile, pair)
        given = self._given(tile, kernel, hidden, (q, k, v))
        given |= dict.fromkeys(("grad_out", "grad_out_"), Ref(grad))
        given |= {"out": Ref(made), "logsumexp": Ref(self._kernel_lse(lse, kernel))}
        given |= dict(zip(("philox_seed", "philox_offset"), self._state(tile), strict=False))
        given |= {"max_q": ops.shape(q)[ROWS], "max_k": ops.shape(k)[ROWS]}
        given |= dict.fromkeys(("cum_seq_q", "cum_seq_k"))
        given |= {"grad_input_mask": (True, True, True, any(op.outputs[3:]))}
        target = backward_of(kernel)
        args, kwargs = call(target, given)
        called = Ref(ops.emit(name, target, *args, flops=self._flops(op, q, k), **kwargs))
        wanted = range(4 if any(op.outputs[3:]) else 3)
        return [ops.emit(f"{name}_d{'qkvm'[at]}", GETITEM, called, at) for at in wanted]

    def _given(self, tile: Tile, kernel: str, hidden: str | None, tensors: Sequence[str]) -> dict[str, Any]:
        """tensors: queries, keys, values."""
        mask = hidden or self._mask(tile)
        return {
            **self.given,
            **dict(zip(("query", "key", "value"), map(Ref, tensors), strict=True)),
            KERNELS[kernel].mask: None if mask is None else Ref(mask),
            "is_causal": bool(tile.seen) and hidden is None,
            "return_debug_mask": False,
            "compute_log_sumexp": True,
        }

    def _flops(self, of: Op, q: str, k: str) -> int:
        return int(of.flops * math.prod(self.ops.shape(q)[:3]) * self.ops.shape(k)[ROWS] // self.pairs)

    # --- keys and masks -------------------------------------------------------------------------------------

    def _keys(self, tile: Tile, pair: tuple[str, str]) -> list[str]:
        ops = self.ops
        if tile.seen:
            own = pair if tile.seen == ops.shape(pair[0])[ROWS] else map(ops.own, pair)
            return [ops.rows(x, 0, tile.seen) for x in own]
        named = zip("kv", pair, strict=True)
        return [ops.half(x, tile.keys, tile.step, f"{tile.name}_{n}") for n, x in named]

    def _mask(self, tile: Tile) -> str | None:
        """That of a chunk's queries and a step's keys."""
        ops, mask, chunk = self.ops, self.mask, tile.chunk
        if mask is None:
            return None
        *rest, rows, keys = ops.shape(mask)
        if len(self.ends) > 1 and rows > 1:
            start, end = (0, *self.ends)[chunk : chunk + 2]
            wide = ops.view(mask, (*rest, ops.blocks, rows // ops.blocks, keys), f"mask_{chunk}_blocks")
            wide = ops.rows(wide, start, end, len(rest) + 1)
            mask = ops.view(wide, (*rest, ops.blocks * (end - start), keys), f"mask_{chunk}_rows")
        return mask if ops.at_hand else ops.columns(mask, tile.step)

    def _hidden(self, kernel: str, q: str, seen: int) -> str:
        """What is added to the scores of queries of which the last sees all keys."""
        ops, query = self.ops, self.ops.out.specs[q]
        rows, wide, dtype = query.shape[ROWS], seen, Const("dtype", query.dtype)
        if kernel == EFFICIENT:
            aligned = ALIGNED_BYTES // DTYPE_BYTES[query.dtype]
            wide = -(-seen // aligned) * aligned
        full = ops.emit("hidden", "full.default", (rows, wide), -math.inf, dtype=dtype, device=JOB_DEVICE)
        mask = ops.rows(ops.emit("hidden", "triu.default", Ref(full), seen - rows + 1), 0, seen, 1)
        if kernel == EFFICIENT:
            mask = ops.emit("hidden", "expand.default", Ref(mask), (*query.shape[:2], rows, seen))
        return mask

    # --- what kernels keep ----------------------------------------------------------------------------------

    def _kernel_lse(self, lse: str, kernel: str) -> str:
        """As the kernel keeps it."""
        ops, like = self.ops, KERNELS[kernel]
        if like.lse_multiple == 1 and like.lse_dims == 3:
            return lse
        lse = ops.out.contiguous(lse)
        missing = -ops.shape(lse)[ROWS] % like.lse_multiple
        if missing:
            lse = ops.emit("lse_padded", "constant_pad_nd.default", Ref(lse), (0, missing), math.inf)
        return ops.view(lse, (*ops.shape(lse), 1), "lse_column") if like.lse_dims > 3 else lse

    def _state(self, tile: Tile) -> list[Arg]:
        """What a kernel has drawn by. Without dropout that is nothing, and calls of one shape share it."""
        kernel, made, _ = self.saved[tile]
        if not self.given["dropout_p"]:
            alike = (one for one in self.saved if one.chunk == tile.chunk)
            alike = (one for one in alike if (one.queries is None) == (tile.queries is None))
            made = next(self.saved[one][1] for one in alike if self.saved[one][0] == kernel)

        def taken(at: int) -> str:
            return self.ops.emit(f"state_{at}", GETITEM, Ref(made), at)

        return [Ref(self.ops.once(f"{made}_{at}", lambda at=at: taken(at))) for at in KERNELS[kernel].state]  # type: ignore[misc]
