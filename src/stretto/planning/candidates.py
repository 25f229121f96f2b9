"""Ways to overlap a job's communication, lowered and simulated, so that planning can take the fastest.

    1. `off`: the schedule as it is, everything waited for at once.
    2. `local`: the same schedule, the ops of each window in the policy's order. (A schedule that has
       overlapped slots of its own is `window` already.)
    3. `window`: schedules in pairs (`stretto.planning.pair`), with the warm-up that they have and with longer
       ones, with ends in windows of their own as well, on one rank also in wider windows; likewise ordered.
    4. Each of these also with communications that go on from one window to the next, where the job has such
       (`stretto.planning.across`).
    5. Where microbatches are few, `window` also with one window for each rank (`stretto.order.whole_step`).
    6. Where that is not far ahead, the most promising of the others are ordered again for the step as a whole
       (`stretto.order.refine`).

Each is simulated, over a shorter step where a step has many microbatches; the fastest comes first, and of
equal ones the one that moves least. What shares windows comes first only where it gains what costs can tell
(`WORTH`). A candidate that deadlocks, or keeps more microbatches live than the job allows, is left out, and
it is said why. Where the job has no collectives, actions are ordered as captured, which sends messages early
and waits late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.bounds.step import lower_bound
from stretto.errors import PlanError, TooLargeError
from stretto.ir.action import Overlap, Schedule, Slot
from stretto.ir.costs import Costs
from stretto.ir.plan import Plan, Window
from stretto.ir.program import STARTS, Job, OverlapMode
from stretto.order import Arranger
from stretto.order.policies import DEFAULT
from stretto.order.refine import ROUNDS, refine
from stretto.order.whole_step import order_together
from stretto.planning.across import across, split_stages
from stretto.planning.lower import captured_windows, lower
from stretto.planning.pair import pair, whole
from stretto.schedule.sums import make_sums
from stretto.schedule.timing import peak_live
from stretto.simulate import simulate

AHEAD = (0, 1)
"""How much longer than its own the warm-up of a paired schedule may be, in forwards for every rank behind:
with one more, 1F1B has the warm-up that pairs need, and eager 1F1B has room for its messages."""

AHEAD_ENDS = (1, 2)
"""The same with ends in windows of their own: forwards that share a window take less time, and one more fills
the time until the first backward's message."""

WIDE = 2
"""Pairs of a wide window: with one rank, nothing outside a window can fill its begin and end. Measured on
GPTs with tp=2: two gain 3 to 5 %, a third pair between -0.5 and 2 %."""

ENDS = 8
"""Ends in windows of their own, and wide windows, are tried with at most this many microbatches a rank: they
can win at most a few windows of a step, and cost as much planning as all others. Assumed."""

PROMISING = 3
"""Candidates that are ordered again for the step as a whole (step 6), of those that are no slower than WITHIN
times the fastest. Measured on GPTs over pp=2 tp=2: the winner was up to 8 % behind."""

WITHIN = 1.25

REFINED = 0.99
"""Of the fastest of them, what a candidate takes at most that is ordered again. The search fits orders to
costs that are off by a percent, and lets a rank wait wherever the step of these costs does not need it; an
order of each window by itself hides what can be hidden everywhere. Assumed."""

WHOLE = 12
"""Microbatches up to which a step may be one window a rank: its ops are ordered one by one. Assumed."""

AHEAD_OF = 0.96
"""Of the fastest other candidate's step, what one window a rank takes at most where the others need not be
ordered again. Measured on GPTs over pp=2 tp=2: that gains 1 to 7 %, and one window was then faster still."""

WORTH = 0.98
"""Of the fastest step without windows that microbatches share, what one with them takes at most where it
comes first. Such windows hold more microbatches live and meet colder caches, and costs are off by a percent
or two: without a limit on the network a GPT with tp=2 was promised 1.5 %, and its ops took 5 % longer."""

ENOUGH = 4
"""Microbatches for every rank that are simulated to compare candidates: warm-up, cool-down, and as many in
steady state. Assumed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to overlap. step_us: of the step by which candidates are compared; make: the plan, which is
    neither simulated nor proved yet."""

    overlap: OverlapMode
    step_us: float
    make: Callable[[], Plan]


