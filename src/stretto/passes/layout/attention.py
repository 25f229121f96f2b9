"""Attention of chunks of the queries, where an axis is one of time: all keys and values are at hand.

    1. A rule: queries are sharded along the sequence, and so are keys and values, or they are full. The op
       becomes `layout.attention(kernel, ...)` of one member, which communicates within.
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
from functools import partial
from typing import Any

from stretto.backend.dispatch_adapter import named, overload, positional
from stretto.errors import CaptureError
from stretto.ir.program import DTYPE_BYTES, GETITEM, Arg, Const, Op, Ref, TensorSpec
from stretto.passes.layout.emit import ATTEND, ON_THE_RANK, Emitter
from stretto.passes.layout.placement import PARTIAL, REPLICATED, fits, sharded
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
    query, key = (rule.inputs[at][SEQUENCE], rule.inputs[at + 1][SEQUENCE])
    for of_keys in (sharded(SEQUENCE), REPLICATED):
        inputs = tuple(
            sharded(labels.index(query))
            if query in labels and not _is_padded(op, spec, queries, given.size)
            else of_keys
            if at < n <= at + 2
            else REPLICATED
            for n, (labels, spec) in enumerate(zip(rule.inputs, given.specs, strict=True))
        )
        outputs = tuple(
            sharded(labels.index(query))
            if query in labels and not _is_padded(op, spec, queries, given.size)
            else REPLICATED
            if key not in labels
            else of_keys
            if of_keys.is_sharded
            else PARTIAL
            for labels, spec in zip(rule.outputs, op.outputs, strict=True)
        )
        if all(
            spec is None or fits(place, spec.shape, given.size)
            for place, spec in zip((*inputs, *outputs), (*given.specs, *op.outputs), strict=True)
        ):
            pairs = queries.shape[SEQUENCE] * keys.shape[SEQUENCE]
            yield Choice(inputs, outputs, partial(_one_member, flops=op.flops // max(pairs, 1)))


def _is_padded(op: Op, spec: TensorSpec | None, queries: TensorSpec, size: int) -> bool:
    """Whether statistics of rows are in steps in which those of a chunk are as many as of all rows."""
    efficient = OF_BACKWARD.get(op.target, op.target) == EFFICIENT
    if not efficient or spec is None or len(spec.shape) != 3:
        return False
    rows = queries.shape[SEQUENCE] // size
    return spec.shape[SEQUENCE] == -(-rows // ROWS_ALIGNED) * ROWS_ALIGNED


def _one_member(out: Emitter, op: Op, local: Sequence[str], flops: int) -> Sequence[str]:
    """flops: of a query and a key."""
    left = list(local)
    args = [Ref(left.pop(0)) if isinstance(arg, Ref) else arg for arg in op.args]
    kwargs = {key: Ref(left.pop(0)) if isinstance(arg, Ref) else arg for key, arg in op.kwargs}
    return (out.emit(ATTEND, op.target, *args, name=op.name, kwargs=kwargs, flops=flops),)


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
    """A chunk's attention. call: its arguments by name; results: of the op, by number."""

    kernel: str
    call: Mapping[str, Arg]
    results: Mapping[int, str]


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
        """forward: the name of the op that it is of. Of keys and values that are not in chunks, gradients are
        the partial sums of chunks."""
        made: list[tuple[str, str, str]] = []
        for k, one in enumerate(self.forwards[forward]):
            target = backward_of(one.kernel)
            results = dict(zip(("out", "logsumexp"), one.results.values(), strict=False))
            draws = [Ref(one.results[at]) for at in DRAWS[one.kernel]]
            given = {
                **one.call,
                **{name: Ref(value) for name, value in results.items()},
                **dict(zip(("philox_seed", "philox_offset"), draws, strict=False)),
                **dict.fromkeys(("grad_out", "grad_out_"), _gradient(calls[k])),
                "max_q": self._rows(one.call["query"]),
                "max_k": self._rows(one.call["key"]),
                "cum_seq_q": None,
                "cum_seq_k": None,
                "grad_input_mask": (True, True, True, False),
            }
            name = self._call(op, target, given)
            parts = [self.out.emit(GETITEM, Ref(name), n, name=f"{op.name}_{n}") for n in range(3)]
            made.append((parts[0], parts[1], parts[2]))
        of_keys = [self._sums([of[n] for of in made], [one["key"] for one in calls]) for n in (1, 2)]
        return [{0: made[k][0], 1: of_keys[0][k], 2: of_keys[1][k]} for k in range(len(calls))]

    def _forward(self, op: Op, calls: Sequence[Mapping[str, Arg]], k: int) -> Attended:
        kernel, call = op.args[0], dict(calls[k])
        causal = bool(call["is_causal"])
        rows = [self._rows(one["query"]) for one in calls]
        start, end = sum(rows[:k]), sum(rows[: k + 1])
        for what in ("key", "value"):
            call[what] = Ref(self._seen([one[what].name for one in calls], k, end, causal))
        if causal and start:
            if kernel == CUDNN:
                kernel = FLASH
            if kernel in (ON_CPU, EFFICIENT):
                mask = "attn_mask" if kernel == ON_CPU else "attn_bias"
                call |= {"is_causal": False, mask: Ref(self._hidden(kernel, call, start, end))}
        if kernel == FLASH:
            call["return_debug_mask"] = False
        made = self._call(op, kernel, call)
        wanted = (0, 1, *DRAWS[kernel])
        results = {at: self.out.emit(GETITEM, Ref(made), at, name=f"{made}_{at}") for at in wanted}
        return Attended(kernel, call, results)

    def _rows(self, x: Arg) -> int:
        return self.out.specs[x.name].shape[SEQUENCE]

    def _call(self, op: Op, target: str, call: Mapping[str, Arg]) -> str:
        function = overload(target)
        assert function is not None
        args, kwargs = positional(function, call)
        flops = op.flops * self._rows(call["query"]) * self._rows(call["key"])
        return self.out.emit(target, *args, name=op.name, kwargs=kwargs, flops=flops)

    def _seen(self, parts: Sequence[str], k: int, end: int, causal: bool) -> str:
        """Keys, or values, as far as a chunk sees them."""
        if len(set(parts)) > 1:
            return self.join(tuple(parts[: k + 1] if causal else parts), SEQUENCE)
        if not causal or end == self.out.specs[parts[0]].shape[SEQUENCE]:
            return parts[0]
        return self.out.emit("aten.slice.Tensor", Ref(parts[0]), SEQUENCE, 0, end, name=f"{parts[0]}_seen")

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

    def _sums(self, parts: Sequence[str], keys: Sequence[Ref]) -> list[str]:
        """Gradients of keys or values, of each chunk as far as it sees them: each chunk's own, or partial
        sums as long as all keys."""
        lengths = [self._rows(Ref(part)) for part in parts]
        if len(set(keys)) == 1:
            return [self._padded(part, self._rows(keys[0])) for part in parts]
        result, start = [], 0
        for key in keys:
            end = start + self._rows(key)
            own = [self._part(part, start, end) for part, n in zip(parts, lengths, strict=True) if n >= end]
            result.append(total(self.out, own))
            start = end
        return result

    def _part(self, x: str, start: int, end: int) -> str:
        if (start, end) == (0, self.out.specs[x].shape[SEQUENCE]):
            return x
        return self.out.emit("aten.slice.Tensor", Ref(x), SEQUENCE, start, end, name=f"{x}_part")

    def _padded(self, x: str, length: int) -> str:
        shape = self.out.specs[x].shape
        if shape[SEQUENCE] == length:
            return x
        full = (*shape[:SEQUENCE], length, *shape[SEQUENCE + 1 :])
        args = (full, SEQUENCE, 0, shape[SEQUENCE], 1)
        return self.out.emit("aten.slice_backward.default", Ref(x), *args, name=f"{x}_padded")


def _gradient(call: Mapping[str, Arg]) -> Arg:
    """Kernels call it by two names."""
    return call["grad_out"] if "grad_out" in call else call["grad_out_"]


def total(out: Emitter, partials: Sequence[str], largest: bool = False) -> str:
    """The sum of values, or of each element the largest."""
    result, *rest = partials
    for other in rest:
        target = "aten.maximum.default" if largest else "aten.add.Tensor"
        result = out.emit(target, Ref(result), Ref(other), name=f"{result}_sum")
    return result
