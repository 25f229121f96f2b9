"""Attention whose queries are cut over an axis: one op of a member's own queries, until `context_steps`.

Of members of an axis of time, which are chunks of the queries:

    1. The op stays one, "layout." before the kernel's target. Its queries are those of all chunks, one chunk
       behind another, and `over` says how many each has. What it makes is cut again.
    2. `context_steps` gives each chunk a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stretto.errors import CaptureError
from stretto.ir.dims import operands
from stretto.ir.program import GETITEM, Op, Ref
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.emit import Emitter, lse_of
from stretto.passes.layout.kernels import BACKWARDS, CUDNN, KERNELS, OVER, arguments, heads_fit, kernel_of
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, fits, sharded
from stretto.passes.layout.program import StepProgram
from stretto.passes.layout.rules import Choice, OpGiven, Rule, as_kernel

ROWS = 2
"""The dim of the sequence in queries, keys and values (batch, heads, sequence, features)."""

LENGTHS = 4
"""Where `over` has the rows of chunks."""

ALONE = ("", 1, "", False, ())
"""`over`, where no other rank has keys."""


def check_draws(ops: Iterable[Op], what: str) -> None:
    """Raises CaptureError for a kernel that drops, which draws for a chunk what it does not draw for all."""
    for op in ops:
        if as_kernel(op).target in KERNELS and (p := arguments(op)["dropout_p"]):
            raise CaptureError(
                f"attention drops with p = {p}, and its kernel on CUDA draws for each chunk of the sequence "
                f"by itself, not what it draws in the uncut model: give attention no dropout, or leave "
                f"{what} out"
            )


def uncut(ahead: Ahead) -> frozenset[str]:
    """Attention, forward and backward, of which no member can compute the rows of its own queries: causal for
    other keys than the queries' own, or with a mask that has a gradient."""
    result: set[str] = set()
    for op in ahead.made.values():
        kernel = as_kernel(op).target
        if kernel not in KERNELS and kernel not in BACKWARDS:
            continue
        given = arguments(op)
        queries, keys = (ahead.spec(given[what].name) for what in ("query", "key"))
        assert queries is not None
        assert keys is not None
        masked = given.get(KERNELS[kernel_of(op)].mask) is not None
        unlike = masked or queries.shape[ROWS] != keys.shape[ROWS]
        gradient = kernel in BACKWARDS and any(spec is not None for spec in op.outputs[3:])
        if (given["is_causal"] and unlike) or gradient:
            made = ahead.made[given["logsumexp"].name] if kernel in BACKWARDS else None
            result |= {op.name} if made is None else {op.name, made.args[0].name}
    return frozenset(result)


def with_plain_lse(program: StepProgram, besides: frozenset[str] = frozenset()) -> StepProgram:
    """Attention keeps a number for each row, whatever its kernel pads. besides: which does not."""
    plain = (op for op, _ in program.ops if op.target in KERNELS and op.name not in besides)
    lse = {op.name: lse_of(op.outputs) for op in plain}

    def changed(op: Op) -> Op:
        if op.name in lse:
            return replace(op, outputs=(op.outputs[0], lse[op.name], *op.outputs[2:]))
        if op.target == GETITEM and op.args[1] == 1 and op.args[0].name in lse:
            return replace(op, outputs=(lse[op.args[0].name],))
        return op

    return replace(program, ops=tuple((changed(op), origin) for op, origin in program.ops))


def placed(
    op: Op, given: OpGiven, rows: AxisPlacement, keys: AxisPlacement, mask: AxisPlacement
) -> tuple[AxisPlacement, ...] | None:
    """Placements of operands. rows: of queries, and of all that has as many. None where they do not fit."""
    first = 1 if op.target in BACKWARDS else 0
    hidden = arguments(op).get(KERNELS[kernel_of(op)].mask)
    result = tuple(
        keys
        if k in (first + 1, first + 2)
        else mask
        if hidden is not None and name == hidden.name
        else rows
        if len(spec.shape) > ROWS
        else REPLICATED
        for k, (name, spec) in enumerate(zip(operands(op), given.specs, strict=True))
    )
    fitting = (fits(at, spec.shape, given.size) for at, spec in zip(result, given.specs, strict=True))
    return result if all(fitting) else None


