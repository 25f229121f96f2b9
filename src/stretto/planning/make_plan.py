"""Planning: from a job and costs to a proved plan with its prediction.

1. The schedule: a family's order, or the user's CSV; of "auto", the most promising
   (`stretto.planning.search`), for each of which all that follows is done, and the fastest is taken.
2. Variants: lists of passes (`stretto.planning.variants`) that overlap more or less.
3. Each is tried: passes, orders of ops, lowering, a simulation (`stretto.planning.tries`). The fastest goes
   on, the next if it is refused.
4. Its last backwards are ordered for the sums of gradients that start in them
   (`stretto.planning.sums_within`); simulations tell how long before their use receives are posted
   (`stretto.planning.receives`), and when every message has left (`stretto.planning.sends`).
5. Proof: `stretto.verify` on the result. Nothing that it refuses is returned.
6. Prediction: step time, exposed communication, bubble, memory, bound.
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
from stretto.measure.measured import Measuring, device_of
from stretto.measure.running import running
from stretto.order.policies import DEFAULT, OWN, policy_of
from stretto.passes.dense_messages import scattered
from stretto.passes.effort import Effort
from stretto.passes.step import Context, Step
from stretto.passes.watch import Watch
from stretto.planning.choose import choose_schedule, forms_with
from stretto.planning.costs import listed, memory_limit, pricing
from stretto.planning.forms import fastest
from stretto.planning.here import agree_on, plan_on_first
from stretto.planning.receives import receives_ahead
from stretto.planning.schedules import shorter
from stretto.planning.search import fastest_schedule
from stretto.planning.sends import sends_waited
from stretto.planning.sums_within import sums_within
from stretto.planning.tries import Tried, Tries, why_less
from stretto.planning.variants import communicates, names, overlaps, ways
from stretto.planning.windows import at_once, lowered
from stretto.price.cluster import Description, describe
from stretto.schedule.families import FAMILIES
from stretto.schedule.families import OWN as OWN_FAMILIES
from stretto.schedule.sums import without_sums
from stretto.simulating import predict, simulate
from stretto.verifying import verify
from stretto.verifying.memory import memory_faults

CLEAR = 0.97
"""A variant that takes at most this share of the baseline's time over a shorter step does so over the whole
one. Assumed."""


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
    steps, search_s, say: as in `plan`. max_bytes: the most that a rank may hold.

    Raises PlanError that lists every fault when the schedule cannot work, UsageError when it does not fit.
    """
    job = without_sums(job)
    wished = _Wished(overlap, order, _effort(steps, search_s), Watch(say))
    begun = partial(
        _begun, job, choose_schedule(job, schedule=schedule), listed(job, costs), wished, max_bytes
    )
    return _fastest([begun], job, schedule, wished.watch)


@dataclass(frozen=True, slots=True)
class _Wished:
    """What a plan is to be, beside its job and its schedule: arguments of `plan`."""

    overlap: OverlapMode | None
    order: str
    effort: Effort
    watch: Watch


def _effort(steps: int | None, search_s: float | None) -> Effort:
    return Effort(search_s=search_s) if steps is None else Effort(steps, search_s)


@rarely_collected()
def _fastest(
    begun: Sequence[Callable[[], Tries]], job: Job, schedule: str | Schedule | None, watch: Watch
) -> Plan:
    """The fastest plan of all; for "auto", of all schedules."""
    auto = job.trains and (job.schedule if schedule is None else schedule) == AUTO
    if auto:
        return fastest(begun, partial(fastest_schedule, make=_made), watch, anywhere=True)
    return fastest(begun, _made, watch)


def _begun(job: Job, chosen: Schedule, prices: Prices, wished: _Wished, max_bytes: int | None) -> Tries:
    """What step 1 has chosen, and the variants of step 2."""
    asked = _overlap_mode(job.overlap if wished.overlap is None else wished.overlap)
    policy_of(wished.order)  # an unknown name is told even where there is nothing to order
    if job.trains:
        verify(chosen)  # on its own, so that a schedule's faults are told in a schedule's words
    step = Step(job, chosen, shorter(chosen), "local", max_bytes, asked)
    if overlaps(step) and communicates(job):
        step = replace(step, overlap=asked)
    peaks = partial(_peaks, prices=prices)
    return Tries(step, Context(prices, wished.order, peaks, wished.effort, wished.watch))