def candidates(
    job: Job, costs: Costs, schedule: Schedule, overlap: OverlapMode, order: str
) -> tuple[list[Candidate], list[str]]:
    """The candidates that `overlap` allows, best first, and why others are missing.

    order: the ordering policy. Raises PlanError when the schedule itself cannot be simulated.
    """
    if overlap == "off":
        return [Candidate("off", 0.0, lambda: _plan(job, costs, schedule, "off", None))], []
    if not communicates(job):
        why = "no collectives that another microbatch's ops could hide"
        return [Candidate("local", 0.0, lambda: _plan(job, costs, schedule, "local", None))], [why]
    found = [_candidate(_Way(job, "off", schedule, shorter(schedule), None), costs)]
    own = any(isinstance(slot, Overlap) for slots in schedule.orders for slot in slots)
    ways: list[tuple[OverlapMode, Schedule, Schedule]] = [
        (overlap if own else "local", schedule, shorter(schedule))
    ]
    missing: list[str] = []
    if overlap == "window" and job.trains and not own:
        paired, missing = _pairs(job, schedule)
        ways += [("window", each, short) for each, short in paired]
    missing = list(dict.fromkeys(missing))
    plain = Arranger(job, costs, schedule.stage_ranks, order)
    moves: dict[frozenset[int], list[tuple[Job, Arranger]]] = {}
    tried: list[tuple[Candidate, _Way]] = []
    for mode, each, short in ways:
        split = split_stages(each)
        if split not in moves:
            moved = across(job, split)
            moves[split] = [(job, plain)]
            if moved is not job:
                moves[split].append((moved, Arranger(moved, costs, schedule.stage_ranks, order)))
        for variant, arranger in moves[split]:
            way = _Way(variant, mode, each, short, arranger)
            try:
                tried.append((_candidate(way, costs), way))
            except (PlanError, TooLargeError) as error:
                if each is schedule and variant is job:
                    raise
                if isinstance(error, PlanError):
                    missing.append(f"pairs wait for each other: {error.faults[0]}")
                else:
                    missing.append(str(error))
    found += [candidate for candidate, _ in tried]
    if order == DEFAULT:
        made, why = _together(job, costs, schedule) if overlap == "window" else (None, "")
        found += [made] if made is not None else []
        missing += [why] if why and why not in missing else []
        if made is None or made.step_us > AHEAD_OF * min(candidate.step_us for candidate, _ in tried):
            found += _refined(costs, tried, overlap)
    return sorted(found, key=lambda one: _weighed_us(one, own)), missing


def _weighed_us(candidate: Candidate, own: bool) -> float:
    """By what candidates are ordered. own: the schedule has windows that microbatches share by itself, so
    that there is no choice."""
    return candidate.step_us / WORTH if candidate.overlap == "window" and not own else candidate.step_us


def communicates(job: Job) -> bool:
    """Whether any op starts a collective."""
    return any(op.target in STARTS for stage in job.stages for ops in stage.ops.values() for op in ops)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to overlap, not lowered yet. short: the schedule that is simulated; arranger: None for `off`."""

    job: Job
    mode: OverlapMode
    schedule: Schedule
    short: Schedule
    arranger: Arranger | None


def _pairs(job: Job, schedule: Schedule) -> tuple[list[tuple[Schedule, Schedule]], list[str]]:
    """Step 3: the schedules with their shorter ones, without equal ones, and why some are missing."""
    found: dict[Schedule, Schedule] = {}
    missing: list[str] = []
    kinds = [(ahead, False, 1) for ahead in AHEAD]
    # Forwards in one window all read buffers as they were before it.
    if job.microbatches <= ENDS * schedule.ranks and not writes_buffers(job):
        widths = (1, WIDE) if schedule.ranks == 1 else (1,)
        kinds += [(ahead, True, width) for ahead in AHEAD_ENDS for width in widths]
    short = shorter(schedule)
    for ahead, ends, width in kinds:
        paired = pair(schedule, ahead=ahead, ends=ends, width=width)
        if paired is None:
            return [], [f"no backward of {schedule.family!r} has a forward behind it to pair with"]
        live = max(peak_live(paired))
        if job.max_live is not None and live > job.max_live:
            missing.append(f"pairs need {live} live microbatches, and max_live is {job.max_live}")
            continue
        # Warm-up and cool-down of the shorter step are the same.
        like = pair(short, ahead=ahead, ends=ends, width=width)
        found.setdefault(paired, shorter(paired) if like is None else like)
    return list(found.items()), missing


def _candidate(way: _Way, costs: Costs) -> Candidate:
    step = simulate(_plan(_few(way), costs, way.short, way.mode, way.arranger))
    return Candidate(
        way.mode, step.step_us, lambda: _plan(way.job, costs, way.schedule, way.mode, way.arranger)
    )


def _few(way: _Way) -> Job:
    return replace(way.job, microbatches=way.short.microbatches)


def _refined(costs: Costs, tried: Sequence[tuple[Candidate, _Way]], overlap: OverlapMode) -> list[Candidate]:
    """Step 6: of those that overlap as much as is allowed, else of all."""
    most = [one for one in tried if one[0].overlap == overlap] or list(tried)
    most.sort(key=lambda one: one[0].step_us)
    found: list[Candidate] = []
    for candidate, way in most[:PROMISING]:
        made = _refined_way(costs, way) if candidate.step_us <= WITHIN * most[0][0].step_us else None
        if made is not None and made.step_us <= REFINED * most[0][0].step_us:
            found.append(made)
    return found


def _refined_way(costs: Costs, way: _Way) -> Candidate | None:
    job, few, ranks = way.job, _few(way), way.schedule.stage_ranks
    quick = Arranger(job, costs, ranks, rounds=ROUNDS)
    made = refine(
        lambda windows: _lowered(few, costs, way.short, way.mode, windows),
        captured_windows(job, way.short),
        quick,
    )
    if made is None:
        return None
    return Candidate(
        way.mode,
        made.step_us,
        lambda: _plan(job, costs, way.schedule, way.mode, way.arranger, made.windows),
    )


def _together(job: Job, costs: Costs, schedule: Schedule) -> tuple[Candidate | None, str]:
    """Step 5: the candidate, or why a limit forbids it ("" where it is not for this job)."""
    paired = whole(schedule) if job.trains else None
    if paired is None or job.microbatches > WHOLE or writes_buffers(job):
        return None, ""
    live = max(peak_live(paired))
    if job.max_live is not None and live > job.max_live:
        return None, f"one window a rank may hold {live} live microbatches, and max_live is {job.max_live}"
    captured = captured_windows(job, paired)
    plan = _lowered(job, costs, paired, "window", captured)
    # Ordered as they are without the sums that start in them.
    windows = order_together(replace(plan, windows=captured), lower_bound(job, paired, costs).us)
    if windows is None:
        return None, ""
    # Receives are posted in the order of the sends, which is another now.
    best = _lowered(job, costs, paired, "window", windows)
    return Candidate("window", simulate(best).step_us, lambda: best), ""


def writes_buffers(job: Job) -> bool:
    """Whether microbatches change what later ones read, as a batch norm's running mean."""
    return any(buffer.updates for buffer in job.buffers)