def results_of(op: Op, rows: AxisPlacement, keys: AxisPlacement) -> tuple[AxisPlacement, ...]:
    """Placements of results."""
    known = (rows, keys, keys) if op.target in BACKWARDS else (rows, rows)
    return tuple(known[k] if k < len(known) else REPLICATED for k in range(len(op.outputs)))


def emit_shared(out: Emitter, op: Op, local: Sequence[str], over: tuple[Any, ...], flops: int) -> str:
    """The op of what a member has. over: (axis, size, kind, whether in two halves, rows of chunks)."""
    left = list(local)
    args = [Ref(left.pop(0)) if isinstance(arg, Ref) else arg for arg in op.args]
    kwargs = {key: Ref(left.pop(0)) if isinstance(arg, Ref) else arg for key, arg in op.kwargs}
    kwargs[OVER] = over
    return out.emit(f"layout.{op.target}", *args, name=op.name, kwargs=kwargs, flops=flops, random=op.random)


# --- chunks -------------------------------------------------------------------------------------------------


def _in_chunks(
    lengths: tuple[int, ...], blocks: int, whole: frozenset[str], op: Op, given: OpGiven
) -> Iterator[Choice]:
    """Step 1. What is in one block is so in order, and is cut again where it was put together; of several,
    keys are put together in order before."""
    first = 1 if op.target in BACKWARDS else 0
    queries, keys, values = given.specs[first : first + 3]
    rows = sharded(ROWS, blocks)
    unlike = arguments(op)["is_causal"] and kernel_of(op) == CUDNN and not _has_later(queries, keys, values)
    if given.placements[first] != rows or op.name in whole or unlike:
        return
    over = (*dict(op.kwargs).get(OVER, ALONE)[:LENGTHS], lengths)
    same = queries.shape[ROWS] == keys.shape[ROWS]
    for of_keys in (REPLICATED, rows) if blocks == 1 else (REPLICATED,):
        inputs = placed(op, given, rows, of_keys, REPLICATED)
        made = rows if blocks > 1 and same else of_keys
        if inputs is not None:
            emit = partial(_emit_chunks, over, inputs, results_of(op, sharded(ROWS), made))
            yield Choice(inputs, results_of(op, rows, made), emit)


def _emit_chunks(
    over: tuple[Any, ...],
    inputs: Sequence[AxisPlacement],
    results: Sequence[AxisPlacement],
    out: Emitter,
    op: Op,
    local: Sequence[str],
) -> Sequence[str]:
    """results: how chunks are cut from what the op makes."""

    def joined(x: str, at: AxisPlacement) -> str:
        return out.converted(x, sharded(at.dim), REPLICATED, ()) if at.is_sharded else x

    whole = emit_shared(out, op, list(map(joined, local, inputs)), over, op.flops)
    made = []
    for k, (spec, at) in enumerate(zip(op.outputs, results, strict=True)):
        one = "" if spec is None else out.emit(GETITEM, Ref(whole), k, name=f"{op.name}_{k}")
        made.append(out.converted(one, REPLICATED, at, ()) if one and at.is_sharded else one)
    return made


def _has_later(*specs: Any) -> bool:
    """Whether flash attention, which later chunks have, takes what cuDNN's does."""
    sizes = {spec.shape[-1] for spec in specs}
    return len(sizes) == 1 and heads_fit(max(sizes))


def rules_of_chunks(lengths: Sequence[int], blocks: int, whole: frozenset[str]) -> dict[str, Rule]:
    """lengths: of chunks of a rank's queries; blocks: in which these are; whole: what stays so."""
    rule = partial(_in_chunks, tuple(lengths), blocks, whole)
    return dict.fromkeys((*KERNELS, *BACKWARDS), rule)
