"""Lower bounds: how fast no order of a job's actions, and of their ops, on these ranks can be.

1. Every op, collective and message has a *head*, before which it cannot start, and a *tail*, which must pass
   after it has ended. Both follow from one microbatch alone (`bounds.reach`).
2. A machine does one thing at a time: a rank's compute lane, the lane of each of its other axes, its network
   card in each direction. Each is bounded as one machine (`bounds.machine`). A card carries messages, and the
   collectives of axes that share it, less their latency. What runs once a step counts once
   (`schedule.once`); a gradient is reduced after the last of the ops that add to it.
3. A transport that takes a share of the compute lane takes it from ops, or from idle time. Of what it takes,
   the part that cannot fall before the head and after the tail is added to the work: no more can than the
   heads and tails of the transfers themselves let. Where a lane may be ahead of its ops' times
   (`stretto.processor.budget`), heads, tails and chains count with the least time, too.
4. One microbatch alone takes its longest chain: the largest head + time + tail.
5. A microbatch is live on a stage from the start of its forward to the end of its last backward action. If it
   must be so for D, and L may be at one time, then all m of them take at least m * D / L.
6. The largest of these binds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from stretto.bounds.machine import ROUNDING, MachineBound, MachineWork, OtherWork, one_machine
from stretto.bounds.once import StartedTime
from stretto.bounds.reach import Reach, find_reach
from stretto.bounds.stage import NEVER, Array, after_lane
from stretto.ir.action import Phase, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import Costs
from stretto.ir.program import Job
from stretto.ir.transfers import CollectiveTime, occupancy_us, processor_us
from stretto.processor.budget import Pace


def format_us(us: float) -> str:
    """A time with its unit: `226 ms`, `1.38 s`, `12.5 us`."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3), (float("inf"), "s", 1e6)):
        if us < limit * 0.9995:
            value = us / scale
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{us:g}"  # no number: a file of a run has it so


def machine_in_words(name: str, m: int, machine: MachineBound) -> str:
    """What a machine does, `m` times and once, after and before what."""
    inside = [f"{m} x {format_us(machine.each_us)}"] if machine.each_us > 0 or not machine.once_us else []
    if machine.once_us > 0:
        inside.append(f"{format_us(machine.once_us)} once")
    if machine.extra_us > 0:
        inside.append(f"{format_us(machine.extra_us)} lost to communication")
    return f"{name} ({' and '.join(inside)})" + around_in_words(machine.head_us, machine.tail_us)


