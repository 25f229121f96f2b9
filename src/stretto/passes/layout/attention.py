"""Attention whose queries are cut over an axis: one op of a member's own queries, until `context_steps`.

1. Where such an axis comes, all attention is such an op: "layout." before the kernel's target, with the
   keyword `over`, of one rank and one chunk. Of each row it keeps a number, whatever its kernel pads.
2. A rule: members of an axis of time are chunks of the queries. The op stays one, of the queries of all
   chunks, one chunk behind another; `over` says how many each has. What it makes is cut again.
3. `context_steps` gives each chunk a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stretto.errors import CaptureError
from stretto.ir.dims import operands
from stretto.ir.program import GETITEM, Op, Ref
from stretto.passes.layout.emit import Emitter, lse_of
from stretto.passes.layout.kernels import (
    BACKWARDS,
    CUDNN,
    KERNELS,
    OVER,
    SHARED_OP,
    arguments,
    heads_fit,
    kernel_of,
    mask_of,
)
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, fits, sharded
from stretto.passes.layout.program import StepProgram
from stretto.passes.layout.rules import Choice, OpGiven, Rule, emit_op, full

ROWS = 2
"""The dim of the sequence in queries, keys and values (batch, heads, sequence, features)."""

BEHIND = sharded(ROWS, 0)
"""Chunks one behind another, whatever blocks each has."""

ALONE = ("", 1, "", False, (), ())
"""`over` of one rank and one chunk: (axis, size, kind, whether in two halves, of each step which halves of
queries meet which of keys, rows of chunks)."""


def shared(program: StepProgram) -> StepProgram:
    """Step 1. What is so already stays."""
    kept = {op.name: lse_of(op.outputs) for op, _ in program.ops if op.target in KERNELS}

    def changed(op: Op) -> Op:
        if op.target in KERNELS or op.target in BACKWARDS:
            op = replace(with_over(op, ALONE), target=f"layout.{op.target}")
        if op.name in kept:
            return replace(op, outputs=(op.outputs[0], kept[op.name], *op.outputs[2:]))
        if op.target == GETITEM and op.args[1] == 1 and op.args[0].name in kept:
            return replace(op, outputs=(kept[op.args[0].name],))
        return op

    return replace(program, ops=tuple((changed(op), origin) for op, origin in program.ops))


def with_over(op: Op, over: tuple[Any, ...]) -> Op:
    return replace(op, kwargs=(*(one for one in op.kwargs if one[0] != OVER), (OVER, over)))


def first_of(op: Op) -> int:
    """Which operand queries are."""
    return 1 if op.target.removeprefix("layout.") in BACKWARDS else 0


def placed(
    op: Op, given: OpGiven, rows: AxisPlacement, keys: AxisPlacement, mask: AxisPlacement
) -> tuple[AxisPlacement, ...] | None:
    """Placements of operands. rows: of queries, and of all that has as many. None where they do not fit."""
    first, hidden = first_of(op), mask_of(op)
    result = tuple(
        keys
        if k in (first + 1, first + 2)
        else mask
        if name == hidden
        else rows
        if len(spec.shape) > ROWS
        else REPLICATED
        for k, (name, spec) in enumerate(zip(operands(op), given.specs, strict=True))
    )
    fitting = (fits(at, spec.shape, given.size) for at, spec in zip(result, given.specs, strict=True))
    return result if all(fitting) else None


def results_of(op: Op, rows: AxisPlacement, keys: AxisPlacement) -> tuple[AxisPlacement, ...]:
    """Placements of results."""
    known = (rows, keys, keys) if first_of(op) else (rows, rows)
    return (*known, *(REPLICATED for _ in op.outputs[len(known) :]))


# --- chunks -------------------------------------------------------------------------------------------------


def check_draws(program: StepProgram) -> None:
    """Raises CaptureError for a kernel that drops, which draws for a chunk what it does not draw for all."""
    for op, _ in program.ops:
        if op.target.startswith(SHARED_OP) and (p := arguments(op)["dropout_p"]):
            raise CaptureError(
                f"attention drops with p = {p}, and its kernel on CUDA draws for each chunk of the sequence "
                "by itself, not what it draws in the uncut model: give attention no dropout, or leave "
                "ampipe_degree out"
            )


def _in_chunks(lengths: tuple[int, ...], blocks: int, op: Op, given: OpGiven) -> Iterator[Choice]:
    """Step 2. Keys that are in one block are cut again where they were put together; of several, they are put
    together in order before."""
    first, known = first_of(op), arguments(op)
    queries, keys, values = given.specs[first : first + 3]
    rows, same = sharded(ROWS, blocks), queries.shape[ROWS] == keys.shape[ROWS]
    sizes = {spec.shape[-1] for spec in (queries, keys, values)}
    # Later chunks have flash attention in the place of cuDNN's.
    has_later = kernel_of(op) != CUDNN or (len(sizes) == 1 and heads_fit(max(sizes)))
    is_cut = given.placements[first] == rows
    if not is_cut or (known["is_causal"] and not (same and has_later and mask_of(op) is None)):
        return
    over = (*dict(op.kwargs)[OVER][:-1], lengths)
    for of_keys in (REPLICATED, rows) if blocks == 1 else (REPLICATED,):
        inputs = placed(op, given, rows, of_keys, REPLICATED)
        made = rows if blocks > 1 and same else of_keys
        if inputs is not None:
            cut = tuple(
                BEHIND if at == rows and k not in (first + 1, first + 2) else at
                for k, at in enumerate(inputs)
            )
            emit = partial(_emit_chunks, over, Choice(cut, results_of(op, BEHIND, made)))
            yield Choice(inputs, results_of(op, rows, made), emit)


def _emit_chunks(
    over: tuple[Any, ...], cut: Choice, out: Emitter, op: Op, local: Sequence[str]
) -> Sequence[str]:
    """cut: of what chunks are made, and how they are cut from what the op makes."""
    joined = [
        out.converted(x, at, REPLICATED, ()) if at.is_sharded else x
        for x, at in zip(local, cut.inputs, strict=True)
    ]
    (attended,) = emit_op(full(op), 1)(out, with_over(op, over), joined)
    made = []
    for k, (spec, at) in enumerate(zip(op.outputs, cut.outputs, strict=True)):
        one = "" if spec is None else out.emit(GETITEM, Ref(attended), k, name=f"{op.name}_{k}")
        made.append(out.converted(one, REPLICATED, at, ()) if one and at.is_sharded else one)
    return made


def rules_of_chunks(lengths: Sequence[int], blocks: int) -> dict[str, Rule]:
    """lengths: of chunks of a rank's queries; blocks: in which these are."""
    return dict.fromkeys((*KERNELS, *BACKWARDS), partial(_in_chunks, tuple(lengths), blocks))