def tries_of(job: Job, found: Description, order: str) -> Tries:
    """Steps 1 and 2 for a description: of the schedule that the job wishes, which is not "auto"."""
    job = without_sums(job)
    chosen = choose_schedule(job)
    wished = _Wished(None, order, _effort(None, None), Watch(None))
    return _begun(job, chosen, pricing((job,), (chosen,), found)(job), wished, memory_limit(found, job))


def _made(tries: Tries) -> Plan:
    """Steps 3 to 6."""
    asked, context = tries.first.asked, tries.context
    found = tries.best_first(context.order)
    refused: dict[OverlapMode, PlanError] = {}

    def finished(tried: Tried) -> Iterator[Plan]:
        context.watch.tell(f"{names(tried.variant)}: messages and proof")
        try:
            made = _finished_anyway(partial(tries.step, tried.variant), context)
        except PlanError as error:
            refused.setdefault(tried.overlap, error)
            tries.missing.append(f"{tried.overlap} is refused: {error.faults[0]}")
        else:
            yield replace(made, overlap_why=why_less(asked, tried, found, tries.missing))

    for at, tried in enumerate(found):
        made = [*finished(tried)]
        if not made:
            continue
        off = next((one for one in found[at:] if one.overlap == "off"), tried)
        if off is not tried and not context.watch.stopped and tried.step_us >= CLEAR * off.step_us:
            made += finished(off)
        return min(made, key=_predicted_us)
    raise refused.get("off") or next(iter(refused.values()))


def _predicted_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


def _peaks(step: Step, *, prices: Prices) -> tuple[int, ...]:
    """The most bytes of each rank, with the ops of windows as captured: an order of ops keeps that limit, and
    pairs that hold more are refused."""
    context = Context(prices, "captured", partial(_peaks, prices=prices))
    step = replace(step, asked="off" if step.asked == "off" else "local")
    tries = Tries(step, context)
    found = [way for way in ways(step, "captured") if step.asked == "off" or at_once not in way]
    fastest = min(tries.compared(found), key=lambda one: one.step_us)
    done = sends_waited(tries.step(fastest.variant), context)
    # Of a step at even speed: one by chance holds the same, and a promise would take twelve of them.
    return simulate(lowered(done, context)).peak_bytes


def _overlap_mode(text: str) -> OverlapMode:
    for mode in OVERLAP_MODES:
        if text == mode:
            return mode
    raise UsageError(
        f"overlap is {text!r}; {meant(text, OVERLAP_MODES)}choose one of: {', '.join(OVERLAP_MODES)}"
    )


def _finished_anyway(step: Callable[[], Step], context: Context) -> Plan:
    """Steps 4 to 6, and once more after an interrupt that meant the search. step: makes it, which for all
    microbatches takes longer than for those by which variants were compared."""
    try:
        return _finished(step(), context)
    except KeyboardInterrupt as error:
        context.watch.stop(error)
    return _finished(step(), context)