def around_in_words(head_us: float, tail_us: float) -> str:
    """What must come before and after, where anything must."""
    text = f" after a head of {format_us(head_us)}" if head_us > 0 else ""
    if tail_us > 0:
        text += f"{' and' if text else ''} before a tail of {format_us(tail_us)}"
    return text


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the step, in microseconds.

    binds: which bound binds, in words. parts: every bound by name (`rank 1 compute`, `rank 1 tp`,
    `rank 0 sends`, `rank 1 receives`, `critical path`, `stage 1 memory`), in microseconds.
    """

    us: float
    binds: str
    parts: dict[str, float] = field(repr=False)


def lower_bound(job: Job, where: Schedule | Sequence[int], costs: Costs) -> Bound:
    """The time below which no order of the job's actions and ops can come, with these costs.

    where: a schedule, of which only the placement counts, or the rank of each stage. Op times must be known
    for every op that is no view. Raises PlanError for a missing time or cost, and for edges that form a
    circle.
    """
    stage_ranks = tuple(where.stage_ranks if isinstance(where, Schedule) else where)
    slots = [slot for order in where.orders for slot in order] if isinstance(where, Schedule) else []
    # Of one run; with k of them, `action_us` is paid once for every k.
    forwards = max((sum(a.phase is Phase.F for a in slot.actions) for slot in slots), default=1) or 1
    reach = find_reach(job, stage_ranks, costs)
    m = job.microbatches
    # 4. One microbatch alone.
    parts = {"critical path": reach.critical_us}
    words = {"critical path": f"the critical path of one microbatch ({format_us(reach.critical_us)})"}
    # 2. Machines.
    counted = "pipeline rank" if any(size > 1 for _, size in job.axes) else "rank"
    for rank in sorted(set(stage_ranks)):
        machines = _Machines(job, stage_ranks, costs, reach, rank)
        works = [("compute", machines.compute(forwards), "compute")]
        works += [(axis, machines.lane(axis), f"{axis} collectives") for axis in machines.axes]
        works.append(("sends", machines.card(outgoing=True), "outgoing messages"))
        works.append(("receives", machines.card(outgoing=False), "incoming messages"))
        for name, work, what in works:
            machine = one_machine(work, m)
            if machine is not None:
                parts[f"rank {rank} {name}"] = machine.us
                words[f"rank {rank} {name}"] = machine_in_words(f"{counted} {rank}'s {what}", m, machine)
    # 5. Memory.
    limit = m if job.max_live is None else job.max_live
    for stage in range(len(job.stages)) if limit < m else ():
        for us, text in _live_bounds(job, reach, stage, limit):
            if us > parts.get(f"stage {stage} memory", 0.0):
                parts[f"stage {stage} memory"], words[f"stage {stage} memory"] = us, text
    # 6. The largest binds; of equal ones the first.
    largest = max(parts.values())
    binding = next(name for name, us in parts.items() if us >= largest * (1 - ROUNDING))
    return Bound(largest, words[binding], parts)


class _Machines:
    """The machines of one rank, steps 2 and 3."""

    def __init__(self, job: Job, stage_ranks: Sequence[int], costs: Costs, reach: Reach, rank: int) -> None:
        self._m = job.microbatches
        self._costs = costs
        self._reach = reach
        self._pace = Pace.of(costs.processor)
        self._stages = [reach.stages[stage] for stage, owner in enumerate(stage_ranks) if owner == rank]
        ways = [(edge, stage_ranks[edge.source], stage_ranks[edge.target]) for edge in job.edges]
        self._messages = {
            out: [(edge, costs.link(a, b)) for edge, a, b in ways if a != b and rank == (a if out else b)]
            for out in (True, False)
        }
        self._once = reach.once[rank]
        self._started = self._find_started()
        lanes = [call.lane for stage in self._stages for call, _ in stage.calls]
        self.axes = tuple(dict.fromkeys([*lanes, *(of.axis for of, _, _ in self._started)]))

    def _find_started(self) -> list[tuple[StartedTime, float, float]]:
        """Collectives that start once a step, along axes other than pp, each with its head and tail."""
        largest: dict[str, tuple[StartedTime, float, float]] = {}
        for stage in self._stages:
            inside = stage.distances
            for end, before in zip(stage.ends, inside.before_sink[len(stage.edges_out) :], strict=True):
                # Every op that an addition needs runs for every microbatch before the first reduction begins.
                head_us = after_lane(stage.head_us[before], self._m * inside.time_us[before], self._pace)
                tail_us = end.us
                for of in end.reductions:
                    tail_us -= of.time.us
                    if of.axis != PIPELINE:
                        _, least_us, rest_us = largest.get(of.name, (of, 0.0, 0.0))
                        largest[of.name] = (of, max(least_us, head_us), max(rest_us, tail_us))
                    head_us += of.time.us
        for one in self._once:
            started = one.of.started
            if started is not None and started.axis != PIPELINE:
                largest.setdefault(started.name, (started, one.head_us + one.of.least_us, one.tail_us))
        return list(largest.values())

    def _calls(self, axis: str) -> Iterator[tuple[CollectiveTime, float, float]]:
        """The collectives of ops along an axis: time, head, tail; each comes once a microbatch."""
        for stage in self._stages:
            for call, time in stage.calls:
                if call.lane == axis:
                    tail_us = float(stage.tail_us[call.wait] + stage.distances.time_us[call.wait])
                    yield time, float(stage.head_us[call.start]), tail_us

    def compute(self, forwards: int) -> MachineWork:
        action_us = self._costs.action_us
        # The first run of a rank may pay `action_us` before the head.
        work = MachineWork(other=self._transport(), before_us=action_us, ahead_us=self._pace.ahead_us)
        slowed = any(one.us for one in work.other)
        for one in self._once:
            work.add(one.head_us, one.of.travel_us + one.tail_us, once_us=one.of.us)
        for stage in self._stages:
            inside = stage.distances
            waits = {call.start: call.wait for call, _ in stage.calls} if slowed else {}
            for op, time_us in enumerate(inside.time_us):
                tail_us = float(stage.tail_us[op])
                if op in waits:
                    # What its own collective takes of a start makes it longer, and what follows it shorter.
                    tail_us = float(stage.tail_us[waits[op]] + inside.time_us[waits[op]])
                work.add(float(stage.head_us[op]), tail_us, float(time_us))
            if action_us and inside.forward.any():
                # Each run of a forward pays `action_us` before its ops; count it with one of them. It may do
                # so before its message has arrived.
                on_path = int(np.argmax(np.where(inside.forward, stage.head_us + stage.tail_us, -1.0)))
                head_us, tail_us = float(stage.head_us[on_path]), float(stage.tail_us[on_path])
                work.add(head_us, tail_us, action_us / forwards)
        return work

    def lane(self, axis: str) -> MachineWork:
        work = MachineWork()
        self._add_collectives(axis, work, card=False)
        return work

    def card(self, *, outgoing: bool) -> MachineWork:
        work = MachineWork()
        for edge, link in self._messages[outgoing]:
            follows_us = link.latency_us + self._reach.follows_us[edge.index]
            work.add(self._reach.leaves_us[edge.index], follows_us, occupancy_us(link, edge.spec.nbytes))
        for axis in self.axes:
            if axis in self._costs.shared:
                self._add_collectives(axis, work, card=True)
        return work

    def _add_collectives(self, axis: str, work: MachineWork, *, card: bool) -> None:
        for time, head_us, tail_us in self._calls(axis):
            late_us = time.latency_us if card else 0.0
            work.add(head_us, tail_us + late_us, time.us - late_us)
        for of, head_us, tail_us in self._started:
            if of.axis == axis:
                late_us = of.time.latency_us if card else 0.0
                work.add(head_us, tail_us + late_us, once_us=of.time.us - late_us)

    def _transport(self) -> tuple[OtherWork, ...]:
        """Step 3: processor time that transfers take for certain.

        Each direction of messages, and each axis, is in flight once at a time. Where all at once may ask for
        more than the processor, those count that do not, and together take most.
        """
        lanes: list[OtherWork] = []
        for messages in self._messages.values():
            lost_us = [processor_us(link, edge.spec.nbytes) for edge, link in messages]
            busy_us = [occupancy_us(link, edge.spec.nbytes) for edge, link in messages]
            shares = [lost / busy if busy else 0.0 for lost, busy in zip(lost_us, busy_us, strict=True)]
            heads = [self._reach.leaves_us[edge.index] for edge, _ in messages]
            tails = [self._reach.follows_us[edge.index] for edge, _ in messages]
            lanes.append(_other_work(self._m * sum(lost_us), shares, heads, tails))
        for axis in self.axes:
            transfers = [(self._m, *call) for call in self._calls(axis)]
            transfers += [(1, of.time, head, tail) for of, head, tail in self._started if of.axis == axis]
            # No more than all of the processor can be lost.
            shares = [min(1.0, time.load) for _, time, _, _ in transfers]
            taken_us = sum(
                count * time.us * share for (count, time, _, _), share in zip(transfers, shares, strict=True)
            )
            lanes.append(_other_work(taken_us, shares, [t[2] for t in transfers], [t[3] for t in transfers]))
        choices = (some for count in range(len(lanes) + 1) for some in combinations(lanes, count))
        fitting = (some for some in choices if sum(one.share for one in some) <= 1.0)
        return max(fitting, key=lambda some: sum(one.us for one in some))


def _other_work(
    us: float, shares: Sequence[float], heads: Sequence[float], tails: Sequence[float]
) -> OtherWork:
    """What a lane's transfers take: `us` in all; their shares of the processor, heads and tails."""
    return OtherWork(us, max(shares, default=0.0), min(heads, default=0.0), min(tails, default=0.0))


