"""Planning: from a job and costs to a proved plan with its prediction.

1. The schedule: a family's order, or the user's CSV; then what the backward computes again.
2. Lowering, in several ways that overlap more or less (`stretto.planning.candidates`): windows, orders,
   communicators.
3. A first simulation of each tells which is fastest; that one goes on, the next if it is refused. Its last
   backwards are ordered for the sums of gradients that start in them (`stretto.planning.sums_within`).
4. The simulation also tells when every message has left; then sends are waited for a while after
   that, so that buffers do not pile up and no wait stands in the way.
5. Proof: `stretto.verify` on the result. Nothing that it refuses is returned.
6. Prediction: step time, exposed communication, bubble, memory, bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.plan import InstructionKind, Plan
from stretto.ir.program import OVERLAP_MODES, Job, OverlapMode
from stretto.ir.timeline import SpanKind, Timeline
from stretto.order.policies import DEFAULT, policy_of
from stretto.passes.messages_in_parts import messages_in_parts
from stretto.passes.split_ops import split_for_overlap
from stretto.planning.candidates import Candidate, candidates, why_less
from stretto.planning.lower import lower
from stretto.planning.recomputed import recomputed
from stretto.planning.sums_within import sums_within
from stretto.price.cluster import Description, costs_of, describe, memory_limit
from stretto.schedule.csv import read_csv
from stretto.schedule.families import make_schedule
from stretto.schedule.forward import forward_schedule
from stretto.schedule.posting import Message
from stretto.schedule.timing import peak_live
from stretto.simulate import predict, simulate
from stretto.verify import verify
from stretto.verify.memory import memory_faults

SENT_MARGIN = 2.0
"""A send is waited for once this many times its predicted duration has gone by since its start. Assumed:
a message that is twice as slow as predicted still does not hold up its sender."""

CLEAR = 0.97
"""A candidate that takes at most this share of the baseline's time over a shorter step does so over the whole
one. Assumed."""


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
    if not isinstance(wish, Schedule):
        raise UsageError(
            f"a schedule is a name, as '1f1b', a .csv file or a stretto Schedule, not {type(wish).__name__}"
        )
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
    overlap: OverlapMode | None = None,
    order: str = DEFAULT,
    max_bytes: int | None = None,
) -> Plan:
    """Plan the job: schedule, lower, overlap, prove, predict. overlap, order: as in `plan`.

    With `job.split_ops` the job is also planned with products cut (`stretto.passes.split_ops`), and the
    faster of the two plans is taken.

    Raises PlanError that lists every fault when the schedule cannot work, UsageError when it does not fit.
    """
    made = _planned(job, costs, schedule, overlap, order, max_bytes)
    cut, cut_costs = split_for_overlap(job, costs) if job.split_ops and job.trains else (job, costs)
    if cut is job:
        return made
    try:
        other = _planned(cut, cut_costs, schedule, overlap, order, max_bytes)
    except PlanError:
        return made  # more buffers than may be held
    assert made.prediction is not None
    assert other.prediction is not None
    return other if other.prediction.step_us < made.prediction.step_us else made


def _planned(
    job: Job,
    costs: Costs,
    schedule: str | Schedule | None,
    overlap: OverlapMode | None,
    order: str,
    max_bytes: int | None,
) -> Plan:
    """`make_plan` of the ops as they are."""
    asked = _overlap_mode(job.overlap if overlap is None else overlap)
    policy_of(order)  # an unknown name is told even where there is nothing to order
    chosen = choose_schedule(job, schedule=schedule)
    if job.trains:
        verify(chosen)  # on its own, so that a schedule's faults are told in a schedule's words
    job, costs = messages_in_parts(job, costs, chosen.stage_ranks)
    job, costs, max_bytes, less = _recomputed(job, costs, chosen, asked, max_bytes)
    found, missing = candidates(job, costs, chosen, asked, order)

    def tried() -> Iterator[Candidate]:
        yield from found
        if all(candidate.overlap != "off" for candidate in found):  # and all of them are refused
            yield from candidates(job, costs, chosen, "off", order)[0]

    refused: PlanError | None = None
    slow: Plan | None = None
    for candidate in tried():
        try:
            # A policy that the user chose orders last runs as well.
            made = _finished(candidate, max_bytes, within=order == DEFAULT)
        except PlanError as error:
            refused = error if refused is None or candidate.overlap == "off" else refused
            missing.append(f"{candidate.overlap} is refused: {error.faults[0]}")
            continue
        if candidate.overlap == "off" and less:
            why = less
        else:
            why = why_less(asked, candidate, found, missing) if candidate in found else missing[-1]
        made = replace(made, overlap_why=why)
        off = next((other for other in found if other.overlap == "off" and other is not candidate), None)
        if off is None or not _slower(made, candidate, off):
            return made
        slow = made if slow is None else slow
    if slow is not None:
        return slow  # waiting at once is faster, but refused
    assert refused is not None
    raise refused


def _recomputed(
    job: Job, costs: Costs, schedule: Schedule, asked: OverlapMode, max_bytes: int | None
) -> tuple[Job, Costs, int | None, str]:
    """The job with what its backward computes again, its costs, the most bytes of a rank, and why it is
    planned without overlap: where only waiting at once keeps `job.recompute`, else ""."""

    def kept_by(mode: OverlapMode) -> tuple[Job, Costs, int | None]:
        return recomputed(
            job, costs, schedule, max_bytes, lambda made, priced: _peaks(made, priced, schedule, mode)
        )

    try:
        return *kept_by(asked), ""
    except PlanError:
        if asked == "off":
            raise
        # Overlap is an upper limit, and buffers of what is waited for at once are held for less long.
        return *kept_by("off"), f"overlap holds more than recompute = {job.recompute:,} bytes a rank"


def _slower(made: Plan, candidate: Candidate, off: Candidate) -> bool:
    """Whether the finished plan is slower than waiting at once, where the comparison was close."""
    if candidate.step_us < CLEAR * off.step_us:
        return False
    assert made.prediction is not None
    return simulate(off.make()).step_us < made.prediction.step_us


def _peaks(job: Job, costs: Costs, schedule: Schedule, overlap: OverlapMode) -> tuple[int, ...]:
    """The most bytes of each rank, with the ops of windows as captured: an order of ops keeps that limit, and
    pairs that hold more are refused."""
    found, _ = candidates(job, costs, schedule, "off" if overlap == "off" else "local", "captured")
    # Of a step at even speed: one by chance holds the same, and a promise would take twelve of them.
    return simulate(_lowered(max(found, key=lambda one: one.overlap != "off"))).peak_bytes


def _overlap_mode(text: str) -> OverlapMode:
    for mode in OVERLAP_MODES:
        if text == mode:
            return mode
    raise UsageError(f"overlap is {text!r}; choose one of: {', '.join(OVERLAP_MODES)}")


def _finished(candidate: Candidate, max_bytes: int | None, *, within: bool) -> Plan:
    """Steps 3 to 6 for a candidate. within: whether last backwards are ordered for sums of gradients. Raises
    PlanError for one that cannot work."""
    draft = _lowered(candidate, within=within)
    if within and max_bytes is not None and memory_faults(draft, max_bytes):
        draft = _lowered(candidate)  # sums that start early hold their buffers for longer
    verify(draft, max_bytes)
    return replace(draft, prediction=predict(draft))


def _lowered(candidate: Candidate, *, within: bool = False) -> Plan:
    """Step 4 for a candidate. Raises PlanError for one whose ranks wait for each other for ever."""
    draft = candidate.make()
    if within:
        draft = sums_within(draft)
    sends = any(i.kind is InstructionKind.SENT for order in draft.orders for i in order)
    if sends and draft.overlap != "off":
        placed = _sent_before(draft, simulate(draft))
        _, orders, _ = lower(
            draft.job, draft.schedule, overlap=draft.overlap, windows=draft.windows, sent_before=placed
        )
        draft = replace(draft, orders=orders)
    return draft


def _sent_before(plan: Plan, timeline: Timeline) -> Mapping[Message, int]:
    """Step 4: message -> the sender's run before which its send is waited for."""
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
    overlap: OverlapMode | None = None,
    order: str = DEFAULT,
) -> Plan:
    """Plan a captured job for a cluster.

    cluster: "local" measures ops and messages on this machine (under torchrun every rank measures its own
    stages, and all must call). A name (`h100x64`), a cluster file (.toml), a calibration (.json) or a
    `stretto.Cluster(...)` stands for one that is not at hand. schedule: a
    family, the path of a CSV in PyTorch's format, or a Schedule; the job's own wish by default.
    overlap: "off" waits for every communication at once, the baseline against which overlap is measured;
    "local" orders the ops within each action; "window" also joins forwards and backwards of different
    microbatches. Of what is allowed, the fastest by prediction is taken; the job's own wish by default.
    order: the policy that orders ops in windows: "improve", "list", "exact" (needs `ortools`), "captured", or
    one of your own (`stretto.order.register`).

    Returns a plan that is proved and carries its prediction. Raises PlanError that lists every fault of a
    schedule that cannot work, UsageError for what does not fit.
    """
    if not isinstance(job, Job):
        raise UsageError(f"plan takes a job, not {type(job).__name__}: call stretto.capture(...) first")
    chosen = choose_schedule(job, schedule=schedule)
    found = describe(cluster)
    costs = costs_of(job, chosen, "local" if found is None else found)
    most = memory_limit(found, job)
    return make_plan(job, costs, schedule=chosen, overlap=overlap, order=order, max_bytes=most)
