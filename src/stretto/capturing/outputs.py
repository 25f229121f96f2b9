"""What a traced step gives besides gradients: how many its loss counts, and values that its code observes.

1. The ops from which the count follows become a program of their own. They read the microbatch alone, so
   every rank computes them for all microbatches before the step, and no count is communicated. A count
   that reads a parameter, a buffer, a draw or other ranks is refused.
2. Of a loss that is a mean, what it is divided by: the labels that count in a cross-entropy, or a number
   that the code makes from the microbatch. It serves a note to the user only; None where the ops do not
   show it.
3. Each `observe` (`stretto.backend.observe_adapter`) goes; its value stays needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from stretto.backend.observe_adapter import TARGET
from stretto.errors import CaptureError
from stretto.ir.flow import is_external
from stretto.ir.metrics import Metric
from stretto.ir.op_names import LIKELIHOODS
from stretto.ir.program import CHUNK, GETITEM, INDEX, STARTS, WAIT, Count, Op, Ref, TensorSpec
from stretto.passes.layout.program import Origin
from stretto.passes.rewrite import live

MEAN = 1
"""PyTorch's number of the reduction."""
MEANS = ("aten.mean.default", "aten.mean.dim")
DIVISION = "aten.div.Tensor"


def count_of(
    ops: Mapping[str, Op], loss: str, count: str | float | None, full: Collection[str]
) -> Count | None:
    """Step 1. ops: by name. count: the value's name, the number, or None for a loss that is a mean. full:
    leaves of the batch that every microbatch takes in full.

    Raises CaptureError for a count that does not follow from the microbatch, and for the count of a mean.
    """
    if count is None:
        return None
    if count != 1.0 and _is_mean(ops, loss):
        raise CaptureError(
            "loss(model, microbatch) returned (mean, count), and the first of the two is to be a sum: take "
            'it with reduction="sum", or .sum() in the place of .mean(); or return the mean alone'
        )
    if not isinstance(count, str):
        return Count(count)
    if is_external(count):  # nothing was computed
        raise _no_count(count, full)
    needed, read = _closure(ops, count)
    outside = [name for name in read if not name.startswith(("batch/", "const/"))]
    if outside or any(_communicates(op) or op.random for op in needed):
        raise _no_count(outside[0] if outside else "", full)
    leaves = [name for name in read if name.startswith("batch/")]
    if leaves and all(leaf.removeprefix("batch/") in full for leaf in leaves):
        raise _no_count(leaves[0], full)
    return Count(count, tuple(needed))


def _no_count(name: str, full: Collection[str]) -> CaptureError:
    """The refusal of a count that reads the value `name`, or ("") another thing than the microbatch."""
    kind, _, key = name.partition("/")
    start = "the count that loss(model, microbatch) returned besides its sum "
    if kind == "batch" and key in full:
        return CaptureError(
            f"{start}is the same for all microbatches, by batch leaf {key!r}, which is marked "
            "stretto.replicated: "
            "counts of microbatches are summed, so count the microbatch's own, as (labels != -100).sum()"
        )
    what = {"param": f"depends on parameter {key!r}", "buffer": f"reads buffer {key!r}"}.get(
        kind, "is not made from the microbatch alone"
    )
    return CaptureError(
        f"{start}{what}: it is known before the step begins, from plain tensors of the batch; what it needs "
        "besides the microbatch goes into the batch, marked stretto.replicated"
    )


def mean_over(
    ops: Mapping[str, Op], loss: str, full: Collection[str], given: Mapping[str, TensorSpec]
) -> Count | None:
    """Step 2. given: specs of what comes from outside the step."""
    needed, _ = _closure(ops, loss)
    for op in reversed(needed):
        result = None
        if op.target in LIKELIHOODS and op.args[3] == MEAN:
            result = _labels(ops, op, given)
        elif op.target == DIVISION and _is_number(op) and isinstance(op.args[1], Ref):
            result = _divisor(ops, *(arg.name for arg in op.args if isinstance(arg, Ref)))
        if result is not None and any(
            name.startswith("batch/") and name.removeprefix("batch/") not in full
            for counting in result.ops
            for name in counting.uses
        ):
            return result
    return None


def _labels(ops: Mapping[str, Op], loss: Op, given: Mapping[str, TensorSpec]) -> Count | None:
    target = loss.args[1].name
    needed, read = _closure(ops, target)
    if not _of_microbatch(needed, read):
        return None
    spec = given[target] if target in given else ops[target].outputs[0]
    assert spec is not None
    kept = Op("kept", "aten.ne.Scalar", (Ref(target), loss.args[4]), (), (replace(spec, dtype="bool"),))
    total = Op("labels", "aten.sum.default", (Ref("kept"),), (), (TensorSpec((), "int64"),))
    return Count("labels", (*needed, kept, total))


def _divisor(ops: Mapping[str, Op], dividend: str, divisor: str) -> Count | None:
    if is_external(divisor) or not _is_number(ops[divisor]):
        return None
    needed, read = _closure(ops, divisor)
    _, above = _closure(ops, dividend)
    trained = any(name.startswith("param/") for name in above)
    return Count(divisor, tuple(needed)) if trained and _of_microbatch(needed, read) else None


def _of_microbatch(needed: Sequence[Op], read: Sequence[str]) -> bool:
    return all(name.startswith(("batch/", "const/")) for name in read) and not any(map(_communicates, needed))


def _closure(ops: Mapping[str, Op], value: str) -> tuple[list[Op], list[str]]:
    needed = live(ops.values(), [value])
    read = dict.fromkeys(filter(is_external, (value, *(name for op in needed for name in op.uses))))
    # The module is for users who read a stage's program.
    return [replace(op, module="", flops=0) for op in needed], list(read)


def _is_mean(ops: Mapping[str, Op], value: str) -> bool:
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


def observed_of(
    ops: Iterable[tuple[Op, Origin]],
) -> tuple[tuple[tuple[Op, Origin], ...], tuple[Metric, ...]]:
    """Step 3: the other ops, and what is observed. Raises CaptureError for a value of the backward, and for
    one name with several shapes."""
    kept: list[tuple[Op, Origin]] = []
    seen: list[Metric] = []
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for op, origin in ops:
        if op.target != TARGET:
            kept.append((op, origin))
            continue
        value, name, joined = op.args[0].name, str(op.args[1]), op.args[2]
        where = f"{op.module or 'the model'} calls observe({name!r}, ...)"
        if origin.backward:
            raise CaptureError(f"{where} in the backward: observe what the forward makes")
        made = op.outputs[0]
        assert made is not None
        first = shapes.setdefault((op.module, name), made.shape)
        if first != made.shape:
            raise CaptureError(
                f"{where} of shape {list(made.shape)} after one of {list(first)}: give them two names"
            )
        seen.append(Metric(op.module, name, 0, value, joined))
    return tuple(kept), tuple(seen)


def with_partial(metric: Metric, axes: tuple[str, ...]) -> Metric:
    """A metric whose value is partial along axes. Raises CaptureError for the greatest of partial values,
    which is not the greatest of their sums."""
    if axes and metric.joined == "max":
        raise CaptureError(
            f"{metric.module or 'the model'} calls observe({metric.name!r}, ..., 'max') with a value that is "
            f"partial along {', '.join(axes)}, and the greatest partial value is no greatest sum: "
            "observe it joined by 'sum', or observe what is made of it where it is replicated"
        )
    return replace(metric, partial=axes)
