"""Costs of a job from a calibration: looked up where measured, else by what is alike, else by a roofline.

Ops: as `stretto.price.alike` says; besides those that were measured there are those of a profiler's trace, by
name and shapes (`traced`).

Collectives: those of groups as large and as far apart; else of groups as large; else a ring's, scaled from
the nearest size. Touches no device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import Collective
from stretto.ir.costs import NO_LINK, Costs
from stretto.ir.mesh import Mesh
from stretto.ir.prices import Priced, Specs, price_list, specs_of, traffic_bytes
from stretto.ir.program import Job, Op
from stretto.price.alike import AlikePricer
from stretto.price.calibration import Calibration, Calls, GroupTiming, LinkTiming, Timing
from stretto.price.devices import named_peak
from stretto.price.profiler_trace import trace_key
from stretto.price.shared import ACTION_US, FREE, scaled, sharing, wanted_collectives


class CalibratedPricer(AlikePricer):
    """Prices ops from a calibration."""

    def __init__(
        self,
        calibration: Calibration,
        job: Job | None = None,
        calls: Mapping[tuple[str, str], Calls] | None = None,
    ) -> None:
        """job: whose ops are priced; those of it that were traced show rates as measured ones do. calls: by
        (axis, kind), what the transport's calls add to the ops that start and await collectives."""
        self._calibration = calibration
        self._job = job
        self._calls = calls or {}

    @property
    def ops(self) -> Mapping[str, Timing]:
        return self._calibration.ops

    def timings(self) -> Sequence[Timing]:
        """Of ops that were measured, and of the job's that were traced. Raises UsageError for none at all."""
        result = list(super().timings())
        traced = self._calibration.traced
        if self._job is not None and traced:
            specs = specs_of(self._job)
            for _, op in self._job.all_ops:
                us = None if op.target in FREE else traced.get(trace_key(op, specs))
                if us:
                    result.append(Timing(us, 0.0, op.flops, traffic_bytes(op, specs)))
        if not result:
            raise UsageError(
                f"{self._calibration.name} keeps no time of any op of the job, nor of others to price them "
                "from: run `stretto calibrate` with the plan, or without any for a sweep"
            )
        return result

    def look_up(self, op: Op, specs: Specs, key: str) -> Priced | None:
        """Measured, or else traced."""
        known = super().look_up(op, specs, key)
        traced = self._calibration.traced
        us = traced.get(trace_key(op, specs)) if known is None and traced else None
        return known if us is None else Priced(us, "traced")

    def price(self, op: Op, specs: Specs) -> Priced:
        """As `Pricer.price`."""
        result, asked = super().price(op, specs), op.collective
        calls = None if asked is None else self._calls.get((asked.axis, asked.kind))
        if asked is None or calls is None:
            return result
        return replace(result, us=result.us + calls.starting_us(asked.nbytes))

    def finish_us(self, asked: Collective) -> float:
        """As `Pricer.finish_us`."""
        calls = self._calls.get((asked.axis, asked.kind))
        return 0.0 if calls is None else calls.finishing_us(asked.nbytes)


def calibrated_pricer(job: Job, schedule: Schedule, calibration: Calibration) -> CalibratedPricer:
    """What prices the ops of a job, and of what passes make of it, with the transport's calls."""
    groups = _groups(job, schedule, calibration)
    return CalibratedPricer(calibration, job, {key: group.calls for key, group in groups.items()})


def priced_costs(job: Job, schedule: Schedule, calibration: Calibration) -> Costs:
    """The costs of a job by a calibration; `source` counts how op times are known, `op_how` says it of each.
    Raises UsageError when the calibration is of another kind of device, or lacks collectives or messages that
    the job needs."""
    if calibration.machine.kind != job.device:
        raise UsageError(
            f"{calibration.name} is of a {calibration.machine.kind} device ({calibration.machine.device}), "
            f"and the job was captured for {job.device}, whose kernels differ: capture with "
            f"device={calibration.machine.kind!r}, or give a calibration of a {job.device} device"
        )
    mesh = job.mesh(schedule.ranks)
    groups = _groups(job, schedule, calibration)
    ops = price_list(job, calibrated_pricer(job, schedule, calibration))
    times = {key: priced.us for key, priced in ops.items()}
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    stride = mesh.world // schedule.ranks
    links = {(a, b): find_link(calibration, abs(a - b) * stride) for a, b in pairs if a != b}
    default = find_link(calibration, stride).link if schedule.ranks > 1 else NO_LINK
    leaving = {axis for (axis, _), group in groups.items() if group.hosts > 1}
    if any(link.hosts > 1 for link in links.values()):
        leaving.add(PIPELINE)
    count = Counter(priced.how for priced in ops.values() if priced.how != "free")
    described = ", ".join(f"{number} {how}" for how, number in sorted(count.items()))
    return Costs(
        times,
        {(a, b): one.way(a, b) for (a, b), one in links.items()},
        default,
        ACTION_US,
        f"calibration {calibration.name} of {calibration.machine}: ops {described}",
        {key: group.cost for key, group in groups.items()},
        sharing([axis for axis, _ in job.axes], leaving, pipelined=schedule.ranks > 1),
        op_how={key: priced.how for key, priced in ops.items() if priced.how != "free"},
        peak=named_peak(job, calibration.machine.device),
    )


def _groups(job: Job, schedule: Schedule, calibration: Calibration) -> dict[tuple[str, str], GroupTiming]:
    """(axis, kind) -> the group that serves it, for what the job wants."""
    mesh = job.mesh(schedule.ranks)
    return {
        (wanted.axis, wanted.kind): find_group(calibration, mesh, wanted.axis, wanted.kind)
        for wanted in wanted_collectives(job)
    }


def find_group(calibration: Calibration, mesh: Mesh, axis: str, kind: str) -> GroupTiming:
    """The measured group that is most like those of an axis. Raises UsageError when there is none."""
    members = mesh.size(axis)
    names = [name for name, _ in mesh.sizes]
    stride = math.prod(size for _, size in mesh.sizes[names.index(axis) + 1 :])
    known = [group for group in calibration.collectives if group.kind == kind]
    if not known:
        raise UsageError(
            f"{calibration.name} has no {kind}, which the job has on {axis}: run `stretto calibrate` under "
            f"torchrun with at least {members} ranks, or in one process for this machine alone"
        )

    def distance(group: GroupTiming) -> tuple[float, float]:
        return abs(math.log2(group.members / members)), abs(math.log2(group.stride / stride))

    best = min(known, key=distance)
    cost = scaled(best.cost, kind, best.members, members)
    if best.stride != stride:
        cost = replace(cost, source=f"{cost.source}; ranks {best.stride} apart for {stride}")
    return GroupTiming(kind, members, stride, best.hosts, cost, best.calls, best.spread)


def find_link(calibration: Calibration, stride: int) -> LinkTiming:
    """The measured link between ranks about as far apart. Raises UsageError when there is none."""
    if not calibration.links:
        raise UsageError(
            f"{calibration.name} has no messages, which a pipeline needs: run `stretto calibrate` again, "
            "without --ops-only"
        )
    return min(calibration.links, key=lambda link: abs(math.log2(link.stride / stride)))
