"""How long a layout's step takes at least, and how long a candidate's probably does: closed forms of a block.

bound      No plan of the layout is faster, whatever its schedule. The work of all microbatches is shared by
           the pipeline's ranks; with one stage a rank, a rank also waits for the forwards of those before it,
           and what balances best is the solution of T = f S(r) + m w(r), S(r+1) = S(r) + w(r).
estimate   The schedule timed (`stretto.schedule.timing`) with equal stages and prices of the block: compute
           hides all that it can, so that a plan is rarely faster. What gradients' sums take beyond half of
           the last backward comes on top (assumed).
memory     Parameters, gradients and optimizer of an equal share, and what the schedule keeps live.

Touches `tune.block`, `stretto.schedule`; no capture, no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf

from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.mesh import Mesh
from stretto.ir.stage_maps import AUTO
from stretto.ir.transfers import occupancy_us
from stretto.price.cluster import Description, place_link, sum_cost
from stretto.price.cluster_file import Hardware
from stretto.price.flat import Cluster
from stretto.schedule.families import make_schedule
from stretto.schedule.timing import PhaseTimes, peak_live, time_schedule
from stretto.tune.block import Block, Work
from stretto.tune.choices import Candidate, Layout

SHORT = 4
"""Microbatches for every rank that are timed; the others add what one takes in steady state. Assumed, as in
`stretto.planning.schedules`."""

ROUNDING = 1e-9
"""A sum over all ops in another order may be larger by that share."""

LEAST_FILL = 4
"""Of the forwards that a pipeline's last rank waits for, one in so many is counted where only layouts are
put in order: more stages a rank divide them. Assumed."""

LIKE_AUTO = ("zb-h1", "interleaved-1f1b")
"""The family by which "auto" is estimated, with one stage a rank and with several. Assumed: it is as fast."""

TF32 = 2.0
"""Times the rate in half precision's place: products of float32 are at most half as fast (TF32)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a candidate: its step, and the most bytes that a rank holds, the optimizer's state included."""

    step_us: float
    peak_bytes: float


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout."""
    sizes = (("pp", layout.pp), ("dp", layout.dp // layout.ep), ("ep", layout.ep), ("tp", layout.tp))
    return Mesh(tuple((axis, size) for axis, size in sizes if size > 1 or axis == "pp"))


def bound_us(layout: Layout, work: Work, virtual: bool = True) -> float:
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


def fastest_us(flops: float, found: Description, dtype: str) -> float:
    """What so many flops take at least on a device; 0 where the description names no rate."""
    if isinstance(found, Cluster):
        return flops / found.flops_per_us
    if isinstance(found, Hardware):
        reach = found.roof.flops_per_us * found.roof.efficiency.matmul
        return flops / (reach if dtype == "bf16" else reach / TF32)
    return 0.0


def guess_us(layout: Layout, work: Work) -> float:
    """A layout's step, to put layouts in order: its busiest lane, and a pipeline's shortest way to fill."""
    m, p = layout.microbatches, layout.pp
    fill_us = (p - 1) / LEAST_FILL * work.busiest_us
    return (m * work.busiest_us + fill_us) / p


def least_bytes(layout: Layout, block: Block) -> float:
    """What the fullest rank holds at least: an equal share of parameters, gradients, optimizer's state."""
    return block.held_bytes / layout.pp


def likely_bytes(layout: Layout, block: Block, work: Work) -> float:
    """The same with as many live microbatches as 1F1B has."""
    return (block.held_bytes + work.saved_bytes * min(layout.microbatches, layout.pp)) / layout.pp


def estimate(
    candidate: Candidate, block: Block, work: Work, found: Description, layers: int | None
) -> Estimate:
    """Of a candidate. layers: equal blocks of the model, which stages cannot share evenly.

    Raises UsageError for a schedule that cannot be made.
    """
    layout = candidate.layout
    p, v, m = layout.pp, candidate.virtual_stages, layout.microbatches
    stages = p * v
    uneven = ceil(layers / stages) * stages / layers if layers is not None else 1.0
    stretch = uneven * (work.busiest_us / work.compute_us if work.compute_us else 1.0)
    family = candidate.schedule
    if family == AUTO:
        family = LIKE_AUTO[v > 1]
    schedule = _short(family, p, v, min(m, max(SHORT * p, 8)))
    mesh = mesh_of(layout)
    message_us = 0.0
    if p > 1:
        link = place_link(found, mesh)
        message_us = link.latency_us + occupancy_us(link, int(block.message_bytes))
    forward_us, input_us, weight_us = (us * stretch / stages for us in work.phases_us)
    times = PhaseTimes(forward_us, input_us, weight_us, message_us)
    timing = time_schedule(schedule, times)
    rest_us = (m - schedule.microbatches) * v * (forward_us + input_us + weight_us)
    step_us = timing.makespan + rest_us + _sums_us(layout, block, found, v * (input_us + weight_us))
    live = _live(family, p, v, m)
    return Estimate(step_us, block.held_bytes / p + work.saved_bytes * live / stages)


def _sums_us(layout: Layout, block: Block, found: Description, backward_us: float) -> float:
    """What sums of gradients over data-parallel copies take beyond what they can run under."""
    mesh = mesh_of(layout)
    total_us = 0.0
    for axis in ("dp", "ep"):
        if mesh.size(axis) > 1:
            try:
                total_us += sum_cost(found, mesh, axis).curve.us(block.gradient_bytes / layout.pp)
            except UsageError:
                return inf  # the plan would be refused for it, and says why
    return max(0.0, total_us - backward_us / 2)


@lru_cache(maxsize=1024)
def _short(family: str, ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    return make_schedule(family, ranks, microbatches, virtual_stages=virtual_stages)


@lru_cache(maxsize=4096)
def _live(family: str, ranks: int, virtual_stages: int, microbatches: int) -> int:
    """The most microbatches' stages that are live on a rank."""
    schedule = make_schedule(family, ranks, microbatches, virtual_stages=virtual_stages)
    live = peak_live(schedule)
    return max(sum(live[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks))
