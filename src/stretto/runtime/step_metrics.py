"""What a loss function returns besides its loss, over all microbatches and ranks: a step returns it.

1. In the step, values of microbatches are added up on the device, in float64 (`runtime.observed`).
2. After it every rank has a vector of all metrics, in which its own are: those of its stages, and of values
   that several ranks have, the first one's. The vectors are added over all ranks: on the lane of the loss
   over pipeline ranks and copies of the data, then on the lane of each axis along which a stage is shared.
   Each rank does so after the step, in the one order of its lanes, and no host waits for it.
3. Means are over the microbatches of all copies; (total, count) become a quotient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.metrics import RETURNED, Metric
from stretto.ir.plan import LOSS, Plan
from stretto.ir.program import TensorSpec
from stretto.runtime.observed import metric_specs
from stretto.runtime.transport import Transport


class StepMetrics:
    """The metrics of one plan's steps; does nothing where there are none."""

    def __init__(
        self, plan: Plan, transport: Transport, parts: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """parts: name -> this rank's sums of the last step, where its stages have them."""
        self._transport, self._parts, self._device = transport, parts, device
        self._pieces = plan.job.pieces
        specs = metric_specs(plan)
        self._named: dict[str, tuple[Metric, TensorSpec]] = {
            one.name: (one, spec) for one, spec in specs if one.name.startswith(RETURNED)
        }
        at = plan.mesh.coordinates(transport.rank)
        data = {PIPELINE, *plan.job.data_axes}
        within = [axis for axis, size in plan.mesh.sizes if size > 1 and axis not in data]
        self._own = {
            name
            for name, (one, _) in self._named.items()
            if plan.rank_of(one.stage) == at[PIPELINE]
            and not any(at[axis] for axis in within if axis not in one.partial)
        }
        lanes = {one.name for one in plan.communicators}
        self._lanes = [lane for lane in (LOSS, *within) if lane in lanes]

    def __bool__(self) -> bool:
        return bool(self._named)

    def of_step(self) -> dict[str, Tensor]:
        """Steps 2 and 3, after each step; every rank must call it."""
        sums = self._sums()
        result: dict[str, Tensor] = {}
        for name, value in sums.items():
            how, _, own = name.removeprefix(RETURNED).partition("/")
            if how == "mean":
                result[own] = value / self._pieces
            elif how == "sum":
                result[own] = value
            elif how == "total":
                result[own] = value / sums[f"{RETURNED}count/{own}"]
        return result

    def _sums(self) -> dict[str, Tensor]:
        mine = [
            self._parts[name]
            if name in self._own
            else torch.zeros(spec.numel, dtype=torch.float64, device=self._device)
            for name, (_, spec) in self._named.items()
        ]
        total = torch.cat(mine)
        for lane in self._lanes:
            self._transport.collective(lane, ALL_REDUCE.name, total, total, "sum").wait()
        parts = torch.split(total, [spec.numel for _, spec in self._named.values()])
        return {
            name: part.reshape(spec.shape)
            for (name, (_, spec)), part in zip(self._named.items(), parts, strict=True)
        }
