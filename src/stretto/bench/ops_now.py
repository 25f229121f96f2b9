"""What ops take while systems are being timed, and plans predicted and bounded again with that.

A machine that is shared with others has another speed every minute. Ops are measured once before a plan is
made; a step that is timed ten minutes later is held against them here:

    1. Between the timed steps all ranks measure the ops of their stages together, and the rounds of all
       visits count alike (`cost.profile`).
    2. Afterwards the plans get these times for what computes, and how far ranks are apart, and are predicted
       anew. Their orders stay, and so do the costs of communication.

May touch plans and costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from stretto.cost.measured import agreed_ops
from stretto.cost.profile import ROUNDS, Profile, profile
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT
from stretto.simulate import predict

CPU = torch.device("cpu")


class OpsNow:
    """The visits of one rank; every rank makes one for the same plan, and calls the same methods."""

    def __init__(self, plan: Plan) -> None:
        mesh = Mesh((("pp", plan.ranks), *plan.job.axes))
        place = mesh.coordinates(dist.get_rank())["pp"] if dist.is_initialized() else 0
        self._job = plan.job
        self._stages = [stage.index for stage in plan.job.stages if plan.rank_of(stage.index) == place]
        self._found: Profile | None = None

    def visit(self, least_rounds: int = ROUNDS) -> None:
        """Step 1, once; least_rounds as in `profile`."""
        if dist.is_initialized():
            dist.barrier()
        self._found = profile(self._job, CPU, self._stages, self._found, least_rounds)

    def agreed(self) -> tuple[Mapping[tuple[int, str], float], float]:
        """(microseconds by (stage, op), skew), equal on all ranks; after at least one visit."""
        assert self._found is not None, "no visit yet"
        return agreed_ops(self._found) if dist.is_initialized() else (self._found.op_us, 0.0)


def with_ops(plan: Plan, op_us: Mapping[tuple[int, str], float], skew: float) -> Plan:
    """Step 2: the plan as it is, with these times of its computing ops, and predicted again."""
    calls = {
        (stage.index, op.name)
        for stage in plan.job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.collective is not None or op.target == WAIT
    }
    times = {key: us if key in calls else op_us[key] for key, us in plan.costs.op_us.items()}
    made = replace(plan, costs=replace(plan.costs, op_us=times, skew=skew))
    return replace(made, prediction=predict(made))
