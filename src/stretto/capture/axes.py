"""What tensor-parallel ranks hold of a traced step: which gradients are parts of a sum, and what has none.

Everything here is read off the ops (`stretto.ir.varying` says how); nothing is declared. A step whose loss,
buffers or gradients would be wrong is refused. Touches `stretto.ir` and traced ops only.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.capture.expand import TracedOp
from stretto.errors import CaptureError
from stretto.ir.program import GETITEM, Op, Shard, TensorSpec
from stretto.ir.varying import varying
from stretto.parallelize.tensor import AXIS

SUMS = ("aten.add.Tensor", "aten.cat.default", "aten.stack.default")
"""Ops that put gradients of several uses of one value together."""


def partial_axes(
    ops: list[TracedOp],
    parameters: Mapping[str, tuple[TensorSpec, str, str | None]],
    buffers: Mapping[str, tuple[TensorSpec, str | None]],
    shards: Mapping[str, Shard],
    loss: str,
) -> dict[str, tuple[str, ...]]:
    """Parameter -> axes along which its gradient is a part of the sum.

    Raises CaptureError where a gradient is partly a part and partly the whole, or where the loss differs.
    """
    axis = AXIS
    differs = varying((t.op for t in ops), {f"param/{name}" for name in shards}, axis)
    if loss in differs:
        raise CaptureError(
            f"the loss differs between {axis} ranks: the loss function uses what only a part of the model "
            "made. Name the module whose output it takes 'colwise_gather_output', or leave it out of tp_plan"
        )
    by_name = {traced.op.name: traced.op for traced in ops}
    for name, (_, update) in buffers.items():
        if update in differs:
            raise CaptureError(
                f"buffer {name!r} would get other values on every {axis} rank: what is written to it was "
                "made from a part. Keep what writes it out of tp_plan, and do without sequence_parallel"
            )
    found: dict[str, tuple[str, ...]] = {}
    for name, (_, _, value) in parameters.items():
        if value is None or value not in differs or (name in shards and shards[name].copies == 1):
            continue
        whole = [leaf for leaf in _addends(value, by_name) if leaf not in differs]
        if whole:
            raise CaptureError(
                f"parameter {name!r} is used in parts by {axis} ranks in one place, and wholly in another: "
                "its gradient cannot be summed. Give all modules that use it one style in tp_plan"
            )
        found[name] = (axis,)
    _refuse_mixed(ops, by_name, differs)
    return found


def _refuse_mixed(ops: list[TracedOp], by_name: Mapping[str, Op], differs: set[str]) -> None:
    """Raises CaptureError where a gradient is put together from a whole one and from a part of a sum: a value
    is used both wholly and, with no copy or gather between, beside what is spread."""
    gradients = {"tangent"}
    for traced in ops:
        op = traced.op
        if gradients.isdisjoint(op.uses):
            continue
        gradients.add(op.name)
        if op.target not in SUMS:
            continue
        addends = [name for name in op.uses if name in gradients]
        parts = [name for name in addends if name in differs]
        if parts and len(parts) < len(addends):
            module = next((by_name[p].module for p in parts if by_name[p].module), op.module)
            raise CaptureError(
                f"{module or 'the model'} uses a value that all {AXIS} ranks hold whole beside one "
                "that is spread over them, so its gradient is partly a part and partly the whole. Give the "
                "module that makes the one a style ('colwise'), or the other's 'colwise_gather_output'"
            )


def _addends(value: str, ops: Mapping[str, Op]) -> list[str]:
    """The values whose sum `value` is, through additions and views."""
    op = ops.get(value)
    if op is None:
        return [value]
    if op.target == "aten.add.Tensor" and not op.kwargs:
        return [leaf for name in op.uses for leaf in _addends(name, ops)]
    if op.alias is not None and len(op.uses) == 1 and op.target != GETITEM:
        return _addends(op.uses[0], ops)
    return [value]