def _finished(step: Step, context: Context) -> Plan:
    """Steps 4 to 6. Raises PlanError for a step that cannot work."""
    # A policy that the user chose orders last runs as well.
    early = sums_within(step, context) if context.order == DEFAULT else step
    draft = _with_messages(early, context)
    if early is not step and step.max_bytes is not None and memory_faults(draft, step.max_bytes):
        # Sums that start early hold their buffers for longer.
        draft = _with_messages(step, context)
    verify(draft, step.max_bytes)
    copied = scattered(draft.job, draft.schedule.stage_ranks)
    assert not copied, f"transports would copy {copied}"
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
    calibration (.json) or a `stretto.Cluster(...)` stands for one that is not at hand.
    schedule: a family, the path of a CSV in PyTorch's format, a Schedule, or "auto" for the fastest that is
    found; the job's own wish by default.
    overlap: "off" waits for every communication at once, the baseline against which overlap is measured;
    "local" orders the ops within each action; "window" also joins forwards and backwards of different
    microbatches. Of what is allowed, the fastest by prediction is taken; the job's own wish by default.
    order: the policy that orders ops in windows: "improve", "list", "exact" (needs `ortools`), "captured", or
    one of your own (`stretto.order.register`).
    steps: of the run that the plan is for; "improve" searches as long as a shorter step saves over it. 1,000
    are assumed without it. search_s: instead, about how many seconds of a processor core the longest search
    takes. It is counted in orders walked, so that equal jobs get equal plans on all machines.
    say: takes lines of what is tried; an interrupt (Ctrl-C) then takes the best so far, where there is one.
    kept: with "local", where costs and plans of earlier runs are found, and kept.
    optimizer: whose state counts in a rank's memory: "adamw", which is what a captured job has, "momentum" or
    "sgd" (`stretto.ir.parameters.STATES`).

    Returns a plan that is proved and carries its prediction. Raises PlanError that lists every fault of a
    schedule that cannot work, UsageError for what does not fit.
    """
    if not isinstance(job, Job):
        raise UsageError(f"plan takes a job, not {type(job).__name__}: call stretto.capture(...) first")
    found = describe(cluster)
    _overlap_mode(job.overlap if overlap is None else overlap)  # names are told before anything is measured
    policy_of(order)
    job = without_sums(job)
    wished = _Wished(overlap, order, _effort(steps, search_s), Watch(say))
    jobs, chosen = forms_with(job, schedule)
    if optimizer is not None:
        if optimizer not in STATES:
            raise UsageError(f"optimizer is {optimizer!r}; choose one of: {', '.join(STATES)}")
        jobs = [replace(one, optimizer=optimizer) for one in jobs]
    if found is None:
        return _planned_here(jobs, chosen, schedule, wished, kept)
    priced = pricing(jobs, chosen, found)

    def begun(one: Job, schedule: Schedule) -> Tries:
        wished.watch.tell("what its ops and messages take")
        return _begun(one, schedule, priced(one), wished, memory_limit(found, one))

    begins = [partial(begun, one, schedule) for one, schedule in zip(jobs, chosen, strict=True)]
    return _fastest(begins, job, schedule, wished.watch)


def _planned_here(
    jobs: Sequence[Job],
    chosen: Sequence[Schedule],
    schedule: str | Schedule | None,
    wished: _Wished,
    kept: Kept | None,
) -> Plan:
    """Where the plan will run: all ranks measure, one plans."""
    job = jobs[0]
    asked = _overlap_mode(job.overlap if wished.overlap is None else wished.overlap)
    device = device_of(job)
    ranks = running(job.mesh(chosen[0].ranks).world, device)
    auto = job.trains and (job.schedule if schedule is None else schedule) == AUTO
    wishes = {
        "job": key_of(*map(job_text, jobs)),
        "schedule": " ".join([AUTO if auto else "", *(to_line(one, CODEC) for one in chosen)]),
        "overlap": asked,
        "order": wished.order,
        "search": repr(wished.effort),
    }
    if ranks.size > 1:
        agree_on(ranks, wishes)  # before they measure, which would not come together
    measuring = Measuring(jobs, chosen, kept, wished.watch.tell)
    costs = [measuring.costs_of(one) for one in jobs]
    limits = [memory_limit(None, one) for one in jobs]
    begun = [
        partial(_begun, one, schedule, listed(one, cost), wished, limit)
        for one, schedule, cost, limit in zip(jobs, chosen, costs, limits, strict=True)
    ]
    wishes |= {"costs": key_of(*map(to_line, costs)), "memory": str(limits)}

    def make() -> Plan:
        return _fastest(begun, job, schedule, wished.watch)

    # What a policy of the user's does today, nothing tells, nor what a family among which "auto" chooses.
    own = wished.order not in OWN or (auto and FAMILIES.keys() > OWN_FAMILIES)
    known = None if own else kept
    return plan_on_first(ranks, wishes, make, known, wished.watch)