def shorter(schedule: Schedule) -> Schedule:
    """The schedule by which candidates are compared."""
    return shortened(schedule, ENOUGH * schedule.ranks)


def shortened(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule of the first microbatches, at least 8; itself unless that is much less. Those of its
    slots that lose an action to it keep the rest."""
    count = max(8, microbatches)
    if schedule.microbatches <= 1.5 * count:
        return schedule
    orders: list[tuple[Slot, ...]] = []
    for order in schedule.orders:
        slots: list[Slot] = []
        for slot in order:
            left = tuple(action for action in slot.actions if action.microbatch < count)
            if len(left) == len(slot.actions):
                slots.append(slot)
            elif left:
                slots.append(Overlap(left) if len(left) > 1 else left[0])
        orders.append(tuple(slots))
    return replace(schedule, microbatches=count, orders=tuple(orders))


def _plan(
    job: Job,
    costs: Costs,
    schedule: Schedule,
    mode: OverlapMode,
    arranger: Arranger | None,
    known: Mapping[str, Window] | None = None,
) -> Plan:
    """known: windows that have their order; the arranger orders the others."""
    windows = captured_windows(job, schedule, at_once=mode == "off")
    if arranger is not None:
        ordered = known or {}
        windows = {
            name: ordered[name] if name in ordered else arranger.arrange(window)
            for name, window in windows.items()
        }
    return _lowered(job, costs, schedule, mode, windows)


def _lowered(
    job: Job, costs: Costs, schedule: Schedule, mode: OverlapMode, windows: Mapping[str, Window]
) -> Plan:
    done, orders, communicators = lower(job, schedule, overlap=mode, windows=windows)
    buckets = make_sums(job, schedule).buckets
    return Plan(job, schedule, done, orders, communicators, costs, buckets=buckets, overlap=mode)


def why_less(asked: OverlapMode, chosen: Candidate, found: list[Candidate], missing: list[str]) -> str:
    """Why `chosen`, of all that were `found`, overlaps less than was asked; "" when it does not."""
    if chosen.overlap == asked:
        return ""
    others = [one for one in found if one.overlap == asked]
    if others:
        fastest = min(one.step_us for one in others)
        if fastest >= chosen.step_us:
            times = fastest / chosen.step_us if chosen.step_us else 1.0
            return f"{asked} is predicted to take {times:.3f} times as long"
        if asked == "window" and fastest >= WORTH * chosen.step_us:
            gain = 100.0 * (1.0 - fastest / chosen.step_us)
            return f"{asked} is predicted to gain {gain:.1f} %, which is less than costs can tell"
    return "; ".join(dict.fromkeys(missing)) or f"no {asked} plan is faster"
