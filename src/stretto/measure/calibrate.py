"""Measuring a machine, or a cluster under torchrun, for later planning: what `stretto calibrate` does.

    1. Ops: each distinct op of the given jobs once, or a sweep; what the cache holds is not measured again.
       Under torchrun all ranks measure the same ops at once, as they will compute, and the median counts.
    2. How ranks compute, on processors under torchrun: what a small GPT's ops take on all of them at once
       says how far they come apart, and what a quota does (`measure.yardstick`). Its ops are what ranks
       compute while communication is measured beside, too.
    3. Collectives of every kind, for every group size that divides the world: of neighbours, as the
       innermost axis has them, and of ranks as far apart as the outermost has them.
    4. Messages between neighbours and across the world, each way, and both at once.

Everything found goes into one `Calibration` as it comes, so that a run that is cut short keeps it, and what a
calibration already holds is not measured again. May touch
the cache's folder.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.ir.axes import TENSOR
from stretto.ir.collectives import PRICED
from stretto.ir.costs import NO_LINK, Costs
from stretto.ir.mesh import Mesh
from stretto.ir.prices import signature
from stretto.ir.program import Job, Op
from stretto.measure.compute_loop import looped_ops
from stretto.measure.contention import Compute
from stretto.measure.local_processes import BOTH_WAYS_BYTES, measure_between
from stretto.measure.measure_collectives import Measured, hosts_of, measure_collectives
from stretto.measure.measured import agreed_ops, compute_between_us
from stretto.measure.messages import measure_both_ways, measure_links
from stretto.measure.profile import profile
from stretto.measure.sweep import sweep_ops
from stretto.measure.time_ops import Specs, distinct_ops, time_op
from stretto.measure.yardstick import yardstick
from stretto.price.calibration import Calibration, GroupTiming, LinkTiming, RankTiming
from stretto.price.op_cache import OpCache, Timing
from stretto.price.wanted import Wanted, wanted_collectives
from stretto.processor.quota import agreed_quota

NOISY = 0.25
"""A spread of rounds above this is told: the machine did other work. Measured on two shared cores, the faster
half of an idle machine's rounds lies within a tenth."""

NOISY_GROUP = 1.0
"""For collectives: their members come apart, and that is part of what is measured."""

SIZES = (65_536, 262_144, 1_048_576, 4_194_304, 4_096)
"""Bytes of the collectives that are measured, the most likely of activations first."""

MOST_BYTES = 2**28
"""Of a job's own; more is taken at the rate of this. Assumed: a device that measures has room for it."""

LOCAL_GROUPS = (2, 4)
"""Group sizes between processes of this machine that are started for it."""

Progress = Callable[[str, int, int], None]
"""(what is being measured, how many are done, of how many)."""


@dataclass
class Outcome:
    """What came of it. measured, cached: number of ops; warnings: noisy or impossible measurements."""

    calibration: Calibration
    measured: int = 0
    cached: int = 0
    warnings: list[str] = field(default_factory=list)


def calibrate_ops(
    outcome: Outcome, jobs: Iterable[Job], cache: OpCache, device: torch.device, progress: Progress
) -> None:
    """Step 1. The cache is saved at the end, and when the run is cut short."""
    found = distinct_ops(jobs)
    wanted: Mapping[str, tuple[Op, Specs]] = found or {
        signature(op, specs): (op, specs) for op, specs in sweep_ops(device.type)
    }
    known = _known_to_all(wanted, cache)
    try:
        for done, (key, (op, specs)) in enumerate(wanted.items()):
            progress(op.target, done, len(wanted))
            if key in known:
                timing = outcome.calibration.ops[key] = cache.ops[key]
                outcome.cached += 1
                if timing.spread > NOISY:
                    outcome.warnings.append(
                        f"{key}: rounds differed by {100 * timing.spread:.0f} % when it was measured; "
                        "--fresh measures it again"
                    )
                continue
            _meet()
            try:
                mine: Timing | str = time_op(op, specs, device)
            except StrettoError as error:
                mine = str(error)
            agreed = _median(mine)
            if isinstance(agreed, str):
                outcome.warnings.append(agreed)
                continue
            timing = cache.ops[key] = outcome.calibration.ops[key] = agreed
            outcome.measured += 1
            if timing.spread > NOISY:
                outcome.warnings.append(
                    f"{key}: rounds differ by {100 * timing.spread:.0f} %; the machine does other work"
                )
    finally:
        if outcome.measured and _rank() == 0:
            cache.save()
    progress("ops", len(wanted), len(wanted))


