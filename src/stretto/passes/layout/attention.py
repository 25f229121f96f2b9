"""Attention of chunks of the queries, where an axis is one of time: all keys and values are at hand.

    1. A rule: queries, keys and values are sharded along the sequence. The op becomes
       `layout.attention(kernel, ...)` of one member, which communicates within.
    2. `unroll` knows which chunk it is. Keys and values are put together as far as a chunk may see them;
       behind the first chunk what is causal is so from the lower right. The gradients of keys and values are
       sums over the chunks that read them.

CUDA's flash attention takes `is_causal` from the lower right (FlashAttention 2.1 and later); cuDNN's does
not, and later chunks have flash attention in its place. Other kernels get a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stretto.backend.dispatch_adapter import named, overload, positional
from stretto.errors import CaptureError
from stretto.ir.dim_rules import Labels
from stretto.ir.program import DTYPE_BYTES, GETITEM, Arg, Const, Op, Ref, TensorSpec
from stretto.passes.layout.emit import ATTEND, ON_THE_RANK, Emitter
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, fits, sharded
from stretto.passes.layout.rules import Choice, OpGiven, Rule, rule_of

SEQUENCE = 2
"""The dim of the sequence in queries, keys and values (batch, heads, sequence, features)."""

ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
CUDNN = "aten._scaled_dot_product_cudnn_attention.default"
KERNELS = (ON_CPU, FLASH, EFFICIENT, CUDNN)

MAX_HEAD_DIM = 256
"""Flash attention's largest head (Dao 2023, arXiv 2307.08691; sdp_utils.cpp)."""

ALIGNED_BYTES = 16
"""To which rows of a mask, and heads, are aligned for CUDA's kernels (sdp_utils.cpp, attention.cpp)."""

ROWS_ALIGNED = 32
"""To which the efficient kernel's statistics of rows are padded (kernel_forward.h)."""

DRAWS = {ON_CPU: (), FLASH: (6, 7), EFFICIENT: (2, 3), CUDNN: (6, 7)}
"""Where results of a kernel say what it has drawn."""


def arguments(op: Op) -> dict[str, Any]:
    """The arguments of a kernel by name."""
    function = overload(op.target)
    assert function is not None
    return named(function, op.args, dict(op.kwargs))


def backward_of(kernel: str) -> str:
    return kernel.replace(".default", "_backward.default")


OF_BACKWARD = {backward_of(kernel): kernel for kernel in KERNELS}


def check_draws(ops: Iterable[Op], what: str) -> None:
    """Raises CaptureError for a kernel that drops, which draws for a chunk what it does not draw for all."""
    for op in ops:
        if op.target in KERNELS and (p := arguments(op)["dropout_p"]):
            raise CaptureError(
                f"attention drops with p = {p}, and its kernel on CUDA draws for each chunk of the sequence "
                f"by itself, not what it draws in the uncut model: give attention no dropout, or leave "
                f"{what} out"
            )


# --- step 1 -----------------------------------------------------------------------------------------------


def _attention(op: Op, given: OpGiven) -> Iterator[Choice]:
    backward, known = op.target in OF_BACKWARD, arguments(op)
    at = 1 if backward else 0
    queries, keys, values = given.specs[at : at + 3]
    rule = rule_of(op, given.specs)
    if rule is None or given.placements[at] != sharded(SEQUENCE):
        return
    mask = known.get("attn_mask") or known.get("attn_bias")
    same = queries.shape[SEQUENCE] == keys.shape[SEQUENCE]
    if known["is_causal"] and (mask is not None or not same or not _has_later(op, queries, keys, values)):
        return
    if backward and any(spec is not None for spec in op.outputs[3:]):
        return  # a gradient of the mask
    query, key = rule.inputs[at][SEQUENCE], rule.inputs[at + 1][SEQUENCE]

    def placed(labels: Labels, spec: TensorSpec | None, of_keys: bool) -> AxisPlacement:
        if query in labels and not _is_padded(op, spec, queries, given.size):
            return sharded(labels.index(query))
        return sharded(SEQUENCE) if of_keys else REPLICATED

    inputs = tuple(
        placed(labels, spec, at < n <= at + 2)
        for n, (labels, spec) in enumerate(zip(rule.inputs, given.specs, strict=True))
    )
    outputs = tuple(
        placed(labels, spec, key in labels) for labels, spec in zip(rule.outputs, op.outputs, strict=True)
    )
    of_all = zip((*inputs, *outputs), (*given.specs, *op.outputs), strict=True)
    if all(spec is None or fits(place, spec.shape, given.size) for place, spec in of_all):
        yield Choice(inputs, outputs, _one_member)


