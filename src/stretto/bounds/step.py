"""Lower bounds: how fast no order of a job's actions, and of their ops, on these ranks can be.

The contract:

1. Every op, collective and message has a *head*, before which it cannot start, and a *tail*, which must pass
   after it has ended. Both follow from one microbatch alone (`bounds.reach`).
2. A machine does one thing at a time: a rank's compute lane, the lane of each of its other axes, its network
   card in each direction. Each is bounded as one machine (`bounds.machine`). A card carries
   messages, and the collectives of axes that share it, less their latency. Sums of gradients
   are those of `schedule.sums`; each comes once a step, after the last of the ops that add to it.
   Lanes feed the compute lane, which feeds lanes: what a machine can have done early, or late, is
   what the others let it (`bounds.fed`). The k-th microbatch comes later than the first, and goes
   sooner than the last (`bounds.kth`).
3. A transport that takes a share of the compute lane takes it from ops, or from idle time. Of what it takes,
   the part that cannot fall before the head and after the tail is added to the work: no more can than
   the heads and tails of the transfers themselves let.
   Where a lane may be ahead of its ops' times (`stretto.processor.pace`), heads, tails and chains count with
   the least time, too.
4. One microbatch alone takes its longest chain: the largest head + time + tail.
5. A stage that may hold few live microbatches cannot start the next before one has ended
   (`bounds.live`).
6. The largest of these binds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from stretto.bounds.ends import SumTime
from stretto.bounds.fed import ROUNDING, Feeder
from stretto.bounds.kth import Turns, find_turns
from stretto.bounds.live import live_bound
from stretto.bounds.machine import Outside, Work, one_machine
from stretto.bounds.reach import Reach, StageReach, find_reach
from stretto.bounds.stage import COMPUTE, Array, Call, after_lane
from stretto.bounds.words import collectives_of, format_us, machine_in_words, memory_in_words
from stretto.ir.action import Phase, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import Costs
from stretto.ir.program import Job
from stretto.ir.transfers import CollectiveTime, occupancy_us, processor_us
from stretto.processor.pace import Pace


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the step, in microseconds.

    binds: which bound binds, in words. parts: every bound by name (`rank 1 compute`, `rank 1 tp`,
    `rank 0 sends`, `rank 1 receives`, `critical path`, `stage 1 memory`), in microseconds.
    """

    us: float
    binds: str
    parts: dict[str, float] = field(repr=False)


def lower_bound(
    job: Job, where: Schedule | Sequence[int], costs: Costs, *, max_live: Sequence[int] | None = None
) -> Bound:
    """The time below which no order of the job's actions and ops can come, with these costs.

    where: a schedule, of which only the placement counts, or the rank of each stage. max_live: for each
    stage, the most microbatches that it may hold; the job's own limit by default (a family's own need not
    bind another order). Op times must be known for every op that is no view. Raises PlanError for a
    missing time or cost, and for edges that form a circle.
    """
    stage_ranks = tuple(where.stage_ranks if isinstance(where, Schedule) else where)
    forwards = _forwards_a_run(where) if isinstance(where, Schedule) else 1
    reach = find_reach(job, stage_ranks, costs)
    turns = find_turns(job, stage_ranks, costs, reach)
    m = job.microbatches
    # 4. One microbatch alone.
    parts = {"critical path": reach.critical_us}
    words = {"critical path": f"the critical path of one microbatch ({format_us(reach.critical_us)})"}
    # 2. Machines.
    held: set[str] = set()
    counted = "place" if any(size > 1 for _, size in job.axes) else "rank"
    for rank in sorted(set(stage_ranks)):
        place = _Place(job, stage_ranks, costs, reach, turns, rank)
        works = {"compute": (place.compute(forwards), "compute")}
        for axis in place.axes:
            works[axis] = (place.lane(axis), collectives_of(axis))
        works["sends"] = (place.card(outgoing=True), "outgoing messages")
        works["receives"] = (place.card(outgoing=False), "incoming messages")
        for name, (work, what) in works.items():
            machine = one_machine(work, m)
            if machine is not None:
                parts[f"rank {rank} {name}"] = machine.us
                if machine.at_first is not None or machine.at_last is not None:
                    held.add(f"rank {rank} {name}")
                words[f"rank {rank} {name}"] = machine_in_words(f"{counted} {rank}'s {what}", m, machine)
    # 5. Memory.
    limits = max_live or (() if job.max_live is None else (job.max_live,) * len(job.stages))
    for stage, limit in enumerate(limits):
        live = live_bound(job, reach, stage, limit) if limit < m else None
        if live is not None:
            parts[f"stage {stage} memory"] = live.us
            words[f"stage {stage} memory"] = memory_in_words(stage, m, limit, live)
    # 6. The largest binds; of equal ones the first that says so in fewest words.
    largest = max(parts.values())
    equal = [name for name, us in parts.items() if us >= largest * (1 - ROUNDING)]
    binding = next((name for name in equal if name not in held), equal[0])
    return Bound(largest, words[binding], parts)


