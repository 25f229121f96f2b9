"""What claims to be computed again is the very op of F that it names, on the very same values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Ref, Stage
from stretto.passes.recompute import repeat
from stretto.verifying import plan_faults
from tests.synthetic_comm import make_comm_costs, plan_with
from tests.verifying.comm_plans import comm_job
from tests.verifying.edits import Edit, op
from tests.verifying.plans import hand_schedule


def repeated() -> Plan:
    """One stage whose two multiplications, with their all-reduces, are done again in the backward."""
    job = comm_job(1, 2, (("tp", 2),), blocks=2)
    job = repeat(job, {0: [o.name for o in job.stages[0].ops[Phase.F] if o.name.startswith(("f", "y"))]})
    return plan_with(job, hand_schedule((0,), 2, "0F0 0B0 0F1 0B1"), make_comm_costs(job))


def test_repeated_ops_are_accepted() -> None:
    plan = repeated()
    again = [o.name for ops in plan.job.stages[0].ops.values() for o in ops if o.repeats]
    assert {"fm0.0_again", "fr0.0_again", "fr0.0_w_again", "fy0.0_again"} <= set(again)
    assert plan_faults(plan) == []


def constants(first: float, again: float) -> Edit:
    """A constant among the arguments of an op, and of what repeats it."""

    def edit(plan: Plan) -> Plan:
        plan = op(0, "fm0.0", args=(Ref("batch/x"), first))(plan)
        return op(0, "fm0.0_again", args=(Ref("batch/x"), again))(plan)

    return edit


def test_a_constant_that_is_no_number_is_itself() -> None:
    plan = constants(float("nan"), -float("nan"))(repeated())
    assert not [fault for fault in plan_faults(plan) if "repeats" in str(fault)]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (op(0, "fm0.0_again", repeats="gone"), "repeats gone, which stage 0 does not have in F"),
        (op(0, "fm0.0_again", repeats="d0"), "repeats d0, which stage 0 does not have in F"),
        (
            op(0, "fm0.0_again", repeats="fr0.0"),
            "repeats fr0.0, but is made_up.work.default instead of",
        ),
        (op(0, "fm0.0_again", repeats="fm0.1"), "repeats fm0.1, but is given other arguments"),
        (op(0, "fm0.0_again", random=True), "repeats fm0.0, but draws at random"),
        (op(0, "fm0.0_again", args=(Ref("batch/x"),)), "repeats fm0.0, but is given other arguments"),
        (constants(0.0, -0.0), "repeats fm0.0, but is given other arguments"),
        (op(0, "fm0.1", repeats="fm0.0"), "repeats fm0.0, but stands in F itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_repeats_something_else_is_refused(edit: Edit, what: str) -> None:
    faults = [str(fault) for fault in plan_faults(edit(repeated()))]
    assert any(what in fault and fault.startswith("rank 0, stage 0") for fault in faults), faults


def test_results_are_those_of_the_op_that_is_repeated() -> None:
    plan = repeated()
    stage = plan.job.stages[0]
    wider = {
        phase: tuple(
            replace(o, outputs=(replace(o.outputs[0], dtype="float64"),)) if o.name == "fy0.0_again" else o  # type: ignore[type-var]
            for o in ops
        )
        for phase, ops in stage.ops.items()
    }
    broken = replace(plan, job=replace(plan.job, stages=(Stage(0, wider),)))
    assert any("instead of float32[256,512]" in str(fault) for fault in plan_faults(broken))
