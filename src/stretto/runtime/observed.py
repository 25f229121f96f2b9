"""A job's metrics while a rank walks its plan, and what they are over all ranks.

1. In a step, values of microbatches and of several calls are added up on the device.
2. At its end they become one vector, which is kept until it is read: no step waits for it.
3. To read is to fetch the vectors of the steps since, and to join those of ranks with other data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.errors import RunError
from stretto.ir.action import Phase
from stretto.ir.axes import PIPELINE
from stretto.ir.metrics import NO_ROOM, RETURNED, Metric, Observed
from stretto.ir.plan import Plan
from stretto.ir.program import TensorSpec
from stretto.runtime.transport import Transport
from stretto.tensor.dtensor_adapter import outside_modes as uncounted

KEPT_STEPS = 256
"""Vectors that are kept if no one reads them, the newest. Assumed: some kilobytes each, and a line of a log
is of fewer steps."""

Key = tuple[int, str, str]
"""(stage, module, name): values of one are joined."""


class ObservedWatch:
    """One rank's metrics. Does nothing for a job without."""

    def __init__(self, plan: Plan, pp_rank: int, device: torch.device) -> None:
        self.plan = plan
        lengths = {key: n for key, (_, n) in _joined(plan).items() if plan.rank_of(key[0]) == pp_rank}
        # All of a step side by side, and allocated once: a step neither makes tensors for it nor counts any.
        self._now = torch.zeros(sum(lengths.values()), dtype=torch.float64, device=device)
        parts = dict(zip(lengths, torch.split(self._now, list(lengths.values())), strict=True))
        self._parts = [parts.get(_key(metric)) for metric in plan.job.metrics]
        self.returned = {key[2]: part for key, part in parts.items() if key[2].startswith(RETURNED)}
        """Name -> the sums of the last step, of what the loss function returns."""
        self._most = [metric.joined == "max" for metric in plan.job.metrics]
        self._begun: set[int] = set()
        self._steps: deque[Tensor] = deque(maxlen=KEPT_STEPS)

    def begin(self) -> None:
        """A step begins; what an earlier one left, that failed, goes."""
        self._begun.clear()

    def add(self, at: int, value: Tensor) -> None:
        """Step 1 for a metric, by its place in the job."""
        kept = self._parts[at]
        assert kept is not None, "a rank runs the ops of its own stages"
        if id(kept) not in self._begun:
            self._begun.add(id(kept))
            kept.copy_(value.reshape(-1))
        elif self._most[at]:
            torch.maximum(kept, value.reshape(-1).to(torch.float64), out=kept)
        else:
            kept.add_(value.reshape(-1))

    def end(self) -> None:
        """Step 2, after each step; a replayed one (`step_graph`) has written where the recorded one did."""
        if self._begun:
            with uncounted():
                self._steps.append(self._now.clone())

    def most(self, name: str) -> tuple[float, str]:
        """The greatest value of that name in the last step, and its module."""
        named = zip(self.plan.job.metrics, self._parts, strict=True)
        return max(
            ((float(kept.max()), one.module) for one, kept in named if kept is not None and one.name == name),
            default=(0.0, ""),
        )

    def read(self, forget: bool = True) -> list[list[float]]:
        """What is kept, a row a step."""
        result: list[list[float]] = torch.stack(tuple(self._steps)).tolist() if self._steps else []
        if forget:
            self._steps.clear()
        return result


def check_room(watch: ObservedWatch, transport: Transport) -> None:
    """Raises RunError on every rank, which all must call it, where there was no room for rows that experts
    were sent in the last step."""
    if not any(metric.name == NO_ROOM for metric in watch.plan.job.metrics):
        return
    need, module = max(transport.all_gather(watch.most(NO_ROOM)))
    if need:
        raise RunError(
            f"a rank's experts of {module} get {need:.3g} times the mean of rows from a rank, the most over "
            "all layers and ranks of this step, and ep_buffer has room for less: give ep_buffer = "
            f"{math.ceil(10.0 * need) / 10.0} or more, leave ep_buffer out (there is room for all then), or "
            "give ep_overflow = 'drop'"
        )


def observed(watch: ObservedWatch, transport: Transport, forget: bool = True) -> tuple[Observed, ...]:
    """Step 3, on every rank, which all must call it; () for a job without metrics, and before a step. forget:
    later steps are read without these."""
    plan = watch.plan
    if not plan.job.metrics:
        return ()
    gathered = transport.all_gather(watch.read(forget))
    built: list[Observed] = []
    pp_rank, start = -1, 0
    for key, (metric, length) in sorted(_joined(plan).items(), key=lambda item: plan.rank_of(item[0][0])):
        if plan.rank_of(key[0]) != pp_rank:
            pp_rank, start = plan.rank_of(key[0]), 0
        rows = [
            [row[start : start + length] for row in gathered[rank]] for rank in _adding(plan, metric, pp_rank)
        ]
        start += length
        if rows[0] and metric.name != NO_ROOM and not metric.name.startswith(RETURNED):
            values = torch.tensor(rows, dtype=torch.float64)
            built.append(
                _summary(metric, values.sum(dim=0) if metric.joined == "sum" else values.amax(dim=0))
            )
    order = {(metric.module, metric.name): at for at, metric in enumerate(plan.job.metrics)}
    return tuple(sorted(built, key=lambda one: order[one.module, one.name]))


def _summary(metric: Metric, steps: Tensor) -> Observed:
    mean, least, most = (
        tuple(result.tolist()) for result in (steps.mean(dim=0), steps.amin(dim=0), steps.amax(dim=0))
    )
    return Observed(metric.module, metric.name, metric.joined, len(steps), mean, least, most)


def _key(metric: Metric) -> Key:
    return metric.stage, metric.module, metric.name


def _joined(plan: Plan) -> Mapping[Key, tuple[Metric, int]]:
    """The metrics with their lengths, in the order of the job's; of those that are joined, the first."""
    return {_key(metric): (metric, spec.numel) for metric, spec in metric_specs(plan)}


def metric_specs(plan: Plan) -> Sequence[tuple[Metric, TensorSpec]]:
    """The job's metrics with what they are; of those that are joined, the first."""
    job = plan.job
    specs = {
        (stage.index, op.name): op.outputs[0]
        for stage in (job.stages if job.metrics else ())
        for op in stage.ops[Phase.F]
        if len(op.outputs) == 1
    }
    result: dict[Key, tuple[Metric, TensorSpec]] = {}
    for metric in job.metrics:
        spec = specs[metric.stage, metric.value]
        assert spec is not None, "references are checked"
        result.setdefault(_key(metric), (metric, spec))
    return tuple(result.values())


def _adding(plan: Plan, metric: Metric, pp_rank: int) -> Sequence[int]:
    """The ranks at a pipeline rank that have values of their own; along other axes they are equal."""
    own = {*plan.job.data_axes, *metric.partial}
    axes = [PIPELINE, *(axis for axis, _ in plan.mesh.sizes if axis in own)]
    return plan.mesh.group(plan.mesh.rank({PIPELINE: pp_rank}), axes, [pp_rank]) or ()