def _forwards_a_run(schedule: Schedule) -> int:
    """The most forwards that one run holds: with k of them, `action_us` is paid once for every k."""
    slots = (slot for order in schedule.orders for slot in order)
    return max((sum(a.phase is Phase.F for a in slot.actions) for slot in slots), default=1) or 1


def _around_call(stage: StageReach, call: Call) -> tuple[float, float]:
    """Head and tail of a collective, microseconds."""
    head_us = float(stage.head_us[call.start])
    return head_us, float(stage.tail_us[call.wait] + stage.time_us[call.wait])


def _fed(stage: StageReach, feeding: Sequence[str]) -> tuple[Array, Array]:
    """By op and feeder: the feeder's time that the op needs, and that needs it, in microseconds."""
    none = np.zeros(len(stage.time_us))
    ways = (stage.distances.before, stage.distances.after)
    needs_us, feeds_us = (
        np.column_stack([way.get(name, none) for name in feeding] or [none]) for way in ways
    )
    return needs_us, feeds_us


class _Place:
    """The machines of one rank, steps 2 and 3."""

    def __init__(
        self, job: Job, stage_ranks: Sequence[int], costs: Costs, reach: Reach, turns: Turns, rank: int
    ) -> None:
        self._m = job.microbatches
        self._costs = costs
        self._reach = reach
        self._pace = Pace.of(costs.processor)
        stages = [reach.stages[stage] for stage, owner in enumerate(stage_ranks) if owner == rank]
        self._stages = stages
        self._turns = turns
        self._heads_us = [turns.heads_us(stage) for stage in stages]
        self._tails_us = [turns.tails_us(stage) for stage in stages]
        self._feeders = self._find_feeders()
        ways = [(edge, stage_ranks[edge.source], stage_ranks[edge.target]) for edge in job.edges]
        self._messages = {
            out: [(edge, costs.link(a, b)) for edge, a, b in ways if a != b and rank == (a if out else b)]
            for out in (True, False)
        }
        self._sums = self._find_sums()
        called = [call.lane for stage in stages for call, _ in stage.calls]
        self.axes = tuple(dict.fromkeys([*called, *(of.axis for of, _, _ in self._sums)]))

    def _find_feeders(self) -> dict[str, Feeder]:
        """The machines of this rank that others wait for, by name: compute, and lanes."""
        found: dict[str, Feeder] = {}

        def add(name: str, words: str, head_us: float, tail_us: float) -> None:
            known = found.get(name, Feeder(words, head_us, tail_us))
            ahead_us = self._pace.ahead_us if name == COMPUTE else 0.0
            found[name] = Feeder(words, min(known.head_us, head_us), min(known.tail_us, tail_us), ahead_us)

        for stage in self._stages:
            busy = stage.time_us > 0
            if busy.any():
                add(COMPUTE, COMPUTE, float(stage.head_us[busy].min()), float(stage.tail_us[busy].min()))
            for call, _ in stage.calls:
                add(call.lane, collectives_of(call.lane), *_around_call(stage, call))
        return found

    def _find_sums(self) -> list[tuple[SumTime, float, float]]:
        """Sums of gradients along axes beside pp, each with its head and tail."""
        found: dict[str, tuple[SumTime, float, float]] = {}
        for stage in self._stages:
            for end, before in zip(
                stage.ends, stage.distances.before_sink[len(stage.edges_out) :], strict=True
            ):
                # Every op that an addition needs runs for every microbatch before the first sum begins.
                head_us = after_lane(stage.head_us[before], self._m * stage.time_us[before], self._pace)
                tail_us = end.us
                for of in end.sums:
                    tail_us -= of.time.us
                    if of.axis != PIPELINE:
                        _, least_us, rest_us = found.get(of.name, (of, 0.0, 0.0))
                        found[of.name] = (of, max(least_us, head_us), max(rest_us, tail_us))
                    head_us += of.time.us
        return list(found.values())

    def compute(self, forwards: int) -> Work:
        """The compute lane. forwards: the most that one run holds."""
        action_us = self._costs.action_us
        feeding = [name for name in self._feeders if name != COMPUTE]
        work = Work(tuple(self._feeders[name] for name in feeding), turns=self._turns.count)
        work.outside = self._transport()
        # The first run of a rank may pay `action_us` before the head.
        work.before_us = action_us
        work.ahead_us = self._pace.ahead_us
        slowed = any(one.us for one in work.outside)
        for number, stage in enumerate(self._stages):
            needs_us, feeds_us = _fed(stage, feeding)
            waits = {call.start: call.wait for call, _ in stage.calls} if slowed else {}
            for op, time_us in enumerate(stage.time_us):
                here = {"stage": number, "needs_us": needs_us[op], "feeds_us": feeds_us[op]}
                head_us, tail_us = float(stage.head_us[op]), float(stage.tail_us[op])
                head, tail = self._kth(number, op, op)
                if op in waits:
                    # What its own collective takes of a start makes it longer, and what follows it shorter.
                    wait = waits[op]
                    tail_us = float(stage.tail_us[wait] + stage.time_us[wait])
                    tail = self._kth(number, op, wait, stage.time_us[wait])[1]
                work.add(head_us, tail_us, float(time_us), kth_head=head, kth_tail=tail, **here)
            if action_us and stage.forward.any():
                # Each run of a forward pays `action_us` before its ops; count it with one of them. It may do
                # so before its message has arrived.
                on_path = int(np.argmax(np.where(stage.forward, stage.head_us + stage.tail_us, -1.0)))
                head_us, tail_us = float(stage.head_us[on_path]), float(stage.tail_us[on_path])
                here = {"stage": number, "needs_us": needs_us[on_path], "feeds_us": feeds_us[on_path]}
                work.add(head_us, tail_us, action_us / forwards, **here)
        return work

    def lane(self, axis: str) -> Work:
        """The lane of an axis: collectives of ops, and sums."""
        feeding = [name for name in self._feeders if name != axis]
        work = Work(tuple(self._feeders[name] for name in feeding), turns=self._turns.count)
        return self._collectives(axis, work, feeding, card=False)

    def card(self, *, outgoing: bool) -> Work:
        """One direction of the network card."""
        work = Work(turns=self._turns.count)
        for edge, link in self._messages[outgoing]:
            follows_us = link.latency_us + self._reach.follows_us[edge.index]
            work.add(
                self._reach.leaves_us[edge.index],
                follows_us,
                occupancy_us(link, edge.spec.nbytes),
                kth_head=self._turns.leaves_us[edge.index],
                kth_tail=link.latency_us + self._turns.follows_us[edge.index],
            )
        for axis in self.axes:
            if axis in self._costs.shared:
                self._collectives(axis, work, [], card=True)
        return work

    def _times(self, axis: str) -> list[tuple[CollectiveTime, int]]:
        """The collectives of an axis, and how often each comes in a step."""
        found = [(time, self._m) for stage in self._stages for call, time in stage.calls if call.lane == axis]
        return found + [(of.time, 1) for of, _, _ in self._sums if of.axis == axis]

    def _collectives(self, axis: str, work: Work, feeding: list[str], *, card: bool) -> Work:
        """Add those of an axis: on its lane, or on the card that it shares, which latency leaves free.

        feeding: the machines that feed it."""
        computes = np.array([name == COMPUTE for name in feeding])
        for number, stage in enumerate(self._stages):
            needs_us, feeds_us = _fed(stage, feeding)
            for call, time in stage.calls:
                if call.lane == axis:
                    late_us = time.latency_us if card else 0.0
                    head_us, tail_us = _around_call(stage, call)
                    here = {
                        "stage": number,
                        # It begins with its start, whose own time need not have passed.
                        "needs_us": needs_us[call.start] - computes * stage.time_us[call.start],
                        "feeds_us": feeds_us[call.wait],
                    }
                    head, tail = self._kth(number, call.start, call.wait, stage.time_us[call.wait] + late_us)
                    tail_us, busy_us = tail_us + late_us, time.us - late_us
                    work.add(head_us, tail_us, busy_us, kth_head=head, kth_tail=tail, **here)
        for of, head_us, tail_us in self._sums:
            if of.axis == axis:
                late_us = of.time.latency_us if card else 0.0
                work.add(head_us, tail_us + late_us, once_us=of.time.us - late_us)
        return work

    def _kth(
        self, stage: int, first: int, last: int, rest_us: float = 0.0
    ) -> tuple[Array | None, Array | None]:
        """Heads of the k-th microbatch before one op of a stage, and tails after another and so much more."""
        heads_us, tails_us = self._heads_us[stage], self._tails_us[stage]
        return (
            None if heads_us is None else heads_us[:, first],
            None if tails_us is None else tails_us[:, last] + rest_us,
        )

    def _transport(self) -> tuple[Outside, ...]:
        """Step 3: processor time that transfers take for certain.

        Each direction of messages, and each axis, is in flight once at a time. Where all at once may ask for
        more than the processor, those count that do not, and together take most.
        """
        lanes: list[Outside] = []
        for messages in self._messages.values():
            lost_us = [processor_us(link, edge.spec.nbytes) for edge, link in messages]
            busy_us = [occupancy_us(link, edge.spec.nbytes) for edge, link in messages]
            shares = [lost / busy if busy else 0.0 for lost, busy in zip(lost_us, busy_us, strict=True)]
            heads = [self._reach.leaves_us[edge.index] for edge, _ in messages]
            tails = [self._reach.follows_us[edge.index] for edge, _ in messages]
            lanes.append(_outside(self._m * sum(lost_us), shares, heads, tails))
        for axis in self.axes:
            sums = [found for found in self._sums if found[0].axis == axis]
            around = [(head_us, tail_us) for _, head_us, tail_us in sums]
            if axis in self._feeders:  # collectives of ops
                around.append((self._feeders[axis].head_us, self._feeders[axis].tail_us))
            times = self._times(axis)
            # More than the whole cannot be lost.
            taken_us = sum(times_a_step * t.us * min(1.0, t.load) for t, times_a_step in times)
            shares = [min(1.0, t.load) for t, _ in times]
            lanes.append(_outside(taken_us, shares, [h for h, _ in around], [t for _, t in around]))
        choices = (some for count in range(len(lanes) + 1) for some in combinations(lanes, count))
        fitting = (some for some in choices if sum(one.share for one in some) <= 1.0)
        return max(fitting, key=lambda some: sum(one.us for one in some))


def _outside(us: float, shares: Sequence[float], heads: Sequence[float], tails: Sequence[float]) -> Outside:
    """What a lane's transfers take: `us` in all; their shares of the processor, heads and tails."""
    return Outside(us, max(shares, default=0.0), min(heads, default=0.0), min(tails, default=0.0))