def _live_bounds(job: Job, reach: Reach, stage: int, limit: int) -> Iterator[tuple[float, str]]:
    """Step 5 for one stage with `limit` live microbatches at most: bounds, each in words. Nothing where
    nothing runs backward."""
    here = reach.stages[stage]
    backward = ~here.distances.forward
    if not backward.any() or not here.distances.forward.any():
        return
    tail_us = float(here.tail_us[backward].min())
    # From the stage's start, or from where a forward's value arrives, which is later and leaves less to wait.
    points = [(0.0, here.distances.from_start)]
    for edge, since in zip(here.edges_in, here.distances.from_arrival, strict=True):
        if edge.user_phase is Phase.F:
            points.append((reach.leaves_us[edge.index] + reach.travel_us[edge.index], since))
    for head_us, since in points:
        alive_us = _alive_us(reach, stage, since)
        text = f"stage {stage}'s limit of {limit} live microbatch{'es' if limit > 1 else ''}"
        text += f" ({job.microbatches} x {format_us(alive_us)} / {limit}){around_in_words(head_us, tail_us)}"
        yield head_us + job.microbatches * alive_us / limit + tail_us, text


def _alive_us(reach: Reach, stage: int, since: Array) -> float:
    """From a point of a stage's forward to the end of its last backward op. since: from it to ops' ends."""
    here = reach.stages[stage]
    arrives_us = [NEVER] * len(reach.leaves_us)
    for edge in reach.order:
        source = reach.stages[edge.source]
        leaves_us = source.leaving_us(edge, since) if edge.source == stage else NEVER
        for arriving, inside in zip(source.edges_in, source.distances.from_arrival, strict=True):
            passes_us = source.leaving_us(edge, inside)
            if passes_us > NEVER:
                leaves_us = max(leaves_us, arrives_us[arriving.index] + passes_us)
        arrives_us[edge.index] = leaves_us + reach.travel_us[edge.index]
    backward = ~here.distances.forward
    alive_us = float(since[backward].max())
    for arriving, inside in zip(here.edges_in, here.distances.from_arrival, strict=True):
        alive_us = max(alive_us, arrives_us[arriving.index] + float(inside[backward].max()))
    return alive_us if math.isfinite(alive_us) else 0.0
