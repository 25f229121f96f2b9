"""What a race does with a plan that it ran: predict it again, and keep it for `stretto report`.

A machine that others use has another speed every minute. So costs are measured once more after the steps,
and the plan is predicted again with them; its order stays. A folder that is kept has

    plan.json       with the costs after its steps
    planned.json    with the costs that it was made from
    measured.json   the step whose time is the median
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.serialize import save_plan
from stretto.ir.timeline import Timeline
from stretto.report.jsonfile import save_json
from stretto.simulating import predict


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """The plan as it is, with these costs and what they predict."""
    made = replace(plan, costs=costs)
    return replace(made, prediction=predict(made))


def prediction_of(plan: Plan) -> Prediction:
    """What is predicted of a plan that was made with costs."""
    assert plan.prediction is not None
    return plan.prediction


def keep_run(folder: Path, planned: Plan, plan: Plan, timelines: Sequence[Timeline]) -> None:
    """Write the folder, which is made if it is not there. timelines: of all counted steps, at least one."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(planned, folder / "planned.json")
    save_plan(plan, folder / "plan.json")
    by_time = sorted(timelines, key=lambda timeline: timeline.step_us)
    save_json(by_time[len(by_time) // 2], folder / "measured.json")
