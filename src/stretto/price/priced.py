"""Costs of a job from a calibration: looked up where measured, else by what is alike, else by a roofline.

An op's time, the first that is known:

    measured      an op of the same signature
    traced        an op of the same name and shapes in a profiler's trace
    fitted        a matrix product like others of its op, dtype and layout (`stretto.price.matmul_fit`)
    interpolated  ops of the same target and dtype with less and with more work (arithmetic, or bytes where
                  there is none): the time between theirs, on logarithmic scales
    roofline      the best rates that any measured op reached, and the shortest time of one

Collectives: those of groups as large and as far apart; else of groups as large; else a ring's, scaled from
the nearest size. Touches no device.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import NO_LINK, Costs
from stretto.ir.mesh import Mesh
from stretto.ir.program import Job, Op, TensorSpec
from stretto.measure.calls import calls_us
from stretto.measure.local_processes import scaled
from stretto.measure.op_cache import Timing, signature
from stretto.measure.profiler_trace import trace_key
from stretto.measure.wanted import wanted_collectives
from stretto.price.calibration import Calibration, GroupTiming, LinkTiming, RankTiming
from stretto.price.matmul_fit import MatmulFit
from stretto.price.roofline import ACTION_US, FREE, op_times, sizes_of, specs_of, traffic_bytes
from stretto.price.sharing import sharing

BEYOND = 4.0
"""Work this many times below the least or above the most that was measured is still taken at the nearest op's
rate; further away the roofline serves. Assumed."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A time and how it is known: `measured`, `traced`, `fitted`, `interpolated`, `roofline` or
    `free`."""

    us: float
    how: str


class Pricer:
    """Prices ops from a calibration."""

    def __init__(self, calibration: Calibration, job: Job | None = None) -> None:
        """job: whose ops are priced; those of it that were traced tell rates as measured ones do."""
        self.calibration = calibration
        self._job = job

    @cached_property
    def _alike(self) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """(target, dtype of the first tensor) -> (work, us), ascending by work, one time each."""
        found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for key, timing in self.calibration.ops.items():
            work = float(timing.flops or timing.nbytes)
            if work and timing.us:
                found[_family(key)][work].append(timing.us)
        return {
            family: sorted((work, math.exp(sum(map(math.log, us)) / len(us))) for work, us in times.items())
            for family, times in found.items()
        }

    @cached_property
    def _matmuls(self) -> MatmulFit:
        return MatmulFit((key, timing.us) for key, timing in self.calibration.ops.items())

    @cached_property
    def _timings(self) -> list[Timing]:
        """Of ops that were measured, and of the job's that were traced."""
        found = [timing for timing in self.calibration.ops.values() if timing.us]
        if self._job is None or not self.calibration.traced:
            return found
        specs, sizes = specs_of(self._job), sizes_of(self._job)
        for op in (op for stage in self._job.stages for ops in stage.ops.values() for op in ops):
            us = None if op.target in FREE else self.calibration.traced.get(trace_key(op, specs))
            if us:
                found.append(Timing(us, 0.0, op.flops, traffic_bytes(op, sizes)))
        return found

    @cached_property
    def _roof(self) -> tuple[float, float, float]:
        """(flops a microsecond, bytes a microsecond, shortest time). Raises UsageError with no op at all."""
        timings = self._timings
        if not timings:
            raise UsageError(
                f"{self.calibration.name} holds no time of any op of the job, nor of others to price them "
                "from: run `stretto calibrate` with the plan, or without any for a sweep"
            )
        flops = max((t.flops / t.us for t in timings), default=0.0)
        rate = max((t.nbytes / t.us for t in timings), default=0.0)
        return flops or math.inf, rate or math.inf, min(t.us for t in timings)

    def price(self, op: Op, specs: Mapping[str, TensorSpec], sizes: dict[str, int]) -> Priced:
        """One op's time on the compute lane, without the call of the transport that starts a collective."""
        if op.target in FREE:
            return Priced(0.0, "free")
        key = signature(op, specs)
        exact = self.calibration.ops.get(key)
        if exact is not None:
            return Priced(exact.us, "measured")
        if self.calibration.traced:
            us = self.calibration.traced.get(trace_key(op, specs))
            if us is not None:
                return Priced(us, "traced")
        us = self._matmuls.us(key)
        if us is not None:
            return Priced(us, "fitted")
        moved = traffic_bytes(op, sizes)
        us = _between(self._alike.get(_family(key), []), float(op.flops or moved))
        if us is not None:
            return Priced(us, "interpolated")
        flops_per_us, bytes_per_us, least_us = self._roof
        # What does not work in place, in a copy, starts with a buffer, and moves nothing.
        if op.alias is not None or (op.kind is not None and not op.kind.in_place):
            return Priced(least_us, "roofline")
        return Priced(max(least_us, op.flops / flops_per_us, moved / bytes_per_us), "roofline")