def calibrate_communication(
    outcome: Outcome, jobs: Sequence[Job], device: torch.device, progress: Progress
) -> None:
    """Steps 2 to 4: between the running ranks, or processes started for it when there is one alone.

    jobs: what their collectives move is measured before other sizes."""
    computing = None
    if device.type == "cpu" and _world() > 1:
        progress("ranks", 0, 1)
        computing = _compare_ranks(outcome, device)
        progress("ranks", 1, 1)
    if _world() > 1:
        _between_ranks(outcome, jobs, device, progress, computing)
    else:
        _between_processes(outcome, jobs, progress)


@dataclass(frozen=True, slots=True)
class _Computing:
    """What ranks compute while communication is measured. between_us: how long, before each collective;
    beside: what, while one is in flight."""

    between_us: float
    beside: Compute


def _compare_ranks(outcome: Outcome, device: torch.device) -> _Computing:
    """Step 2. Ranks are measured again in every run: with what they compute the communication of this run is
    measured."""
    job = yardstick()
    stage = job.stages[0]
    _meet()
    mine = profile(job, device, [stage.index])
    processor = agreed_quota(device)
    costs = agreed_ops(job, mine).on(Costs({}, {}, NO_LINK, 0.0, "", processor=processor))
    outcome.calibration.ranks = RankTiming(costs.skew, costs.processor)
    # As in a plan's own measurement: what ranks come late by is said by skew, and counts there.
    between_us = compute_between_us([stage], mine.op_us) if processor is not None else 0.0
    return _Computing(between_us, looped_ops(job, stage, device, mine.op_us))


def _between_processes(outcome: Outcome, jobs: Sequence[Job], progress: Progress) -> None:
    for done, members in enumerate(LOCAL_GROUPS):
        progress(f"collectives of {members} processes", done, len(LOCAL_GROUPS))
        kinds = _missing(outcome, members, 1)
        link = members == 2 and not outcome.calibration.links
        if not kinds and not link:
            continue
        wanted = [Wanted(TENSOR, kind, _sizes(kind, jobs), "float32") for kind in kinds]
        found = measure_between(Mesh(((TENSOR, members),)), wanted, link=link)
        if found.link is not None:
            _keep_link(outcome, LinkTiming(1, 1, found.link, found.both_ways, spread=found.spread))
        for (_, kind), measured in found.collectives.items():
            _keep(outcome, kind, members, 1, 1, measured)
    progress("communication", len(LOCAL_GROUPS), len(LOCAL_GROUPS))


def _missing(outcome: Outcome, members: int, stride: int) -> list[str]:
    """Kinds that a run before this has not measured."""
    known = {(one.kind, one.members, one.stride) for one in outcome.calibration.collectives}
    return [kind for kind in PRICED if (kind, members, stride) not in known]


def _sizes(kind: str, jobs: Sequence[Job]) -> tuple[int, ...]:
    """What collectives of a kind move in the jobs, on whatever axis, and sizes around an activation's."""
    alike = [one for job in jobs for one in wanted_collectives(job) if one.kind == kind]
    asked = [size for one in alike for size in one.sizes if size <= MOST_BYTES]
    return tuple(dict.fromkeys((*asked, *SIZES)))


