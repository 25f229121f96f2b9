"""What a bench keeps of a plan that it ran: a folder that `stretto report` reads, and `stretto simulate`.

    plan.json       with the costs of the steps themselves (`bench.costs_now`)
    planned.json    with the costs that it was made from
    measured.json   the step whose time is the median

Touches files only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.ir.plan import Plan
from stretto.ir.serialize import save_plan
from stretto.ir.timeline import Timeline
from stretto.report.jsonfile import save_json

Keep = Callable[[Plan, Plan, Sequence[Timeline]], None]
"""(as it was made, with the costs of its steps, its counted steps)"""


def keep_run(folder: Path, planned: Plan, plan: Plan, timelines: Sequence[Timeline]) -> None:
    """Write the folder, which is made if it is not there. timelines: of all counted steps, at least one."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(planned, folder / "planned.json")
    save_plan(plan, folder / "plan.json")
    by_time = sorted(timelines, key=lambda timeline: timeline.step_us)
    save_json(by_time[len(by_time) // 2], folder / "measured.json")
