"""Calls of an attention's kernel: which queries meet which keys in one, and what the kernel is given.

Of a causal sequence, a part of a chunk's queries sees the keys that are at hand up to its own. That is
causal from the lower right, where the last query sees all keys. Flash attention on CUDA takes it so (2.1 and
later), and later chunks have it in the place of cuDNN's; other kernels get a mask.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from stretto.ir.program import DTYPE_BYTES, GETITEM, Const, Op, Ref
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
        return f"chunk_{self.chunk}_step_{self.step}"


class KernelCalls:
    """Of one op, and its backward. ends: of chunks in each block; pairs: of queries and keys, as the op's
    flops count them; saved: of each tile, the kernel, the call that has drawn for it, and what it adds to
    scores; alike: what is called -> the first such call, which is all calls' where nothing is drawn; made: of
    each step, in the direction that is being emitted, what its tiles have made."""

    def __init__(self, ops: StepOps, op: Op) -> None:
        self.op, self.ops, self.given = op, ops, arguments(op)
        self.kernel, self.mask = kernel_of(op), mask_of(op)
        self.causal = bool(self.given["is_causal"])
        self.in_halves = any(queries is not None for pairs in ops.met for queries, _ in pairs)
        shape, self.count = ops.shape(self.given["query"].name), ops.shape(self.given["key"].name)[ROWS]
        self.pairs = math.prod(shape[:3]) * self.count * ops.size
        self.ends = [*accumulate(n // (2 if ops.halves else 1) for n in ops.lengths or (shape[ROWS],))]
        self.saved: dict[Tile, tuple[str, str, str | None]] = {}
        self.alike: dict[object, str] = {}
        self.made: dict[int, list[str]] = defaultdict(list)

    def tiles(self, chunk: int, step: int) -> list[Tile]:
        ops, blocks = self.ops, self.ops.blocks
        if step:
            return [Tile(chunk, step, *halves) for halves in ops.met[step]]
        if not self.causal:
            return [Tile(chunk, step)]
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
        alike = self.alike.setdefault((kernel, ops.shape(q), ops.shape(k), tile.seen > 0), made)
        self.saved[tile] = kernel, made if self.given["dropout_p"] else alike, hidden
        value, lse = (ops.emit(f"{name}_{n}", GETITEM, Ref(made), k) for k, n in enumerate(("made", "lse")))
        self.made[tile.step].append(value)
        shape = ops.shape(value)[:-1]
        if len(ops.shape(lse)) > len(shape):
            return value, ops.view(lse, shape, "lse_rows")
        return value, ops.rows(lse, 0, shape[ROWS])

    def backward(self, op: Op, tile: Tile, rows: Sequence[str], pair: tuple[str, str]) -> list[str]:
        """Gradients of queries, keys and values, and of a mask that has one. rows: gradient, queries, result,
        log-sum-exp of a chunk."""
        ops, name, (kernel, call_of, hidden) = self.ops, tile.name, self.saved[tile]
        named = zip(("grad", "q", "made", "lse"), rows, strict=True)
        grad, q, made, lse = (ops.half(x, tile.queries, tile.step, f"{name}_{n}") for n, x in named)
        k, v = self._keys(tile, pair)
        given = self._given(tile, kernel, hidden, (q, k, v))
        given |= dict.fromkeys(("grad_out", "grad_out_"), Ref(grad))
        given |= {"out": Ref(made), "logsumexp": Ref(self._kernel_lse(lse, kernel))}
        drawn = (self._part_of(call_of, at) for at in KERNELS[kernel].state)
        given |= dict(zip(("philox_seed", "philox_offset"), drawn, strict=False))
        given |= {"max_q": ops.shape(q)[ROWS], "max_k": ops.shape(k)[ROWS]}
        given |= {"cum_seq_q": None, "cum_seq_k": None}
        given |= {"grad_input_mask": (True, True, True, any(op.outputs[3:]))}
        args, kwargs = call(backward_of(kernel), given)
        called = Ref(ops.emit(name, backward_of(kernel), *args, flops=self._flops(op, q, k), **kwargs))
        wanted = "qkvm" if any(op.outputs[3:]) else "qkv"
        grads = [ops.emit(f"{name}_d{what}", GETITEM, called, at) for at, what in enumerate(wanted)]
        self.made[tile.step].append(grads[0])
        return grads

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
        if tile.seen in (0, self.ops.shape(pair[0])[ROWS]):
            return list(pair)
        own = map(self.ops.own, pair) if self.ops.halves else pair
        return [self.ops.rows(x, 0, tile.seen) for x in own]

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
        if ops.at_hand:
            return mask
        mask = ops.columns(mask, tile.step)
        if tile.queries is None:
            return mask
        *rest, rows, keys = ops.shape(mask)
        name, at = f"{tile.name}_mask", len(rest)
        halves = ops.view(mask, (*rest, 2, rows // 2, 2, keys // 2), f"{name}_halves")
        mask = ops.picked(halves, tile.keys, tile.step, f"{name}_keys", at + 2)
        return ops.picked(mask, tile.queries, tile.step, name, at)

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

    def _part_of(self, made: str, at: int) -> Ref:
        part = partial(self.ops.emit, f"state_{at}", GETITEM, Ref(made), at)
        return Ref(self.ops.once(f"{made}_{at}", part))
