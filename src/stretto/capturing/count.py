"""How many a microbatch's loss counts, as a program of its own: read off the ops of a traced step.

1. The ops from which the count follows are taken out of the step. They read the microbatch alone, so every
   rank computes them for all microbatches of the whole batch before the step, and no count is communicated.
2. What else a count could read (a parameter, a buffer, a draw, other ranks) is refused.
3. Of a loss that is a mean, what it is divided by: the labels that count in a cross-entropy, or a number that
   the code makes from the microbatch. It serves a note to the user only; None where the ops do not tell.

Touches `stretto.ir` and traced ops only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from stretto.capturing.expand import TracedOp
from stretto.errors import CaptureError
from stretto.ir.flow import is_external
from stretto.ir.op_names import LIKELIHOODS
from stretto.ir.program import CHUNK, GETITEM, INDEX, STARTS, WAIT, Count, Op, Ref, TensorSpec

MEAN = 1
"""PyTorch's number of the reduction."""
MEANS = ("aten.mean.default", "aten.mean.dim")
DIVISION = "aten.div.Tensor"


def count_of(
    ops: Sequence[TracedOp], loss: str, count: str | float | None, whole: Collection[str]
) -> Count | None:
    """Steps 1 and 2. count: the value's name, the number, or None for a loss that is a mean. whole: leaves of
    the batch that every microbatch is given whole.

    Raises CaptureError for a count that does not follow from the microbatch, and for the count of a mean.
    """
    if count is None:
        return None
    by_name = {traced.op.name: traced.op for traced in ops}
    if count != 1.0 and _is_mean(by_name, loss):
        raise CaptureError(
            "loss(model, microbatch) returned (mean, count), and the first of the two is to be a sum: take "
            'it with reduction="sum", or .sum() in the place of .mean(); or return the mean alone'
        )
    if not isinstance(count, str):
        return Count(count)
    if is_external(count):  # nothing was computed
        raise _of_another(count, whole)
    needed, read = _closure(by_name, count)
    strange = [op for op in needed if _communicates(op) or op.random]
    outside = [name for name in read if not name.startswith(("batch/", "const/"))]
    if outside or strange:
        raise _of_another(outside[0] if outside else "", whole)
    leaves = [name.removeprefix("batch/") for name in read if name.startswith("batch/")]
    if leaves and all(leaf in whole for leaf in leaves):
        raise _of_another(f"batch/{leaves[0]}", whole)
    return Count(count, tuple(needed))


def _of_another(name: str, whole: Collection[str]) -> CaptureError:
    kind, _, key = name.partition("/")
    start = "the count that loss(model, microbatch) returned beside its sum "
    if kind == "batch" and key in whole:
        return CaptureError(
            f"{start}is the same for all microbatches, by batch leaf {key!r}, which is marked stretto.whole: "
            "counts of microbatches are summed, so count the microbatch's own, as (labels != -100).sum()"
        )
    what = {"param": f"depends on parameter {key!r}", "buffer": f"reads buffer {key!r}"}.get(
        kind, "is not made from the microbatch alone"
    )
    return CaptureError(
        f"{start}{what}: it is known before the step begins, from plain tensors of the batch; what it needs "
        "beside the microbatch goes into the batch, marked stretto.whole"
    )


def mean_over(
    ops: Sequence[TracedOp], loss: str, whole: Collection[str], given: Mapping[str, TensorSpec]
) -> Count | None:
    """Step 3. given: specs of what comes from outside the step."""
    by_name = {traced.op.name: traced.op for traced in ops}
    needed, _ = _closure(by_name, loss)
    for op in reversed(needed):
        found = None
        if op.target in LIKELIHOODS and op.args[3] == MEAN:
            found = _labels(by_name, op, given)
        elif op.target == DIVISION and _is_number(op) and isinstance(op.args[1], Ref):
            found = _divisor(by_name, *(arg.name for arg in op.args if isinstance(arg, Ref)))
        if found is not None and any(
            name.startswith("batch/") and name.removeprefix("batch/") not in whole
            for counting in found.ops
            for name in counting.uses
        ):
            return found
    return None


def _labels(ops: Mapping[str, Op], loss: Op, given: Mapping[str, TensorSpec]) -> Count | None:
    """How many targets a likelihood does not ignore."""
    target = loss.args[1].name
    needed, read = _closure(ops, target)
    if not all(name.startswith(("batch/", "const/")) for name in read) or any(map(_communicates, needed)):
        return None
    spec = given[target] if target in given else ops[target].outputs[0]
    assert spec is not None
    kept = Op("kept", "aten.ne.Scalar", (Ref(target), loss.args[4]), (), (replace(spec, dtype="bool"),))
    total = Op("labels", "aten.sum.default", (Ref("kept"),), (), (TensorSpec((), "int64"),))
    return Count("labels", (*needed, kept, total))


def _divisor(ops: Mapping[str, Op], dividend: str, divisor: str) -> Count | None:
    """A number that follows from the microbatch, by which one is divided that does not."""
    if is_external(divisor):
        return None
    needed, read = _closure(ops, divisor)
    _, above = _closure(ops, dividend)
    plain = all(name.startswith(("batch/", "const/")) for name in read)
    if not plain or any(map(_communicates, needed)) or not any(name.startswith("param/") for name in above):
        return None
    return Count(divisor, tuple(needed)) if _is_number(ops[divisor]) else None


def _closure(ops: Mapping[str, Op], value: str) -> tuple[list[Op], list[str]]:
    """The ops from which a value follows, in order, and the values from outside the step that they read."""
    found: set[str] = set()
    read: dict[str, None] = {}
    left = [value]
    while left:
        name = left.pop()
        if is_external(name):
            read.setdefault(name)
        elif name not in found:
            found.add(name)
            left.extend(ops[name].uses)
    # The module is for people who read a stage's program.
    return [replace(op, module="", flops=0) for name, op in ops.items() if name in found], list(read)


def _is_mean(ops: Mapping[str, Op], value: str) -> bool:
    """Whether a value is the mean that an op took, as it is."""
    op = ops.get(value)
    if op is None:
        return False
    if op.target in MEANS or (op.target in LIKELIHOODS and op.args[3] == MEAN):
        return True
    passed = op.target == GETITEM or op.alias is not None or op.target == "aten._to_copy.default"
    return passed and _is_mean(ops, op.uses[0])


def _is_number(op: Op) -> bool:
    made = op.outputs[0] if len(op.outputs) == 1 else None
    return made is not None and made.numel == 1


def _communicates(op: Op) -> bool:
    return op.target in (*STARTS, WAIT, INDEX, CHUNK)
