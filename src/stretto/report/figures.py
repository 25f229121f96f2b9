"""What a report says of a plan beside its timelines, in a few numbers: kept in a run's folder, so that a run
can be reported when its plan file is of another version.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.files.typed_file import TypedFile
from stretto.ir.costs import Prediction
from stretto.ir.plan import Plan
from stretto.ir.work import Work, work_of


@dataclass(frozen=True, slots=True)
class Figures:
    """name: of the job. where: on what it runs, in words. costs: where they are from. world: ranks of the
    run. prediction: None for a plan without one. work: of a rank in a step."""

    name: str
    schedule: str
    stages: int
    where: str
    microbatches: int
    costs: str
    world: int
    prediction: Prediction | None
    work: Work

    @staticmethod
    def of(plan: Plan) -> Figures:
        """Those of a plan."""
        return Figures(
            plan.job.name,
            plan.schedule.family,
            plan.schedule.stages,
            plan.where,
            plan.job.microbatches,
            plan.costs.source,
            plan.world,
            plan.prediction,
            work_of(plan),
        )


FIGURES = TypedFile(Figures, "stretto figures", 2, "figures", "A training run leaves it")
