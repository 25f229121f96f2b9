"""Rows that two axes keep are gathered and scattered over them in one order; other plans are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest

from stretto.ir.plan import Plan
from stretto.ir.program import Op
from stretto.verifying import plan_faults
from tests.parallelize.zero import ZeroCell

AXES = {"dp": "ep", "ep": "dp"}
"""Both have two ranks, so all shapes stay."""


@cache
def plan(zero: Literal[1, 3]) -> Plan:
    return ZeroCell(zero, ep=2).plan()


def swapped(given: Plan, kind: str) -> Plan:
    """A plan whose gathers of rows, or whose scatters, of what both axes keep are over the other axis."""
    there = [{op.name: op for op in stage.all_ops} for stage in given.job.stages]
    writers = [{name: op.name for op in ops.values() for name in op.writes} for ops in there]

    def start_before(ops: dict[str, Op], written: dict[str, str], op: Op) -> Op | None:
        """The communication whose result this one takes on, unless something is computed between."""
        for name in op.uses:
            of = ops.get(name) or ops.get(written.get(name, ""))
            if of is not None and of.name != op.name:
                return of if of.kind is not None else start_before(ops, written, of)
        return None

    pairs = [
        {first.name, op.name}
        for ops, written in zip(there, writers, strict=True)
        for op in ops.values()
        if op.kind is not None and op.kind.name == kind and (first := start_before(ops, written, op))
        if first.kind is op.kind and {first.lane, op.lane} == {*AXES}
    ]
    assert pairs
    both = set().union(*pairs)

    def changed(op: Op) -> Op:
        if op.name not in both:
            return op
        return replace(op, args=tuple(AXES.get(a, a) if isinstance(a, str) else a for a in op.args))

    stages = tuple(
        replace(stage, ops={phase: tuple(map(changed, ops)) for phase, ops in stage.ops.items()})
        for stage in given.job.stages
    )
    return replace(given, job=replace(given.job, stages=stages))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("all_gather", r"gathers over ep what is in parts over ep, dp"),
        ("reduce_scatter", r"is in parts over dp, ep"),
    ],
)
def test_another_order_of_axes_is_refused(zero: Literal[1, 3], kind: str, said: str) -> None:
    given = plan(zero)
    assert plan_faults(given) == []
    faults = [str(fault) for fault in plan_faults(swapped(given, kind))]
    assert any(said in fault for fault in faults), faults[:3]
    assert all("in parts over" in fault for fault in faults), faults
