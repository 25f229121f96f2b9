"""Measuring a machine, or a cluster under torchrun, for later planning: what `stretto calibrate` does.

    1. Ops: each distinct op of the given jobs once, or a sweep. Under torchrun all ranks measure the same ops
       at once, as they will compute, and the median counts.
    2. Collectives of every kind, for every group size that divides the world: of neighbours, as the
       innermost axis has them, and of ranks as far apart as the outermost has them.
    3. Messages between neighbours and across the world, each way.

Everything found goes into one `Calibration` as it comes, so that a run that is cut short keeps it, and what a
calibration already has is not measured again. Touches no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from stretto.backend.collectives import gather_all
from stretto.errors import StrettoError
from stretto.ir.axes import TENSOR
from stretto.ir.collectives import PRICED
from stretto.ir.mesh import Mesh
from stretto.ir.prices import Specs, signature
from stretto.ir.program import Job, Op
from stretto.measure.local_processes import measure_between
from stretto.measure.measure_collectives import Measured, measure_collectives
from stretto.measure.messages import measure_links
from stretto.measure.time_ops import distinct_ops, sweep_ops, time_op
from stretto.price.calibration import Calibration, GroupTiming, LinkTiming, Timing
from stretto.price.shared import WantedCollective, wanted_collectives
from stretto.processor.control_groups import host

NOISY = 0.25
"""A spread of rounds above this is reported: the machine did other work. Measured on two shared cores, the
faster half of an idle machine's rounds is within a tenth."""

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


def calibrate_ops(outcome: Outcome, jobs: Iterable[Job], device: torch.device, progress: Progress) -> None:
    """Step 1; all ranks have equal calibrations."""
    ops = outcome.calibration.ops
    wanted: Mapping[str, tuple[Op, Specs]] = distinct_ops(jobs) or {
        signature(op, specs): (op, specs) for op, specs in sweep_ops(device.type)
    }
    for done, (key, (op, specs)) in enumerate(wanted.items()):
        progress(op.target, done, len(wanted))
        if key in ops:
            outcome.cached += 1
            if ops[key].spread > NOISY:
                outcome.warnings.append(
                    f"{key}: rounds differed by {100 * ops[key].spread:.0f} % when it was measured; "
                    "--fresh measures it again"
                )
            continue
        if dist.is_initialized():
            dist.barrier()
        try:
            mine: Timing | str = time_op(op, specs, device)
        except StrettoError as error:
            mine = str(error)
        agreed = _median(mine)
        if isinstance(agreed, str):
            outcome.warnings.append(agreed)
            continue
        ops[key] = agreed
        outcome.measured += 1
        _warn_of_noise(outcome, key, agreed.spread, NOISY)
    progress("ops", len(wanted), len(wanted))


def calibrate_communication(
    outcome: Outcome, jobs: Sequence[Job], device: torch.device, progress: Progress
) -> None:
    """Steps 2 and 3: between the running ranks, or processes started for it when there is one alone. What the
    collectives of `jobs` move is measured before other sizes."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _between_ranks(outcome, jobs, device, progress)
    else:
        _between_processes(outcome, jobs, progress)


def _between_processes(outcome: Outcome, jobs: Sequence[Job], progress: Progress) -> None:
    for done, members in enumerate(LOCAL_GROUPS):
        progress(f"collectives of {members} processes", done, len(LOCAL_GROUPS))
        wanted = _missing(outcome, jobs, TENSOR, members, 1)
        link = members == 2 and not outcome.calibration.links
        if not wanted and not link:
            continue
        probed, collectives = measure_between(Mesh(((TENSOR, members),)), wanted, link=link)
        if probed is not None:
            _keep_link(outcome, LinkTiming(1, 1, probed.link, spread=probed.spread))
        _keep(outcome, collectives, members, 1, 1)
    progress("communication", len(LOCAL_GROUPS), len(LOCAL_GROUPS))


def _missing(
    outcome: Outcome, jobs: Sequence[Job], axis: str, members: int, stride: int
) -> list[WantedCollective]:
    known = {(one.kind, one.members, one.stride) for one in outcome.calibration.collectives}
    return [
        WantedCollective(axis, kind, _sizes(kind, jobs), "float32")
        for kind in PRICED
        if (kind, members, stride) not in known
    ]


def _sizes(kind: str, jobs: Sequence[Job]) -> tuple[int, ...]:
    """What collectives of a kind move in the jobs, on whatever axis, and sizes around an activation's."""
    alike = [one for job in jobs for one in wanted_collectives(job) if one.kind == kind]
    asked = [size for one in alike for size in one.sizes if size <= MOST_BYTES]
    return tuple(dict.fromkeys((*asked, *SIZES)))


def _between_ranks(outcome: Outcome, jobs: Sequence[Job], device: torch.device, progress: Progress) -> None:
    world = dist.get_world_size()
    hosts = gather_all(host())
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
        spans = max(len({hosts[r] for r in group}) for group in mesh.groups((axis,), range(members)))
        result = measure_collectives(mesh, _missing(outcome, jobs, axis, members, stride), device)
        _keep(outcome, result, members, stride, spans)
    for done, stride in enumerate(strides):
        progress(f"messages between ranks {stride} apart", len(layouts) + done, total)
        if any(one.stride == stride for one in outcome.calibration.links):
            continue
        there, back = (0, stride), (stride, 0)
        links = {
            pair: link
            for ways in gather_all(measure_links([there, back], device))
            for pair, link in ways.items()
        }
        spans = 1 if hosts[0] == hosts[stride] else 2
        spread = max(links[way].spread for way in (there, back))
        _keep_link(outcome, LinkTiming(stride, spans, links[there].link, links[back].link, spread))
    progress("communication", total, total)


def _keep(
    outcome: Outcome, found: Mapping[tuple[str, str], Measured], members: int, stride: int, hosts: int
) -> None:
    for (_, kind), one in found.items():
        outcome.calibration.collectives.append(
            GroupTiming(kind, members, stride, hosts, one.cost, one.calls, one.spread)
        )
        _warn_of_noise(outcome, f"{kind} of {members} ranks, {stride} apart", one.spread, NOISY_GROUP)


def _keep_link(outcome: Outcome, link: LinkTiming) -> None:
    outcome.calibration.links.append(link)
    _warn_of_noise(outcome, f"messages between ranks {link.stride} apart", link.spread, NOISY)


def _warn_of_noise(outcome: Outcome, what: str, spread: float, noisy: float) -> None:
    if spread > noisy:
        outcome.warnings.append(f"{what}: rounds differ by {100 * spread:.0f} %; the machine does other work")


def _median(mine: Timing | str) -> Timing | str:
    """The same on all ranks: the median time, or the trouble where there is no time."""
    timings: list[Timing] = []
    for one in gather_all(mine):
        if isinstance(one, str):
            return one
        timings.append(one)
    us = statistics.median(timing.us for timing in timings)
    return Timing(us, max(t.spread for t in timings), timings[0].flops, timings[0].nbytes)