def priced_ops(job: Job, calibration: Calibration) -> dict[tuple[int, str], Priced]:
    """(stage, op name) -> time and how it is known, starts of collectives not counted.

    Raises UsageError when an op is not known and there is nothing to go by.
    """
    pricer, specs, sizes = Pricer(calibration, job), specs_of(job), sizes_of(job)
    return {
        (stage.index, op.name): pricer.price(op, specs, sizes)
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }


def priced_costs(job: Job, schedule: Schedule, calibration: Calibration) -> Costs:
    """The costs of a job by a calibration; `source` counts how op times are known, `op_how` says it of each.

    Raises UsageError when the calibration is of another kind of device than the job was captured for, and
    when it knows no collectives or messages and the job needs them.
    """
    if calibration.machine.kind != job.device:
        raise UsageError(
            f"{calibration.name} is of a {calibration.machine.kind} device ({calibration.machine.device}), "
            f"and the job was captured for {job.device}, whose kernels differ: capture with "
            f"device={calibration.machine.kind!r}, or give a calibration of a {job.device} device"
        )
    mesh = job.mesh(schedule.ranks)
    ops = priced_ops(job, calibration)
    groups = {
        (wanted.axis, wanted.kind): find_group(calibration, mesh, wanted.axis, wanted.kind)
        for wanted in wanted_collectives(job)
    }

    on_lane = calls_us(job, {key: group.calls for key, group in groups.items()})
    times = op_times(job, lambda stage, op: ops[stage, op.name].us + on_lane.get((stage, op.name), 0.0))
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    stride = mesh.world // schedule.ranks
    links = {(a, b): find_link(calibration, abs(a - b) * stride) for a, b in pairs if a != b}
    default = find_link(calibration, stride).link if schedule.ranks > 1 else NO_LINK
    ranks = calibration.ranks or RankTiming()
    leaving = {axis for (axis, _), group in groups.items() if group.hosts > 1}
    if any(link.hosts > 1 for link in links.values()):
        leaving.add(PIPELINE)
    count = Counter(priced.how for priced in ops.values() if priced.how != "free")
    told = ", ".join(f"{number} {how}" for how, number in sorted(count.items()))
    return Costs(
        times,
        {(a, b): one.way(a, b) for (a, b), one in links.items()},
        default,
        ACTION_US,
        f"calibration {calibration.name} of {calibration.machine}: ops {told}",
        {key: group.cost for key, group in groups.items()},
        sharing([axis for axis, _ in job.axes], leaving, pipelined=schedule.ranks > 1),
        ranks.skew,
        ranks.quota,
        ranks.cold,
        ranks.unsteady,
        {key: priced.how for key, priced in ops.items() if priced.how != "free"},
    )


def find_group(calibration: Calibration, mesh: Mesh, axis: str, kind: str) -> GroupTiming:
    """The measured group that is most like those of an axis. Raises UsageError when there is none."""
    members = mesh.size(axis)
    names = [name for name, _ in mesh.sizes]
    stride = math.prod(size for _, size in mesh.sizes[names.index(axis) + 1 :])
    known = [group for group in calibration.collectives if group.kind == kind]
    if not known:
        raise UsageError(
            f"{calibration.name} holds no {kind}, which the job has on {axis}: run `stretto calibrate` under "
            f"torchrun with at least {members} ranks, or in one process for this machine alone"
        )

    def distance(group: GroupTiming) -> tuple[float, float]:
        return abs(math.log2(group.members / members)), abs(math.log2(group.stride / stride))

    best = min(known, key=distance)
    cost = scaled(best.cost, best.members, members)
    if best.stride != stride:
        cost = replace(cost, source=f"{cost.source}; ranks {best.stride} apart for {stride}")
    return GroupTiming(kind, members, stride, best.hosts, cost, best.calls, best.spread)


def find_link(calibration: Calibration, stride: int) -> LinkTiming:
    """The measured link between ranks about as far apart. Raises UsageError when there is none."""
    if not calibration.links:
        raise UsageError(
            f"{calibration.name} holds no messages, which a pipeline needs: run `stretto calibrate` again, "
            "without --ops-only"
        )
    return min(calibration.links, key=lambda link: abs(math.log2(link.stride / stride)))


def _family(key: str) -> tuple[str, str]:
    """(target, dtype of the first tensor) of a signature."""
    target, _, rest = key.partition("(")
    return target, rest.partition("[")[0].lstrip("[")


def _between(points: list[tuple[float, float]], work: float) -> float | None:
    """Time for `work` by points (work, us), on logarithmic scales; None when they are too far away."""
    if not points or work <= 0 or not points[0][0] / BEYOND <= work <= points[-1][0] * BEYOND:
        return None
    at = bisect.bisect_left(points, (work, 0.0))
    if at == 0:
        # Less work may take as long: small ops are all overhead.
        return points[0][1]
    if at == len(points):
        return points[-1][1] * work / points[-1][0]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    share = math.log(work / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))
