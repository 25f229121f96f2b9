"""Ways to overlap a job's communication, lowered and simulated, so that planning can take the fastest.

    1. `off`: the schedule as it is, everything waited for at once.
    2. `local`: the same schedule, the ops of each window in the policy's order. (A schedule that has
       overlapped slots of its own is `window` already.)
    3. `window`: schedules in pairs (`stretto.schedule.pair`), with the warm-up that they have and with a
       longer one, and with pairs at both ends as well, likewise ordered.
    4. Each of these also with communications that go on from one window to the next, where the job has such
       (`stretto.schedule.across`).

Each is simulated, over a shorter step where a step has many microbatches; the fastest comes first, and of
equal ones the one that moves least. A candidate that deadlocks, or keeps more microbatches live than the job
allows, is left out, and it is said why. Where the job has no collectives, actions are ordered as captured,
which sends messages early and waits late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from stretto.errors import PlanError
from stretto.ir.action import Overlap, Schedule, Slot
from stretto.ir.plan import Costs, Plan
from stretto.ir.program import STARTS, Job, OverlapMode
from stretto.schedule.across import across, split_stages
from stretto.schedule.lower import captured_windows, lower
from stretto.schedule.order import Arranger
from stretto.schedule.pair import pair
from stretto.schedule.sums import make_sums
from stretto.schedule.timing import peak_live
from stretto.simulate import simulate

AHEAD = (0, 1)
"""How much longer than its own the warm-up of a paired schedule may be, in forwards for every rank behind:
with one more, 1F1B has the warm-up that pairs need, and eager 1F1B has room for its messages."""


ENDS = 8
"""Pairs at both ends are tried with at most this many microbatches a rank: they can win at most two windows
of a step, and cost as much planning as all others. Assumed."""

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
    found = [_candidate(job, costs, schedule, "off", None)]
    own = any(isinstance(slot, Overlap) for slots in schedule.orders for slot in slots)
    ways: list[tuple[OverlapMode, Schedule]] = [(overlap if own else "local", schedule)]
    missing: list[str] = []
    if overlap == "window" and job.trains and not own:
        paired, missing = _pairs(job, schedule)
        ways += [("window", each) for each in paired]
    missing = list(dict.fromkeys(missing))
    plain = Arranger(job, costs, schedule.stage_ranks, order)
    moves: dict[frozenset[int], list[tuple[Job, Arranger]]] = {}
    for mode, each in ways:
        split = split_stages(each)
        if split not in moves:
            moved = across(job, split)
            moves[split] = [(job, plain)]
            if moved is not job:
                moves[split].append((moved, Arranger(moved, costs, schedule.stage_ranks, order)))
        for variant, arranger in moves[split]:
            try:
                found.append(_candidate(variant, costs, each, mode, arranger))
            except PlanError as error:
                if each is schedule and variant is job:
                    raise
                missing.append(f"pairs wait for each other: {error.faults[0]}")
    best = sorted(found, key=lambda one: one.step_us)
    return best, missing


def communicates(job: Job) -> bool:
    """Whether any op starts a collective."""
    return any(op.target in STARTS for stage in job.stages for ops in stage.ops.values() for op in ops)


def _pairs(job: Job, schedule: Schedule) -> tuple[list[Schedule], list[str]]:
    """Step 3: the schedules, without equal ones, and why some are missing."""
    found: list[Schedule] = []
    missing: list[str] = []
    few = job.microbatches <= ENDS * schedule.ranks
    for ahead, ends in product(AHEAD, (False, True) if few else (False,)):
        paired = pair(schedule, ahead=ahead, ends=ends)
        if paired is None:
            return [], [f"no backward of {schedule.family!r} has a forward behind it to pair with"]
        live = max(peak_live(paired))
        if job.max_live is not None and live > job.max_live:
            missing.append(f"pairs need {live} live microbatches, and max_live is {job.max_live}")
        elif paired not in found:
            found.append(paired)
    return found, missing


def _candidate(
    job: Job, costs: Costs, schedule: Schedule, mode: OverlapMode, arranger: Arranger | None
) -> Candidate:
    short = shortened(schedule, ENOUGH * schedule.ranks)
    step = simulate(_plan(replace(job, microbatches=short.microbatches), costs, short, mode, arranger))
    return Candidate(mode, step.step_us, lambda: _plan(job, costs, schedule, mode, arranger))


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


def _plan(job: Job, costs: Costs, schedule: Schedule, mode: OverlapMode, arranger: Arranger | None) -> Plan:
    windows = captured_windows(job, schedule, at_once=mode == "off")
    if arranger is not None:
        windows = {name: arranger.arrange(window) for name, window in windows.items()}
    windows, orders, communicators = lower(job, schedule, overlap=mode, windows=windows)
    buckets = make_sums(job, schedule).buckets
    return Plan(job, schedule, windows, orders, communicators, costs, buckets=buckets, overlap=mode)


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
    return "; ".join(dict.fromkeys(missing)) or f"no {asked} plan is faster"
