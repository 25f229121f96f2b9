"""Planning: from a job and costs to a proved plan with its prediction.

1. The schedule: a family's order, or the user's CSV; of "auto", the most promising (`stretto.planning.auto`),
   for each of which all that follows is done, and the fastest is taken.
2. Variants: lists of passes (`stretto.planning.choose`). The fastest goes on, the next if it is refused.
3. What ends it: orders of last runs, and when messages are waited for (`stretto.planning.finish`).
4. Proof: `stretto.verify` on the result. Nothing that it refuses is returned.
5. Prediction: step time, exposed communication, bubble, memory, bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stretto.backend.process_memory import rarely_collected
from stretto.errors import PlanError, UsageError, meant
from stretto.files.kept import Kept, key_of
from stretto.files.say import Say
from stretto.files.typed_file import to_line
from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.parameters import STATES
from stretto.ir.plan import Plan
from stretto.ir.prices import Prices
from stretto.ir.program import OVERLAP_MODES, Job, OptimizerKind, OverlapMode
from stretto.ir.serialize import CODEC, job_text
from stretto.ir.stage_maps import AUTO
from stretto.measure.measured import device_of, measure_forms, memory_here
from stretto.measure.running import running
from stretto.order.policies import BUILT_IN, DEFAULT, WITH_LAST_RUNS, policy_of
from stretto.passes import OWN
from stretto.passes.step import Context, Effort, LeftOutError, Step, Watch
from stretto.planning.auto import fastest, fastest_schedule, predicted_us
from stretto.planning.choose import Variants, communicates, names, overlaps
from stretto.planning.finish import receives_ahead, reductions_within, sends_waited
from stretto.planning.here import agree_on, plan_on_first
from stretto.planning.peaks import Peaks
from stretto.planning.schedules import choose_schedule, forms_with, of_short, shorter
from stretto.planning.tried import WORTH, Tried, why_less, why_zero
from stretto.planning.windows import lowered
from stretto.price.alike import ListedPricer
from stretto.price.cluster import Description, describe, described
from stretto.schedule.families import BUILT_IN as BUILT_IN_FAMILIES
from stretto.schedule.families import FAMILIES
from stretto.schedule.once import without_once
from stretto.simulating import predict
from stretto.verifying import verify
from stretto.verifying.memory import MemoryFault, memory_faults

ROOMS = 2
"""Times that more is computed again where a limit of memory leaves messages no room. Assumed: the second is
for what the first has changed."""


def make_plan(
    job: Job,
    costs: Costs,
    *,
    schedule: str | Schedule | None = None,
    overlap: OverlapMode | None = None,
    order: str = DEFAULT,
    steps: int | None = None,
    search_s: float | None = None,
    max_bytes: int | None = None,
    say: Say | None = None,
) -> Plan:
    """Plan the job with given costs; ops that passes make are priced by those like them. overlap, order,
    steps, search_s, say: as in `plan`. max_bytes: the most bytes of a rank.

    Raises PlanError that lists every fault when the schedule cannot work, UsageError when it does not fit.
    """
    job = replace(without_once(job), recipe=None)  # with the model, which a plan does not keep
    wished = _wished(job, schedule, overlap, order, steps, search_s, say)
    begun = partial(
        _begun, job, choose_schedule(job, schedule=schedule), listed(job, costs), wished, max_bytes
    )
    return _fastest([begun], wished)


@dataclass(frozen=True, slots=True)
class _Wished:
    """What a plan is to be, besides its job and its schedule: arguments of `plan`."""

    overlap: OverlapMode
    order: str
    effort: Effort
    watch: Watch
    auto: bool = False


def _wished(
    job: Job,
    schedule: str | Schedule | None,
    overlap: OverlapMode | None,
    order: str,
    steps: int | None,
    search_s: float | None,
    say: Say | None,
) -> _Wished:
    """Raises UsageError for what is not known."""
    asked = job.overlap if overlap is None else overlap
    if asked not in OVERLAP_MODES:
        raise UsageError(
            f"overlap is {asked!r}; {meant(asked, OVERLAP_MODES)}choose one of: {', '.join(OVERLAP_MODES)}"
        )
    policy_of(order)  # an unknown name is refused even where there is nothing to order
    effort = Effort(search_s=search_s) if steps is None else Effort(steps, search_s)
    auto = job.trains and (job.schedule if schedule is None else schedule) == AUTO
    return _Wished(asked, order, effort, Watch(say), auto)


@rarely_collected()
def _fastest(begun: Sequence[Callable[[], Variants]], wished: _Wished) -> Plan:
    """The fastest plan of all; for "auto", of all schedules."""
    make = partial(fastest_schedule, make=_made) if wished.auto else _made
    return fastest(begun, make, wished.watch, anywhere=wished.auto)


def _begun(job: Job, chosen: Schedule, prices: Prices, wished: _Wished, max_bytes: int | None) -> Variants:
    """What step 1 has chosen, and the variants of step 2."""
    if job.trains:
        verify(chosen)  # on its own, so that a schedule's faults are described as such
    step = Step(job, chosen, shorter(chosen), "local", max_bytes, wished.overlap)
    if overlaps(step) and communicates(job):
        step = replace(step, overlap=wished.overlap)
    return Variants(step, Context(prices, wished.order, Peaks(prices), wished.effort, wished.watch))


def variants_of(job: Job, cluster: Description, order: str) -> Variants:
    """Steps 1 and 2 for a description: of the schedule that the job wishes, which is not "auto"."""
    job = without_once(job)
    chosen = choose_schedule(job)
    wished = _wished(job, None, None, order, None, None, None)
    return _begun(job, chosen, prices_of(job, chosen, cluster), wished, cluster.memory_bytes)


def _made(variants: Variants) -> Plan:
    """Steps 2 to 5. Where waiting for everything at once is not clearly slower over few microbatches, the
    full steps of both are compared."""
    tried, watch = variants.best_first(), variants.context.watch
    refused: dict[OverlapMode, PlanError] = {}
    for at, one in enumerate(tried):
        made = [*_finished_if_legal(variants, one, tried, refused)]
        if not made:
            continue
        off = next((other for other in tried[at:] if other.overlap == "off"), one)
        if off is not one and not watch.stopped and one.step_us >= WORTH * off.step_us:
            made += _finished_if_legal(variants, off, tried, refused)
        return min(made, key=predicted_us)
    raise refused.get("off") or next(iter(refused.values()))


def _finished_if_legal(
    variants: Variants, one: Tried, tried: Sequence[Tried], refused: dict[OverlapMode, PlanError]
) -> Iterator[Plan]:
    """The plan of a variant, or none where it is refused."""
    variants.context.watch.report(f"{names(one.variant)}: messages and proof")
    try:
        made = _finished_with_room(variants, one)
    except PlanError as error:
        refused.setdefault(one.overlap, error)
        variants.missing.append(f"{one.overlap} is refused: {error.faults[0]}")
    else:
        first, limit = variants.first, variants.step(one.variant[: one.begin]).max_bytes
        zero_why = why_zero(first.job.zero, one, tried, limit, variants.not_full, of_short(first))
        less_why = why_less(first.asked, one, tried, variants.missing)
        yield replace(made, overlap_why=less_why, zero_why=zero_why)


def _finished_with_room(variants: Variants, one: Tried) -> Plan:
    """The plan of a variant. Where it keeps a bit more than a limit that recomputation was to keep, as
    messages are live for longer in the order of its ops, more is computed again."""
    rooms = ROOMS if isinstance(variants.first.job.recompute, int) and one.overlap != "off" else 0
    while True:
        try:
            return _finished_anyway(partial(variants.step, one.variant), variants.context, one.peak_bytes)
        except PlanError as error:
            roomier = _roomier(variants, one, error) if rooms and not variants.context.watch.stopped else None
            if roomier is None:
                raise
            variants, rooms = roomier, rooms - 1


def _roomier(variants: Variants, one: Tried, error: PlanError) -> Variants | None:
    """Those in which a variant that is refused leaves room for what it has too much; None where it is refused
    for something else, or where only waiting at once keeps so little."""
    has = [fault.holds_bytes for fault in error.faults if isinstance(fault, MemoryFault)]
    step = variants.step(one.variant) if has else variants.first
    if not has or step.max_bytes is None:
        return None
    more = max(has) - step.max_bytes
    variants.context.watch.report(f"{names(one.variant)}: {more:,} bytes more are computed again")
    roomier = variants.roomier(2 * more)
    try:
        return roomier if roomier.step(one.variant).asked == step.asked else None
    except (PlanError, LeftOutError):
        return None


def _finished_anyway(step: Callable[[], Step], context: Context, peak_bytes: int) -> Plan:
    """Steps 3 to 5, and once more after an interrupt that meant the search. step: makes it, which for all
    microbatches takes longer than for those by which variants were compared."""
    try:
        return _finished(step(), context, peak_bytes)
    except KeyboardInterrupt as error:
        context.watch.stop(error)
    return _finished(step(), context, peak_bytes)


def _finished(step: Step, context: Context, peak_bytes: int) -> Plan:
    """Steps 3 to 5. peak_bytes: of a rank, when sends are waited for at the end. Raises PlanError for a step
    that cannot work."""
    if step.max_bytes is not None and peak_bytes > step.max_bytes:
        # What follows never needs less, and takes longer than this.
        faults = memory_faults(lowered(sends_waited(step, context), context), step.max_bytes)
        if faults:
            raise PlanError("the plan cannot run", faults)
    early = reductions_within(step, context) if context.order in WITH_LAST_RUNS else step
    draft = _with_messages(early, context)
    verify(draft, step.max_bytes)
    return replace(draft, prediction=predict(draft))


def _with_messages(step: Step, context: Context) -> Plan:
    """Lowered, with receives as early and waits for sends as late as messages need them."""
    return lowered(sends_waited(receives_ahead(step, context), context), context)


def plan(
    job: Job,
    cluster: str | Description = "local",
    *,
    schedule: str | Schedule | None = None,
    overlap: OverlapMode | None = None,
    order: str = DEFAULT,
    steps: int | None = None,
    search_s: float | None = None,
    say: Say | None = None,
    kept: Kept | None = None,
    optimizer: OptimizerKind | None = None,
) -> Plan:
    """Plan a captured job for a cluster.

    cluster: "local" measures ops and messages on this machine (under torchrun every rank measures its own
    stages, rank 0 plans for all, and all must call). A name (`h100x64`), a cluster file (.toml), a
    calibration (.json) or a `stretto.Cluster(...)` describes one that is not at hand.
    schedule: a family, the path of a CSV in PyTorch's format, a Schedule, or "auto" for the fastest that the
    search comes to; the job's own wish by default.
    overlap: "off" waits for every communication at once, the baseline against which overlap is measured;
    "local" orders the ops within each action; "window" also joins forwards and backwards of different
    microbatches. Of what is allowed, the fastest by prediction is taken; the job's own wish by default.
    order: the policy that orders ops in windows: "improve", "list", "captured", or
    one of your own (`stretto.order.register`).
    steps: of the run that the plan is for; "improve" searches as long as a shorter step saves over it. 1,000
    are assumed without it. search_s: instead, about how many seconds of a processor core the longest search
    takes. It is counted in orders walked, so that equal jobs get equal plans on all machines.
    say: takes lines of what is tried; an interrupt (Ctrl-C) then takes the best so far, where there is one.
    kept: with "local", where costs and plans of earlier runs are kept.
    optimizer: whose state counts in a rank's memory: "adamw", which is what a captured job has, "momentum" or
    "sgd" (`stretto.ir.parameters.STATES`).

    Returns a plan that is proved and carries its prediction. Raises PlanError that lists every fault of a
    schedule that cannot work, UsageError for what does not fit.
    """
    if not isinstance(job, Job):
        raise UsageError(f"plan takes a job, not {type(job).__name__}: call stretto.capture(...) first")
    description = describe(cluster)
    job = replace(without_once(job), recipe=None)  # with the model, which a plan does not keep
    wished = _wished(job, schedule, overlap, order, steps, search_s, say)
    jobs, chosen = forms_with(job, schedule)
    if optimizer is not None:
        if optimizer not in STATES:
            raise UsageError(f"optimizer is {optimizer!r}; choose one of: {', '.join(STATES)}")
        jobs = [replace(one, optimizer=optimizer) for one in jobs]
    if description is None:
        return _planned_here(jobs, chosen, wished, kept)

    def begun(one: Job, its_schedule: Schedule) -> Variants:
        wished.watch.report("what its ops and messages take")
        prices = prices_of(one, its_schedule, description)
        return _begun(one, its_schedule, prices, wished, description.memory_bytes)

    return _fastest([partial(begun, *one) for one in zip(jobs, chosen, strict=True)], wished)


def _planned_here(
    jobs: Sequence[Job], chosen: Sequence[Schedule], wished: _Wished, kept: Kept | None
) -> Plan:
    """Where the plan will run: all ranks measure, one plans."""
    ranks = running(jobs[0].mesh(chosen[0].ranks).world, device_of(jobs[0]))
    wishes = {
        "job": key_of(*map(job_text, jobs)),
        "schedule": " ".join([AUTO if wished.auto else "", *(to_line(one, CODEC) for one in chosen)]),
        "overlap": wished.overlap,
        "order": wished.order,
        "search": repr(wished.effort),
    }
    if ranks.size > 1:
        agree_on(ranks, wishes)  # before they measure, which would not come together
    costs = measure_forms(jobs, chosen, kept, wished.watch.report)
    limits = [memory_here(one) for one in jobs]
    begun = [
        partial(_begun, one, schedule, listed(one, cost), wished, limit)
        for one, schedule, cost, limit in zip(jobs, chosen, costs, limits, strict=True)
    ]
    wishes |= {"costs": key_of(*map(to_line, costs)), "memory": str(limits)}
    # Nothing shows whether a policy or pass of the user's has changed, nor a family that "auto" chooses from.
    own = wished.order not in BUILT_IN or bool(OWN) or (wished.auto and FAMILIES.keys() > BUILT_IN_FAMILIES)
    return plan_on_first(ranks, wishes, partial(_fastest, begun, wished), None if own else kept, wished.watch)


def prices_of(job: Job, schedule: Schedule, description: Description) -> Prices:
    """The price lists of a job, and of what passes make of it. Raises UsageError for a job that does not
    fit."""
    costs, pricer = described(job, schedule, description)
    return Prices(job, costs, pricer, keep=False)


def listed(job: Job, costs: Costs) -> Prices:
    """Price lists by given costs of a job: what passes make of it is priced by what is like it."""
    return Prices(job, costs, ListedPricer(job, costs), keep=True)
