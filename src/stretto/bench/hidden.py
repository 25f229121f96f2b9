"""How much of what can be hidden was hidden: accounts of a measured step, and what they are held against.

May touch plans and timelines. All is about one axis' collectives (`tp`), at one place, in microseconds.

    1. The *steady state* of a place is all that runs from its first window with a forward and a backward to
       its last; where a plan has none, all runs but the first and the last. It is a set of actions, so that
       plans with and without such windows are asked about the same work.
    2. *Exposed* is the time in which the compute lane stands in these actions' windows because it waits for
       a collective. Measured with `off`, where the lane waits for each at once, it is the *total*.
    3. *Hideable* is the most that any order could hide: compute goes on beside collectives, slower by what
       these take of the processor, until either of both runs out:
           min(total, work / (1 - load)),     load = processor time of the collectives / their time.
       It is what the lanes of the lower bound allow, and knows nothing of dependencies.
    4. *Hidden* is (total - exposed) / hideable = 1 - (exposed - unhideable) / (total - unhideable), where
       unhideable = total - hideable.
    5. Within one backward, weight gradients (W) are what can run beside a collective. Each is there when what
       it reads is; it covers the first collective that finds it. `covered_by_w` adds up what they cover,
       with step 3's load, from the plan's costs; `local` is held against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.action import Action, Phase, Schedule, Slot
from stretto.ir.axes import TENSOR
from stretto.ir.collectives import KINDS
from stretto.ir.costs import Costs
from stretto.ir.program import WAIT, Job
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.ir.transfers import CollectiveTime, axis_time, time_of

AXIS = TENSOR


@dataclass(frozen=True, slots=True)
class Work:
    """What one microbatch asks of a place. compute_us: of ops; collective_us: of collectives that have their
    links for themselves; processor_us: what these take of the processor; wire_bytes: what they move, each
    way; message_bytes: what messages take from it to other places."""

    compute_us: float
    collective_us: float
    processor_us: float
    wire_bytes: float
    message_bytes: float

    def hideable_us(self, total_us: float | None = None) -> float:
        """Step 3. total_us: of the collectives, where it was measured; of the costs by default."""
        if not self.collective_us:
            return 0.0
        load = min(self.processor_us / self.collective_us, 1.0)
        share = 1.0 if load >= 1.0 else self.compute_us / (1.0 - load) / self.collective_us
        return min(share, 1.0) * (self.collective_us if total_us is None else total_us)


def work_of(job: Job, costs: Costs, stages: Iterable[int], phases: Iterable[Phase] = Phase) -> Work:
    """The work of one microbatch on a place that holds `stages`, in some phases (all by default)."""
    wanted = {part for phase in phases for part in phase.parts}
    stages = frozenset(stages)
    compute_us = collective_us = processor_us = wire_bytes = 0.0
    for index in sorted(stages):
        for op in (op for phase, ops in job.stages[index].ops.items() if phase in wanted for op in ops):
            compute_us += time_of(costs, index, op)
            asked = op.collective
            if asked is not None and asked.axis == AXIS:
                time = axis_time(costs, AXIS, asked.kind, asked.nbytes)
                collective_us += time.us
                processor_us += time.us * time.load
                wire_bytes += KINDS[asked.kind].moved(asked.size) * asked.nbytes
    leaving = [edge for edge in job.edges if edge.source in stages and edge.target not in stages]
    message_bytes = float(sum(edge.spec.nbytes for edge in leaving if edge.phase in wanted))
    return Work(compute_us, collective_us, processor_us, wire_bytes, message_bytes)


def steady_actions(schedule: Schedule, place: int) -> frozenset[Action]:
    """Step 1."""
    order = schedule.orders[place]
    pairs = [at for at, slot in enumerate(order) if _mixed(slot)]
    first, last = (pairs[0], pairs[-1]) if pairs else (1, len(order) - 2)
    return frozenset(action for slot in order[first : last + 1] for action in slot.actions)


def _mixed(slot: Slot) -> bool:
    """Whether a slot holds a forward and a part of a backward."""
    return len({action.phase is Phase.F for action in slot.actions}) == 2


def exposed_us(
    timeline: Timeline, place: int, schedule: Schedule, actions: Iterable[Action] | None = None
) -> float:
    """Step 2, on a measured timeline of `schedule`: in windows that hold any of these actions, or in the
    whole step."""
    return sum(exposed_by_name(timeline, place, schedule, actions).values())


def exposed_by_name(
    timeline: Timeline, place: int, schedule: Schedule, actions: Iterable[Action] | None = None
) -> dict[str, float]:
    """The same by the collective that was waited for, the longest first."""
    wanted = None if actions is None else {str(action) for action in actions}
    found: dict[str, float] = {}
    for window, span in _waits(timeline, place, schedule):
        if wanted is None or wanted & set(window):
            found[span.name] = found.get(span.name, 0.0) + span.duration_us
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _waits(timeline: Timeline, place: int, schedule: Schedule) -> list[tuple[tuple[str, ...], Span]]:
    """(actions of the window, wait) of every wait for a collective.

    A run is drawn as spans of its window's actions with its waits between; a wait at its very begin or end
    stands beside a span of it too, since to call a function takes longer than the clock's resolution.
    """
    windows = {}
    for slot in schedule.orders[place]:
        names = tuple(map(str, slot.actions))
        windows.update(dict.fromkeys(names, names))
    lane = [s for s in timeline.spans if s.rank == place and s.lane == COMPUTE_LANE]
    lane.sort(key=lambda span: (span.start_us, span.end_us))
    found: list[tuple[tuple[str, ...], Span]] = []
    window: tuple[str, ...] = ()
    for span in lane:
        if span.kind is SpanKind.COMPUTE:
            window = windows.get(span.name, ())
        elif span.kind is SpanKind.EXPOSED and span.axis == AXIS:
            found.append((window, span))
    return found


@dataclass(frozen=True, slots=True)
class _Dot:
    """A weight gradient's op: how long it takes, and after which op of I what it reads is there."""

    us: float
    after: int


