"""Planning: from a job and costs to a proved plan with its prediction.

1. The schedule: a family's order, or the user's CSV.
2. Lowering: windows, orders, communicators.
3. A first simulation tells when every message has left; then sends are waited for a while after
   that, so that buffers do not pile up and no wait stands in the way.
4. Proof: `stretto.verify` on the result. Nothing that it refuses is returned.
5. Prediction: step time, exposed communication, bubble, memory, bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stretto.cost.cluster import Description, costs_of, describe, memory_limit
from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.plan import Costs, InstructionKind, Plan
from stretto.ir.program import Job
from stretto.ir.timeline import SpanKind, Timeline
from stretto.schedule.csv import read_csv
from stretto.schedule.families import make_schedule
from stretto.schedule.forward import forward_schedule
from stretto.schedule.lower import Message, lower
from stretto.schedule.sums import make_sums
from stretto.schedule.timing import peak_live
from stretto.simulate import predict, simulate
from stretto.verify import verify

SENT_MARGIN = 2.0
"""A send is waited for once this many times its predicted duration has gone by since its start. Assumed:
a message that is twice as slow as predicted still does not hold up its sender."""


def choose_schedule(job: Job, *, schedule: str | Schedule | None = None) -> Schedule:
    """Step 1. schedule: a family, the path of a CSV, or a schedule; the job's own wish by default.

    A job of forwards alone (`stretto.ir.forward`) has one possible order; a given Schedule says only where
    its stages are.

    Raises UsageError for an unknown family, for a schedule whose stages, microbatches or ranks are not the
    job's, and for one that keeps more microbatches live than the job allows.
    """
    if not job.trains:
        places = schedule.stage_ranks if isinstance(schedule, Schedule) else None
        return forward_schedule(len(job.stages), job.microbatches, places)
    wish = schedule if schedule is not None else job.schedule
    if isinstance(wish, str):
        if wish.endswith(".csv"):
            wish = read_csv(Path(wish))
        elif job.pp is not None and job.pp != len(job.stages):
            raise UsageError(
                f"the job has {len(job.stages)} stages for pp = {job.pp} ranks, and {wish!r} places one "
                "stage on each rank: give a schedule of your own (.csv), or as many stages as ranks"
            )
        else:
            return make_schedule(wish, len(job.stages), job.microbatches, max_live=job.max_live)
    for what, has, wants in (
        ("stages", wish.stages, len(job.stages)),
        ("microbatches", wish.microbatches, job.microbatches),
    ):
        if has != wants:
            raise UsageError(
                f"the schedule {wish.family!r} has {has} {what}, but the job has {wants}: write a "
                f"schedule for {wants} {what}, or capture with {has}"
            )
    if job.pp is not None and wish.ranks != job.pp:
        raise UsageError(
            f"the schedule {wish.family!r} is for {wish.ranks} ranks, but pp = {job.pp}: "
            f"give pp = {wish.ranks}"
        )
    live = max(peak_live(wish))
    if job.max_live is not None and live > job.max_live:
        raise UsageError(
            f"the schedule {wish.family!r} keeps {live} microbatches live on a stage, but max_live = "
            f"{job.max_live}: reorder it, or allow {live}"
        )
    return wish


def make_plan(
    job: Job,
    costs: Costs,
    *,
    schedule: str | Schedule | None = None,
    overlap: bool = True,
    max_bytes: int | None = None,
) -> Plan:
    """Plan the job: order, lower, prove, predict.

    Raises PlanError that lists every fault when the schedule cannot work, UsageError when it does not fit.
    """
    order = choose_schedule(job, schedule=schedule)
    if job.trains:
        verify(order)  # on its own, so that a schedule's faults are told in a schedule's words
    windows, orders, communicators = lower(job, order, overlap=overlap)
    draft = Plan(job, order, windows, orders, communicators, costs, buckets=make_sums(job, order).buckets)
    if overlap and any(i.kind is InstructionKind.SENT for instructions in orders for i in instructions):
        placed = _sent_before(draft, simulate(draft))
        windows, orders, communicators = lower(job, order, sent_before=placed)
        draft = replace(draft, orders=orders)
    verify(draft, max_bytes)
    return replace(draft, prediction=predict(draft))


def _sent_before(plan: Plan, timeline: Timeline) -> Mapping[Message, int]:
    """Step 3: message -> the sender's run before which its send is waited for."""
    # A run is one or more spans: it may wait inside, and its parts have names of their own.
    runs = {
        (rank, str(action)): at
        for rank, order in enumerate(plan.schedule.orders)
        for at, slot in enumerate(order)
        for action in slot.actions
    }
    starts = [[float("inf")] * len(order) for order in plan.schedule.orders]
    for span in timeline.spans:
        if span.kind is SpanKind.COMPUTE:
            at = runs[span.rank, span.name]
            starts[span.rank][at] = min(starts[span.rank][at], span.start_us)
    for times in starts:
        # A run without ops takes no time and has no span: it begins when the one after it does.
        for at in reversed(range(len(times) - 1)):
            times[at] = min(times[at], times[at + 1])
    makes = {
        (action.stage, phase, action.microbatch): at
        for order in plan.schedule.orders
        for at, slot in enumerate(order)
        for action in slot.actions
        for phase in action.phase.parts
    }
    found: dict[Message, int] = {}
    for span in timeline.spans:
        if span.kind is SpanKind.MESSAGE and span.sender is not None and span.sent_us is not None:
            edge, _, microbatch = span.name.removeprefix(f"{span.lane} e").partition(":")
            if not edge.isdigit():
                continue
            safe = span.sent_us + SENT_MARGIN * (span.end_us - span.sent_us)
            sends = plan.job.edges[int(edge)]
            first = makes[sends.source, sends.phase, int(microbatch)] + 1
            later = (k for k in range(first, len(starts[span.sender])) if starts[span.sender][k] > safe)
            at_run = next(later, None)
            if at_run is not None:
                found[int(edge), int(microbatch)] = at_run
    return found


def plan(
    job: Job,
    cluster: str | Description = "local",
    *,
    schedule: str | Schedule | None = None,
    overlap: bool = True,
) -> Plan:
    """Plan a captured job for a cluster.

    cluster: "local" measures ops and messages on this machine (under torchrun every rank measures its own
    stages, and all must call). A name (`h100x64`), a cluster file (.toml), a calibration (.json) or a
    `stretto.Cluster(...)` stands for one that is not at hand. schedule: a
    family, the path of a CSV in PyTorch's format, or a Schedule; the job's own wish by default. overlap:
    False waits for every message at once, the baseline against which overlap is measured.

    Returns a plan that is proved and carries its prediction. Raises PlanError that lists every fault of a
    schedule that cannot work, UsageError for what does not fit.
    """
    if not isinstance(job, Job):
        raise UsageError(f"plan takes a job, not {type(job).__name__}: call stretto.capture(...) first")
    order = choose_schedule(job, schedule=schedule)
    found = describe(cluster)
    costs = costs_of(job, order, "local" if found is None else found)
    return make_plan(job, costs, schedule=order, overlap=overlap, max_bytes=memory_limit(found))
