"""How long a layout's step takes at least, and how long a candidate's probably does: closed forms of a block.

bound      No plan of the layout is faster, whatever its schedule. The work of all microbatches is shared by
           the pipeline's ranks; with one stage a rank, a rank also waits for the forwards of those before it,
           and the best balance is the solution of T = f S(r) + m w(r), S(r+1) = S(r) + w(r).
estimate   The schedule timed (`stretto.schedule.timing`) with stages as they are cut, and what their programs
           take with what stays exposed in them (`Exposure`): each by itself, and with forwards joined
           with backwards as a plan may have them; the fastest that fits. What gradients' reductions take
           beyond the last backward comes on top.
memory     Parameters, gradients and optimizer of an equal share, and what the schedule keeps live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action, Phase, Schedule
from stretto.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from stretto.ir.mesh import Mesh
from stretto.ir.parameters import gathers, scatters
from stretto.ir.stage_maps import AUTO
from stretto.ir.transfers import occupancy_us
from stretto.passes.flat import LARGE_BYTES
from stretto.planning.choose import AHEAD
from stretto.planning.pair import pair
from stretto.planning.schedules import ENOUGH
from stretto.price.cluster import TF32_PART, Cluster, Description, axis_cost, pp_link
from stretto.price.cluster_file import Hardware
from stretto.schedule.families import PLAIN_OF_SEVERAL, make_schedule
from stretto.schedule.timing import PhaseTimes, ScheduleTiming, most_kept, peak_live, time_schedule
from stretto.tune.block import BlockWork, TuneBlock
from stretto.tune.choices import COPIES, Candidate, Dealt, LayoutChoice
from stretto.tune.resident import Shares

ROUNDING = 1e-9
"""A sum over all ops in another order may be larger by that share."""

LEAST_FILL = 4
"""Of the forwards that a pipeline's last rank waits for, one in so many is counted where only layouts are
put in order: more stages a rank divide them. Assumed."""

LIKE_AUTO = ("zb-h1", PLAIN_OF_SEVERAL)
"""The family by which "auto" is estimated, with one stage a rank and with several. Assumed: it is as fast."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a candidate: its step, and the least bytes that the fullest rank has, the optimizer's state
    included. ahead: of the pairs (`stretto.planning.choose.AHEAD`) that make it so fast; None of none.
    bound_us: of a layout, of which no plan is faster."""

    step_us: float
    peak_bytes: float
    ahead: int | None = None
    bound_us: float = 0.0


def mesh_of(layout: LayoutChoice, dealt: Dealt = COPIES) -> Mesh:
    """The mesh of a layout, as `ParallelSettings.axes`."""
    each = dealt.dp_shard or layout.dp
    within = each < layout.dp
    groups, among = (layout.dp // each, each // layout.ep) if within else (layout.dp // layout.ep, 1)
    sizes = {"dp": groups, "dp_shard": among, "cp": layout.cp, "ep": layout.ep, "tp": layout.tp}
    return Mesh((("pp", layout.pp), *((axis, size) for axis, size in sizes.items() if size > 1)))


def bound_us(layout: LayoutChoice, work: BlockWork, virtual: bool = True) -> float:
    """The time below which no plan of the layout comes. work: with nothing computed again; virtual: whether
    a rank may have several stages."""
    m, p = layout.microbatches, layout.pp
    even_us = m * work.compute_us / p
    if virtual or not work.compute_us:
        return even_us * (1 - ROUNDING)
    share = work.phases_us[0] / work.compute_us
    # The chain of the module's docstring, solved for T: 1 - (1 - f/m)^p of T/f is all work.
    covered = 1.0 - (1.0 - share / m) ** p
    filled_us = share * work.compute_us / covered if covered else even_us
    return max(even_us, filled_us) * (1 - ROUNDING)


def fastest_us(flops: float, cluster: Description, dtype: str) -> float:
    """What so many flops take at least on a device; 0 where the description names no rate."""
    if isinstance(cluster, Cluster):
        return flops / cluster.flops_per_us("bfloat16" if dtype == "bf16" else dtype)
    if isinstance(cluster, Hardware):
        reach = cluster.roof.flops_per_us * cluster.roof.efficiency.matmul
        return flops / (reach if dtype == "bf16" else reach * TF32_PART)
    return 0.0


def guess(
    layout: LayoutChoice,
    block: TuneBlock,
    words: Sequence[str | int],
    limit_bytes: float,
    virtual: bool,
    dealt: Dealt,
    least_us: float | None = None,
) -> Estimate:
    """Of a layout, with the least computed again that likely fits, infinite where nothing does; to put
    layouts in order: its steady state, and a pipeline's shortest way to fill. words: what may be computed
    again, the least first. virtual: as in `bound_us`; least_us: what a microbatch's arithmetic takes at
    least, for the bound where the block is a guess itself."""
    m, p = layout.microbatches, layout.pp
    works = [block.again[word] for word in words if word in block.again]
    # As many live microbatches as 1F1B has.
    fixed = block.fixed_bytes(layout, dealt)
    peaks = [(fixed + work.saved_bytes * min(m, p)) / p for work in works]
    certain = works[0] if least_us is None else BlockWork((least_us, 0.0, 0.0), 0.0)
    least = bound_us(layout, certain, virtual or least_us is not None)
    for work, peak in zip(works, peaks, strict=True):
        if peak <= limit_bytes:
            fill_us = (p - 1) / LEAST_FILL * work.steady_us
            return Estimate((m * work.steady_us + fill_us) / p, peak, bound_us=least)
    return Estimate(inf, min(peaks), bound_us=least)


def estimate(
    candidate: Candidate, block: TuneBlock, work: BlockWork, cluster: Description, limit_bytes: float = inf
) -> Estimate:
    """Of a candidate, with stages as the automatic cut makes them. limit_bytes: the memory of a rank; where
    the candidate needs more whatever it overlaps, the step is infinite.

    Raises UsageError for a schedule that cannot be made.
    """
    layout = candidate.layout
    p, v, m = layout.pp, candidate.virtual_stages, layout.microbatches
    family = candidate.schedule
    if family == AUTO:
        family = LIKE_AUTO[v > 1]
    # The others add what one takes in steady state.
    count = min(m, max(ENOUGH * p, 8))
    shares = block.shares.get(p * v) or Shares.even(p * v)
    body_bytes = work.saved_bytes - work.head_bytes
    saved = [body_bytes * share for share in shares.saved]
    saved[-1] += work.head_bytes
    fitting: list[tuple[int | None, Schedule]] = []
    least = inf
    for ahead in (None, *AHEAD) if work.exposure.joined is not None else (None,):
        schedule = _short(family, p, v, count, ahead)
        if schedule is not None:
            kept = _kept(family, p, v, m, count, ahead, tuple(saved))
            fixed = block.fixed_bytes(layout, candidate.dealt)
            peak = max(
                fixed * sum(shares.fixed[stage] for stage in stages)
                + kept[rank]
                + work.extra.of(p * v - 1 in stages, m, p)
                for rank in range(p)
                for stages in [schedule.stages_of(rank)]
            )
            least = min(least, peak)
            if peak <= limit_bytes:
                fitting.append((ahead, schedule))
    if not fitting:
        return Estimate(inf, least)
    message_us = 0.0
    if p > 1:
        link = pp_link(cluster, mesh_of(layout))
        message_us = link.latency_us + occupancy_us(link, int(block.message_bytes))
    once_us = _once_us(candidate, block, cluster, work)
    steps: list[Estimate] = []
    for ahead, schedule in fitting:
        try:
            timing = time_schedule(schedule, _times(schedule, work, shares.work, message_us))
        except PlanError:  # of pairs, each may wait for the other
            continue
        fullest = p * max(sum(shares.work[stage] for stage in schedule.stages_of(rank)) for rank in range(p))
        step_us = timing.makespan + (m - count) * _period(timing, count, fullest) + once_us
        steps.append(Estimate(step_us, least, ahead))
    return min(steps, key=lambda one: one.step_us, default=Estimate(inf, least))


def _times(schedule: Schedule, work: BlockWork, shares: Sequence[float], message_us: float) -> PhaseTimes:
    exposure = work.exposure
    split = any(action.phase is Phase.W for action in schedule.actions(0))
    backward = exposure.phases[1:] if split else (exposure.backward, exposure.backward)
    phases_us = [
        us * times for us, times in zip(work.phases_us, (exposure.phases[0], *backward), strict=True)
    ]
    apart_us, joined = sum(phases_us), 1.0
    if exposure.joined is not None and apart_us:
        joined = min(1.0, work.compute_us * exposure.joined / apart_us)
    forward, into, weight = (tuple(us * share for share in shares) for us in phases_us)
    return PhaseTimes(forward, into, weight, message_us, overlapped=joined)


def _period(timing: ScheduleTiming, microbatches: int, fullest: float) -> float:
    """What one more microbatch takes: the work of the fullest rank, which is so many times that of all in
    the mean, or the time between two backwards of the first stage where ranks wait for each other."""
    first, last = microbatches // 4, 3 * microbatches // 4
    work = timing.cost * (1 - timing.bubble_rate) / microbatches * fullest
    if first == last:
        return work

    def done(microbatch: int) -> float:
        both, split = (Action(0, phase, microbatch) for phase in (Phase.B, Phase.I))
        return timing.end[both if both in timing.end else split]

    return max(work, (done(last) - done(first)) / (last - first))


def _once_us(candidate: Candidate, block: TuneBlock, cluster: Description, work: BlockWork) -> float:
    """What is reduced and gathered once a step takes beyond what it can run under: the last backward, and the
    first forward, which the first parameter's, or a bucket's, never does."""
    layout, dealt = candidate.layout, candidate.dealt
    mesh = mesh_of(layout, dealt)
    copies = [axis for axis in ("dp", "dp_shard", "cp", "ep") if mesh.size(axis) > 1]
    parts = [axis for axis in copies if dealt.zero and not (dealt.dp_shard and axis == "dp")]
    reduced = [] if scatters(dealt.zero) else [(axis, REDUCE_SCATTER.name) for axis in parts]
    reduced += [(axis, ALL_REDUCE.name) for axis in copies if axis not in parts]
    gathered = [] if gathers(dealt.zero) else [(axis, ALL_GATHER.name) for axis in parts]
    among = math.prod(mesh.size(axis) for axis in parts) if scatters(dealt.zero) else 1

    def exposed_us(travel: Sequence[tuple[str, str]], nbytes: float, under_us: float) -> float:
        def takes_us(left: float) -> float:
            total_us = 0.0
            for axis, kind in travel:
                total_us += axis_cost(cluster, mesh, axis, kind).curve.us(left)
                left /= 1 if kind == ALL_REDUCE.name else mesh.size(axis)
            return total_us

        return max(takes_us(nbytes) - under_us, takes_us(min(nbytes, max(LARGE_BYTES, block.first_bytes))))

    forward_us, *backward_us = (us / layout.pp for us in work.phases_us)
    try:
        result_us = exposed_us(reduced, block.gradient_bytes / layout.pp / among, sum(backward_us))
        return result_us + exposed_us(gathered, block.read_bytes / layout.pp, forward_us)
    except UsageError:
        return inf  # the plan would be refused for it, and describes why


@lru_cache(maxsize=1024)
def _short(
    family: str, ranks: int, virtual_stages: int, microbatches: int, ahead: int | None
) -> Schedule | None:
    """The family over so many microbatches, in pairs where `ahead` is given; None where it has none."""
    made = make_schedule(family, ranks, microbatches, virtual_stages=virtual_stages)
    return made if ahead is None else pair(made, ahead=ahead)


@lru_cache(maxsize=4096)
def _kept(
    family: str,
    ranks: int,
    virtual_stages: int,
    microbatches: int,
    short: int,
    ahead: int | None,
    saved: tuple[float, ...],
) -> tuple[float, ...]:
    """By rank, the most that it keeps of microbatches, each of which keeps so much on each stage. What a
    family keeps that keeps all microbatches of a short step grows with the full step."""
    schedule = _short(family, ranks, virtual_stages, short, ahead)
    assert schedule is not None
    if max(peak_live(schedule)) == short < microbatches:
        return _kept(family, ranks, virtual_stages, microbatches, microbatches, ahead, saved)
    return most_kept(schedule, schedule.stage_ranks, saved, saved)