def covered_by_w(job: Job, costs: Costs, stages: Sequence[int]) -> float:
    """Step 5, for one microbatch: how much of the collectives of I the ops of W can cover."""
    return sum(_covered(job, costs, stage) for stage in stages)


def _covered(job: Job, costs: Costs, stage: int) -> float:
    programs = job.stages[stage].ops
    chain = programs[Phase.I]
    at = {op.name: k for k, op in enumerate(chain)}
    ready: dict[str, int] = dict(at)
    waits = {op.uses[0]: k for k, op in enumerate(chain) if op.target == WAIT and op.uses}
    dots: list[_Dot] = []
    for op in programs[Phase.W]:
        ready[op.name] = max((ready.get(name, -1) for name in op.uses), default=-1)
        us = time_of(costs, stage, op)
        # What W itself starts or waits for is no cover.
        if op.collective is None and op.target != WAIT:
            dots.append(_Dot(us, ready[op.name]))
    dots.sort(key=lambda dot: dot.after)
    covered_us = pool_us = 0.0
    given = 0
    for k, op in enumerate(chain):
        asked = op.collective
        if asked is None or asked.axis != AXIS or op.name not in waits:
            continue
        while given < len(dots) and dots[given].after < k:
            pool_us += dots[given].us
            given += 1
        used_us = _beside(axis_time(costs, AXIS, asked.kind, asked.nbytes), pool_us)
        pool_us -= used_us[0]
        covered_us += used_us[1]
    return covered_us


def _beside(time: CollectiveTime, pool_us: float) -> tuple[float, float]:
    """(compute that is done beside a collective, time of it that is so covered)."""
    free = 1.0 - time.load
    if free <= 0.0:
        return 0.0, time.us if pool_us else 0.0  # the transport leaves nothing: what has begun lasts as long
    done_us = min(pool_us, time.us * free)
    return done_us, done_us / free


@dataclass(frozen=True, slots=True)
class Hidden:
    """The accounts of one mode at one place; medians over steps, in microseconds a step.

    total_us: what `off` exposes in the steady state; exposed_us: what this mode does; hideable_us: step 3.
    backward_total_us, backward_exposed_us: the same in all windows with a backward; covered_us: step 5 for
    all microbatches.
    """

    total_us: float
    exposed_us: float
    hideable_us: float
    backward_total_us: float
    backward_exposed_us: float
    covered_us: float

    @property
    def hidden(self) -> float | None:
        """Step 4; None where nothing can be hidden."""
        return (self.total_us - self.exposed_us) / self.hideable_us if self.hideable_us else None

    @property
    def of_covered(self) -> float | None:
        """Of what W can cover in the backward, how much was hidden; None where it covers nothing."""
        gone = self.backward_total_us - self.backward_exposed_us
        return gone / self.covered_us if self.covered_us else None


def backward_actions(schedule: Schedule, place: int) -> frozenset[Action]:
    """The actions of a place that hold input gradients."""
    return frozenset(a for a in schedule.actions(place) if Phase.I in a.phase.parts)


def account(
    exposed: Mapping[str, tuple[float, float]], job: Job, costs: Costs, schedule: Schedule, place: int
) -> dict[str, Hidden]:
    """The accounts of all modes at a place.

    exposed: mode -> (in the steady state, in the backward), measured; `off` must be among them. schedule: the
    one that defines the steady state.
    """
    stages = schedule.stages_of(place)
    work = work_of(job, costs, stages)
    total_us, backward_us = exposed["off"]
    covered_us = job.microbatches * covered_by_w(job, costs, stages)
    return {
        mode: Hidden(total_us, steady, work.hideable_us(total_us), backward_us, backward, covered_us)
        for mode, (steady, backward) in exposed.items()
    }
