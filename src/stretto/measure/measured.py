"""Costs of a job measured where it will run, in "local" planning.

When the ranks of the plan are running (`torch.distributed` has as many), each measures its own stages
while all others measure theirs, as they will compute; then messages of every pair of pipeline ranks, at all
other coordinates at once; then the collectives of every axis, all groups at once. What ranks that do equal
work found is merged by the median, so all have equal costs. Ops are measured before communication and once
more after it: a machine that others use has good and bad seconds. In a single process all stages are
measured one after the other, and communication between processes started for it.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby

import torch
import torch.distributed as dist

from stretto.backend.collectives import gather_all
from stretto.errors import UsageError
from stretto.files.kept import Kept
from stretto.files.say import Say, silent
from stretto.ir.action import Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import NO_LINK, Costs, Link
from stretto.ir.flow import PHASES
from stretto.ir.mesh import Mesh
from stretto.ir.program import WAIT, Job
from stretto.ir.serialize import job_text
from stretto.measure.local_processes import measure_between
from stretto.measure.measure_collectives import Measured, measure_collectives, shared_axes
from stretto.measure.messages import measure_links
from stretto.measure.profile import STOLEN, device_name, profile
from stretto.measure.running import costs_again, running
from stretto.price.calibration import calls_us
from stretto.price.devices import named_peak
from stretto.price.shared import ACTION_US, wanted_collectives
from stretto.processor.quota import agreed_quota

_Communication = tuple[Costs, Mapping[tuple[str, str], Measured]]
"""What messages and collectives cost, without ops; and the collectives as they were measured."""


def measured_costs(job: Job, schedule: Schedule) -> Costs:
    """Measure the job's ops, messages and collectives. Raises UsageError when ranks were started but cannot
    talk, or there is no device of the job's kind."""
    return measure_forms((job,), (schedule,))[0]