def _between_ranks(
    outcome: Outcome,
    jobs: Sequence[Job],
    device: torch.device,
    progress: Progress,
    computing: _Computing | None,
) -> None:
    world = _world()
    hosts = hosts_of()
    sizes = [members for members in range(2, world + 1) if world % members == 0]
    # Neighbours are the innermost axis, ranks far apart the outermost.
    layouts = [(members, "inner") for members in sizes]
    layouts += [(members, "outer") for members in sizes if members < world]
    strides = sorted({1, *(world // members for members in sizes)} - {world})
    total = len(layouts) + len(strides)
    for done, (members, axis) in enumerate(layouts):
        rest = world // members
        progress(f"collectives of {members} ranks, {axis}most", done, total)
        outer, inner, stride = (rest, members, 1) if axis == "inner" else (members, rest, rest)
        mesh = Mesh((("outer", outer), ("inner", inner)))
        missing = _missing(outcome, members, stride)
        wanted = [Wanted(axis, kind, _sizes(kind, jobs), "float32") for kind in missing]
        spans = max(len({hosts[r] for r in group}) for group in mesh.groups((axis,), range(members)))
        if computing is None:
            found = measure_collectives(mesh, wanted, device)
        else:
            found = measure_collectives(
                mesh, wanted, device, computing.between_us, computing.beside, lateness=False
            )
        for (_, kind), measured in found.items():
            _keep(outcome, kind, members, stride, spans, measured)
    for done, stride in enumerate(strides):
        progress(f"messages between ranks {stride} apart", len(layouts) + done, total)
        if any(one.stride == stride for one in outcome.calibration.links):
            continue
        there, back = (0, stride), (stride, 0)
        mine = measure_links(
            [there, back], device, compute=computing.beside if computing is not None else None
        )
        ratio = measure_both_ways(0, stride, BOTH_WAYS_BYTES, device)
        told: list[Any] = [None] * world
        dist.all_gather_object(told, (mine, ratio))
        links = {pair: link for ways, _ in told for pair, link in ways.items()}
        ratios = [r for _, r in told if r is not None]
        spans = 1 if hosts[0] == hosts[stride] else 2
        both_ways, spread = statistics.median(ratios), max(links[way].spread for way in (there, back))
        _keep_link(outcome, LinkTiming(stride, spans, links[there].link, both_ways, links[back].link, spread))
    progress("communication", total, total)


def _keep(outcome: Outcome, kind: str, members: int, stride: int, hosts: int, measured: Measured) -> None:
    outcome.calibration.collectives.append(
        GroupTiming(kind, members, stride, hosts, measured.cost, measured.calls, measured.spread)
    )
    if measured.spread > NOISY_GROUP:
        outcome.warnings.append(
            f"{kind} of {members} ranks, {stride} apart: rounds differ by {100 * measured.spread:.0f} %"
        )


def _keep_link(outcome: Outcome, link: LinkTiming) -> None:
    outcome.calibration.links.append(link)
    if link.spread > NOISY:
        outcome.warnings.append(
            f"messages between ranks {link.stride} apart: rounds differ by {100 * link.spread:.0f} %"
        )


def _known_to_all(wanted: Mapping[str, object], cache: OpCache) -> frozenset[str]:
    """Signatures that no rank has to measure: all must measure the same ones at the same time."""
    mine = {key for key in wanted if key in cache.ops}
    if _world() == 1:
        return frozenset(mine)
    told: list[Any] = [None] * _world()
    dist.all_gather_object(told, {key: cache.ops[key] for key in mine})
    common = set.intersection(*(set(one) for one in told))
    for key in common:
        cache.ops[key] = told[0][key]  # equal on all ranks
    return frozenset(common)


def _median(mine: Timing | str) -> Timing | str:
    """The same on all ranks: the median time, or the trouble of one that has no time."""
    if _world() == 1:
        return mine
    told: list[Any] = [None] * _world()
    dist.all_gather_object(told, mine)
    for one in told:
        if isinstance(one, str):
            return one
    timings: Sequence[Timing] = told
    us = statistics.median(timing.us for timing in timings)
    return Timing(us, max(t.spread for t in timings), timings[0].flops, timings[0].nbytes)


def _meet() -> None:
    if _world() > 1:
        dist.barrier()


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