def _is_padded(op: Op, spec: TensorSpec | None, queries: TensorSpec, size: int) -> bool:
    """Whether statistics of rows are in steps in which those of a chunk are as many as of all rows."""
    efficient = OF_BACKWARD.get(op.target, op.target) == EFFICIENT
    if not efficient or spec is None or len(spec.shape) != 3:
        return False
    rows = queries.shape[SEQUENCE] // size
    return spec.shape[SEQUENCE] == -(-rows // ROWS_ALIGNED) * ROWS_ALIGNED


def _one_member(out: Emitter, op: Op, local: Sequence[str]) -> Sequence[str]:
    left = list(local)
    args = [Ref(left.pop(0)) if isinstance(arg, Ref) else arg for arg in op.args]
    kwargs = {key: Ref(left.pop(0)) if isinstance(arg, Ref) else arg for key, arg in op.kwargs}
    return (out.emit(ATTEND, op.target, *args, name=op.name, kwargs=kwargs, flops=op.flops),)


def _has_later(op: Op, queries: TensorSpec, keys: TensorSpec, values: TensorSpec) -> bool:
    """Whether flash attention takes what cuDNN's does."""
    if OF_BACKWARD.get(op.target, op.target) != CUDNN:
        return True
    sizes = {spec.shape[-1] for spec in (queries, keys, values)}
    return len(sizes) == 1 and heads_fit(max(sizes))


def heads_fit(size: int) -> bool:
    """Whether CUDA's kernels of attention take heads of this size, of two-byte elements or wider."""
    return size <= MAX_HEAD_DIM and size % (ALIGNED_BYTES // 2) == 0


IN_CHUNKS: dict[str, Rule] = dict.fromkeys((*KERNELS, *OF_BACKWARD), _attention)

# --- step 2 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attended:
    """A chunk's attention. call: its arguments by name; results: of the op, by number; ends: behind the last
    key that it sees."""

    kernel: str
    call: Mapping[str, Arg]
    results: Mapping[int, str]
    end: int


@dataclass(slots=True)
class AttentionChunks:
    """Emits the attention of chunks. forwards: of each op, by chunk."""

    out: Emitter
    forwards: dict[str, list[Attended]]
    joined: dict[tuple[str, ...], str]

    def forward(self, op: Op, calls: Sequence[Mapping[str, Arg]]) -> list[Mapping[int, str]]:
        """op: of one member; calls: its arguments by name, of each chunk. Returns the results of each."""
        self.forwards[op.name] = [self._forward(op, calls, k) for k in range(len(calls))]
        return [one.results for one in self.forwards[op.name]]

    def backward(self, op: Op, forward: str, calls: Sequence[Mapping[str, Arg]]) -> list[Mapping[int, str]]:
        """forward: the name of the op that it is of."""
        made: list[tuple[str, str, str]] = []
        for k, one in enumerate(self.forwards[forward]):
            target = backward_of(one.kernel)
            results = dict(zip(("out", "logsumexp"), one.results.values(), strict=False))
            draws = [Ref(one.results[at]) for at in DRAWS[one.kernel]]
            query = self.out.specs[one.call["query"].name]
            given = {
                **one.call,
                **{name: Ref(value) for name, value in results.items()},
                **dict(zip(("philox_seed", "philox_offset"), draws, strict=False)),
                **dict.fromkeys(("grad_out", "grad_out_"), _gradient(calls[k])),
                "max_q": query.shape[SEQUENCE],
                "max_k": one.end,
                "cum_seq_q": None,
                "cum_seq_k": None,
                "grad_input_mask": (True, True, True, False),
            }
            name = self._call(op, target, given, self._share(calls, k, one.end))
            parts = [self.out.emit(GETITEM, Ref(name), n, name=f"{op.name}_{n}") for n in range(3)]
            made.append((parts[0], parts[1], parts[2]))
        of_keys = [self._sums([of[n] for of in made], calls) for n in (1, 2)]
        return [{0: made[k][0], 1: of_keys[0][k], 2: of_keys[1][k]} for k in range(len(calls))]

    def _forward(self, op: Op, calls: Sequence[Mapping[str, Arg]], k: int) -> Attended:
        kernel, call = op.args[0], dict(calls[k])
        causal = bool(call["is_causal"])
        rows = [self.out.specs[one["query"].name].shape[SEQUENCE] for one in calls]
        start, end = sum(rows[:k]), sum(rows[: k + 1])
        for what in ("key", "value"):
            parts = tuple(one[what].name for one in calls)
            call[what] = Ref(self.join(parts[: k + 1] if causal else parts, SEQUENCE))
        length = self.out.specs[call["key"].name].shape[SEQUENCE]
        if causal and start:
            if kernel == CUDNN:
                kernel = FLASH
            if kernel in (ON_CPU, EFFICIENT):
                mask = "attn_mask" if kernel == ON_CPU else "attn_bias"
                call |= {"is_causal": False, mask: Ref(self._hidden(kernel, call, start, end))}
        if kernel == FLASH:
            call["return_debug_mask"] = False
        made = self._call(op, kernel, call, self._share(calls, k, length))
        wanted = (0, 1, *DRAWS[kernel])
        results = {at: self.out.emit(GETITEM, Ref(made), at, name=f"{made}_{at}") for at in wanted}
        return Attended(kernel, call, results, length)

    def _call(self, op: Op, target: str, call: Mapping[str, Arg], share: Fraction) -> str:
        function = overload(target)
        assert function is not None
        args, kwargs = positional(function, call)
        return self.out.emit(target, *args, name=op.name, kwargs=kwargs, flops=int(op.flops * share))

    def _share(self, calls: Sequence[Mapping[str, Arg]], k: int, seen: int) -> Fraction:
        """Of all products of queries and keys. seen: the keys that the chunk sees."""
        rows, keys = (
            [self.out.specs[one[what].name].shape[SEQUENCE] for one in calls] for what in ("query", "key")
        )
        return Fraction(rows[k] * seen, sum(rows) * sum(keys))

    def join(self, parts: tuple[str, ...], dim: int) -> str:
        """Parts put together, once."""
        key = (*parts, str(dim))
        if len(parts) > 1 and key not in self.joined:
            name = f"{parts[-1]}_joined"
            self.joined[key] = self.out.emit("aten.cat.default", tuple(map(Ref, parts)), dim, name=name)
        return self.joined[key] if len(parts) > 1 else parts[0]

    def _hidden(self, kernel: str, call: Mapping[str, Arg], start: int, end: int) -> str:
        """What is added to the scores of a chunk's queries: -inf where a key is behind one."""
        out, query = self.out, self.out.specs[call["query"].name]
        rows, wide = query.shape[SEQUENCE], end
        if kernel == EFFICIENT:
            aligned = ALIGNED_BYTES // DTYPE_BYTES[query.dtype]
            wide = -(-end // aligned) * aligned
        name = f"hidden_{start}"
        dtype = {"dtype": Const("dtype", query.dtype), **ON_THE_RANK}
        full = out.emit("aten.full.default", (rows, wide), -math.inf, name=name, kwargs=dtype)
        mask = out.emit("aten.triu.default", Ref(full), start + 1, name=name)
        if wide > end:
            mask = out.emit("aten.slice.Tensor", Ref(mask), 1, 0, end, name=name)
        if kernel == EFFICIENT:
            mask = out.emit("aten.expand.default", Ref(mask), (*query.shape[:2], rows, end), name=name)
        return mask

    def _sums(self, parts: Sequence[str], calls: Sequence[Mapping[str, Arg]]) -> list[str]:
        """Gradients of keys or values, of each chunk as far as it sees them: each chunk's own."""
        lengths = [self.out.specs[part].shape[SEQUENCE] for part in parts]
        result, start = [], 0
        for call in calls:
            end = start + self.out.specs[call["key"].name].shape[SEQUENCE]
            own = [self._part(part, start, end) for part, n in zip(parts, lengths, strict=True) if n >= end]
            result.append(total(self.out, own))
            start = end
        return result

    def _part(self, x: str, start: int, end: int) -> str:
        if (start, end) == (0, self.out.specs[x].shape[SEQUENCE]):
            return x
        return self.out.emit("aten.slice.Tensor", Ref(x), SEQUENCE, start, end, name=f"{x}_part")


def _gradient(call: Mapping[str, Arg]) -> Arg:
    """Kernels call it by two names."""
    return call["grad_out"] if "grad_out" in call else call["grad_out_"]


def total(out: Emitter, parts: Sequence[str], largest: bool = False) -> str:
    """The sum of values, or of each element the largest."""
    result, *rest = parts
    for other in rest:
        target = "aten.maximum.default" if largest else "aten.add.Tensor"
        result = out.emit(target, Ref(result), Ref(other), name=f"{result}_sum")
    return result
