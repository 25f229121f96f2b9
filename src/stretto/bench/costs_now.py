"""What ops and communication cost while systems are being timed, and plans predicted again with that.

A machine that is shared with others has another speed every minute. Costs are measured once before a plan is
made; a step that is timed ten minutes later is held against them here:

    1. Before the timed steps all ranks measure the ops of their stages together (`bench.visits`).
    2. After the last step they measure messages and collectives once more; the mean of both times counts
       (`bench.mean`).
    3. The plans get these costs, and are predicted anew. Their orders stay.

May touch plans and costs.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from stretto.bench.mean import mean_costs
from stretto.bench.visits import Visits
from stretto.ir.costs import Costs
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT
from stretto.measure.measured import Communication, measure_communication
from stretto.simulate import predict

ROUNDS = 3
"""Of each visit. On machines that others use one differs from the next by a tenth."""


class CostsNow:
    """What one rank finds; every rank makes one for the same plan, and calls the same methods. stages: the
    rank's own."""

    def __init__(self, plan: Plan) -> None:
        mesh = Mesh((("pp", plan.ranks), *plan.job.axes))
        place = mesh.coordinates(dist.get_rank())["pp"] if dist.is_initialized() else 0
        self.stages = [stage.index for stage in plan.job.stages if plan.rank_of(stage.index) == place]
        self._plan = plan
        self._visits = Visits(plan.job, self.stages, ROUNDS)
        self._again: list[Communication] = []

    def visit(self) -> float:
        """Step 1, once; what a microbatch took in it on this rank, in microseconds."""
        return self._visits.visit()

    def measure_communication(self) -> None:
        """Step 2; nothing for a rank alone. After at least one visit."""
        op_us = self._visits.found.op_us
        if dist.is_initialized():
            self._again.append(measure_communication(self._plan.job, self._plan.schedule, op_us))

    def agreed(self) -> Costs:
        """What all of it says together, equal on all ranks; after at least one visit."""
        job, known = self._plan.job, self._plan.costs
        now = self._visits.agreed()
        calls = {
            (stage.index, op.name)
            for stage in job.stages
            for ops in stage.ops.values()
            for op in ops
            if op.collective is not None or op.target == WAIT
        }
        times = {key: us if key in calls else now.op_us[key] for key, us in known.op_us.items()}
        found = [now.on(replace(known, op_us=times))]
        found += [again.costs(job, now, known.source) for again in self._again]
        return mean_costs(found)


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """Step 3: the plan as it is, with these costs, and predicted again."""
    made = replace(plan, costs=costs)
    return replace(made, prediction=predict(made))