def measure_forms(
    jobs: Sequence[Job], schedules: Sequence[Schedule], kept: Kept | None = None, say: Say = silent
) -> list[Costs]:
    """Costs of a step in several forms on the same ranks: communication is measured once, for all of them.
    schedules: where each one's stages are. kept: where costs are that were measured before. say: takes lines
    of what is being measured. Raises as `measured_costs` does."""
    device, mesh = device_of(jobs[0]), jobs[0].mesh(schedules[0].ranks)
    ranks = running(mesh.world, device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise UsageError(
            "several ranks were started, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before stretto.plan, so that all ranks agree on the costs"
        )

    @cache
    def communication() -> _Communication:
        if ranks.size > 1:
            return _between_ranks(jobs, schedules, mesh, device, say)
        return _between_processes(jobs, schedules[0].ranks > 1, say)

    def parts(at: int) -> list[str]:
        # What is sent is measured for all jobs at once.
        stage_ranks = [repr(one.stage_ranks) for one in schedules]
        return [*stage_ranks, str(ranks.size), str(at), *map(job_text, jobs)]

    def measure(at: int) -> Costs:
        stages = schedules[at].stages_of(mesh.pp_rank(dist.get_rank())) if ranks.size > 1 else None
        return _measured(jobs[at], stages, mesh, device, communication, say)

    return [
        costs_again(ranks, device, partial(parts, at), partial(measure, at), kept) for at in range(len(jobs))
    ]


def _measured(
    job: Job,
    stages: Sequence[int] | None,
    mesh: Mesh,
    device: torch.device,
    communication: Callable[[], _Communication],
    say: Say,
) -> Costs:
    """stages: of this rank, where all ranks run; else None."""
    say("measuring ops")
    if stages is None:
        op_us = profile(job, device).op_us
        return _costs(job, op_us, communication(), f"measured on {device_name(device)}")
    dist.barrier()  # so that all ranks load the machine at the same time, as in a step
    mine = profile(job, device, stages)
    communicates = communication()
    dist.barrier()
    say("measuring ops once more")
    mine = profile(job, device, stages, mine)
    source = f"measured on {device_name(device)}, {mesh.world} ranks at once"
    costs = _costs(job, merged(gather_all(dict(mine.op_us))), communicates, source)
    by_clock, by_thread = (
        skew_of(gather_all(stretches(job, {index: getattr(of, name) for index, of in mine.rounds.items()})))
        for name in ("shares", "thread_shares")
    )
    return with_skew(costs, by_clock, by_thread)


def _between_processes(jobs: Sequence[Job], pipelined: bool, say: Say) -> _Communication:
    wanted = wanted_collectives(*jobs)
    if not wanted and not pipelined:
        return _sent({}, NO_LINK, {})
    say("measuring communication between processes")
    probed, collectives = measure_between(Mesh(jobs[0].axes), wanted, link=pipelined)
    return _sent({}, NO_LINK if probed is None else probed.link, collectives)


def _sent(
    links: Mapping[tuple[int, int], Link], link: Link, measured: Mapping[tuple[str, str], Measured]
) -> _Communication:
    """link: of pairs that `links` does not name. An axis' communicator has the axis' name."""
    collectives = {key: one.cost for key, one in measured.items()}
    return Costs({}, links, link, ACTION_US, "", collectives), measured


def _between_ranks(
    jobs: Sequence[Job], schedules: Sequence[Schedule], mesh: Mesh, device: torch.device, say: Say
) -> _Communication:
    ends = {
        (schedule.stage_ranks[edge.source], schedule.stage_ranks[edge.target])
        for job, schedule in zip(jobs, schedules, strict=True)
        for edge in job.edges
    }
    pairs = sorted((sender, receiver) for sender, receiver in ends if sender != receiver)
    dist.barrier()  # until then other ranks measure their ops
    if pairs:
        say("measuring messages")
    links: dict[tuple[int, int], list[Link]] = defaultdict(list)
    for some in gather_all(measure_links(pairs, device, mesh)):
        for pair, one in some.items():
            links[pair].append(one.link)
    typical = {pair: typical_link(links[pair]) for pair in sorted(links)}
    measured = measure_collectives(mesh, wanted_collectives(*jobs), device, say)
    costs, _ = _sent(typical, next(iter(typical.values()), NO_LINK), measured)
    shared = shared_axes(mesh, [axis for axis, _ in mesh.sizes if axis != PIPELINE])
    return replace(costs, shared=shared, processor=agreed_quota(device)), measured


DESCRIBE = 'describe the cluster (cluster="h100x8", a file, stretto.Cluster(...))'


def device_of(job: Job, instead: str = DESCRIBE) -> torch.device:
    """The device that the job's ops run on. Raises UsageError when this machine has none; instead: what else
    to do then."""
    if job.device != "cuda":
        return torch.device(job.device)
    if not torch.cuda.is_available():
        raise UsageError(
            f"the job was captured for cuda, and this machine has no such device: {instead}, or capture for "
            "the cpu and plan again"
        )
    return torch.device("cuda", torch.cuda.current_device())


def memory_here(job: Job) -> int | None:
    """Bytes of the smallest device that a rank of the job has, equal on all ranks, which must all call it;
    None on processors, which share what there is with others. Raises UsageError when this machine has no
    device of the job's kind."""
    device = device_of(job)
    if device.type != "cuda":
        return None
    return int(min(gather_all(torch.cuda.get_device_properties(device).total_memory)))


def _costs(
    job: Job, op_us: Mapping[tuple[int, str], float], communication: _Communication, source: str
) -> Costs:
    """With what the transport's calls take added to every op that starts a collective or waits."""
    costs, measured = communication
    times = dict(op_us)
    for key, us in calls_us(job, {name: one.calls for name, one in measured.items()}).items():
        if key in times:
            times[key] += us
    peak = named_peak(job, device_name(device_of(job)))
    return replace(costs, op_us=times, source=source, peak=peak)


def with_skew(costs: Costs, by_clock: float, by_thread: float) -> Costs:
    """The costs with how much longer the slowest rank of a pipeline rank takes than they do on average.
    Under a quota what ranks differ by in time, and not in what their threads compute, is what they are
    stopped for."""
    if costs.processor is None:
        return replace(costs, skew=by_clock)
    skew = min(by_clock, by_thread)
    return replace(costs, skew=skew, processor=replace(costs.processor, skew=by_clock - skew))


def stretches(
    job: Job, shares_of: Mapping[int, Mapping[str, Sequence[float]]]
) -> dict[int, list[list[float]]]:
    """Stage -> the stretches of its programs between waits for collectives, where its ranks meet: what each
    took, by round, in microseconds. shares_of: by stage and op, the same. Sums are not timed here."""
    result: dict[int, list[list[float]]] = {}
    for index, shares in shares_of.items():
        result[index] = []
        if not shares:
            continue
        for ops in (job.stages[index].ops[phase] for phase in PHASES):
            for wait, stretch in groupby(ops, key=lambda op: op.target == WAIT):
                if not wait:
                    together = zip(*(shares[op.name] for op in stretch), strict=True)
                    result[index].append([sum(times) for times in together])
    return result


def skew_of(ranks: Sequence[Mapping[int, Sequence[Sequence[float]]]]) -> float:
    """How much longer the slowest of the ranks that share a stage computes than they do on average, as a
    share. ranks: what `stretches` says of each. Full programs would show less: what hinders one rank in one
    stretch hinders the other in the next. Rounds in which something else had a rank's processor do not count
    (`profile.STOLEN`)."""
    by_stage: dict[int, list[Sequence[Sequence[float]]]] = defaultdict(list)
    for rank in ranks:
        for stage, of in rank.items():
            by_stage[stage].append(of)
    slowest_us = mean_us = 0.0
    for sharing in by_stage.values():
        # By rank and round, in all stretches.
        totals = [[sum(round_us) for round_us in zip(*of, strict=True)] for of in sharing]
        # A rank that is slow in every round is what is looked for, and not stolen from.
        most_us = [STOLEN * statistics.median(of) if of else 0.0 for of in totals]
        counts = [
            all(us <= at_most for us, at_most in zip(together, most_us, strict=True))
            for together in zip(*totals, strict=False)
        ]
        for rounds in zip(*sharing, strict=True):
            for counted, together in zip(counts, zip(*rounds, strict=False), strict=True):
                if counted:
                    slowest_us += max(together)
                    mean_us += statistics.fmean(together)
    return slowest_us / mean_us - 1.0 if mean_us else 0.0


def merged(tables: Iterable[Mapping[tuple[int, str], float]]) -> dict[tuple[int, str], float]:
    """The median of what ranks of one pipeline rank found for each op: all must plan with equal costs."""
    result: dict[tuple[int, str], list[float]] = defaultdict(list)
    for table in tables:
        for key, us in table.items():
            result[key].append(us)
    return {key: statistics.median(times) for key, times in result.items()}


def typical_link(links: list[Link]) -> Link:
    """The median of each figure of links that do equal work."""
    figures = ("latency_us", "bytes_per_us", "processor_us_per_mb", "start_us", "processor_us")
    return replace(
        links[0], **{name: statistics.median(getattr(link, name) for link in links) for name in figures}
    )
