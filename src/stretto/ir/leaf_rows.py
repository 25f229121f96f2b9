"""Which leaves of a batch name rows of an embedding, and of how many: what made-up tokens may be."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.ir.action import Phase
from stretto.ir.program import Job, Op, Ref

EMBEDDING = "aten.embedding.default"

OTHER_NUMBERS = ("cumsum", "cumprod", "add", "mul", "arange")
"""Ops after which an integer is no row of an embedding any more: positions are counted from masks so."""


def rows_named(job: Job) -> dict[str, int]:
    """Leaf of the batch -> the rows of the smallest embedding that it picks from (on one rank), for leaves
    that pick from any."""
    shapes = {f"param/{p.name}": p.spec.shape for p in job.parameters}
    leaf_of: dict[str, str] = {f"batch/{name}": name for name, _ in job.batch}
    result: dict[str, int] = {}
    # A leaf is shifted and cut in the stage that picks, or its part arrives from an earlier one.
    for stage in job.stages:
        for op in stage.ops[Phase.F]:
            if op.target == EMBEDDING and len(op.args) > 1:
                weight, index = op.args[0], op.args[1]
                if isinstance(weight, Ref) and isinstance(index, Ref) and index.name in leaf_of:
                    rows = shapes.get(weight.name, (2,))[0]
                    leaf = leaf_of[index.name]
                    result[leaf] = min(result.get(leaf, rows), rows)
            elif _still_rows(op, leaf_of):
                leaf_of[op.name] = next(leaf_of[name] for name in op.uses if name in leaf_of)
    return result


def _still_rows(op: Op, leaf_of: Mapping[str, str]) -> bool:
    """Whether the op's result holds numbers of rows as one of its arguments does."""
    made = op.outputs[0] if len(op.outputs) == 1 else None
    if made is None or not made.dtype.startswith("int"):
        return False
    name = op.target.split(".")[1] if "." in op.target else op.target
    return name not in OTHER_NUMBERS and any(used in leaf_of for used in op.uses)
