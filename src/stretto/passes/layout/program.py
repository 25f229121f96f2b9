"""A step as layout passes read and write it: ops in order, each with its origin, and what is needed of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.ir.flow import is_external
from stretto.ir.program import Op, TensorSpec
from stretto.passes.layout.op_groups import SAME_DATA
from stretto.passes.rewrite import with_uses


class Origin(NamedTuple):
    """segment: of the forward's execution, None for gradient reductions; backward: whether it is of that."""

    segment: int | None
    backward: bool


@dataclass(frozen=True, slots=True)
class StepProgram:
    """ops: with their origins. given: what no op makes -> spec. roots: what is needed -> its value:
    "loss", "grad/<parameter>", "update/<buffer>", "seen/<number>". ties: parameter -> the first name of its
    tensor."""

    ops: tuple[tuple[Op, Origin], ...]
    given: Mapping[str, TensorSpec]
    roots: Mapping[str, str]
    ties: Mapping[str, str]


def with_equal_views_once(program: StepProgram) -> StepProgram:
    """Views of one value that are equal become one, which is gathered once for all that read it: those of
    modules side by side, so that no stage sends one to another, and not one of the forward for the backward,
    for which it would be kept."""
    first: dict[tuple[object, ...], str] = {}
    now: dict[str, str] = {}
    ops: list[tuple[Op, Origin]] = []
    for op, origin in program.ops:
        op = with_uses(op, lambda name: now.get(name, name))
        if op.target in SAME_DATA and not is_external(op.uses[0]):
            beside = op.module.rpartition(".")[0]
            key = (op.target, repr(op.args), repr(op.kwargs), origin.backward, beside)
            if key in first:
                now[op.name] = first[key]
                continue
            first[key] = op.name
        ops.append((op, origin))
    roots = {root: now.get(value, value) for root, value in program.roots.items()}
    return replace(program, ops=tuple(ops), roots=roots)
