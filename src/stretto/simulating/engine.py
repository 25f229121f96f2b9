"""The simulation: walks every rank's instructions, item by item, with no device; and a plan's prediction.

1. A rank of the plan is a pipeline rank; ranks of the run that share it walk one order at one time, and are
   simulated once. It has one compute lane, which walks the rank's instructions in order.
2. `recv` posts a buffer, and takes no time. `run` walks a window: `action_us`, then its ops, each for its
   cost. A `send` starts a message and takes no time; a `wait` stalls until the message can be used. A
   value for a stage of the same rank is there as soon as it is made. As an op that starts a collective
   begins, the collective goes to its lane; its `comm.wait` stalls until it is done, and, of a microbatch's,
   until the slowest of the ranks that share the pipeline rank has done its part of it.
3. `sent` stalls until the message has left.
4. How messages move is the contract of `simulating.network`, how collectives do of `simulating.collectives`,
   what is shared of `simulating.cards`; memory is that of `verifying.memory`.
5. While transfers take shares of a rank's processor, its ops go slower by these shares
   (`simulating.compute_lane`).
6. A rank's time from 0 to the end of the step is its ops' (compute), its waiting for something that is
   under way (exposed), and the rest (bubble): waiting for what has not been started, or for the end of the
   step (`without_closing_waits`).
7. A sound plan runs to its end. Of one that does not, the proof says why (`stretto.verifying`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from stretto.bounds.step import lower_bound
from stretto.errors import PlanError
from stretto.ir.action import ONCE, Action
from stretto.ir.costs import Prediction
from stretto.ir.plan import InstructionKind, Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline, without_closing_waits
from stretto.simulating.cards import Cards, Clock, Moment
from stretto.simulating.collectives import Collectives, RunningCollective
from stretto.simulating.compute_lane import Accounts, ComputeLane, Straggler
from stretto.simulating.network import Network
from stretto.simulating.windows import Control, ReadyWindow, Segment, make_ready
from stretto.verifying import plan_faults, verify
from stretto.verifying.memory import RankMemory, memory_parts
from stretto.verifying.messages import deadlock_faults

Lane = Generator[float | Moment, None, None]
"""Yields microseconds of work to do, or a moment to stall for."""


def simulate(plan: Plan) -> Timeline:
    """Predict the timeline of a step of `plan`: spans, accounts and memory of every rank, in microseconds
    from the step's common start and bytes. Raises PlanError when ranks wait for each other forever, and for
    windows, ops or costs that are missing."""
    walk = Walk(plan)
    try:
        return walk.run()
    except LookupError:
        verify(plan)  # says what the plan names and does not have
        raise
    finally:
        walk.take_apart()


class Walk:
    """One simulated step. absent: a rank whose lane is not walked here, because it is real
    (`stretto.simulating.live`). windows: what another walk of the plan has made ready."""

    def __init__(
        self,
        plan: Plan,
        absent: int | None = None,
        windows: dict[str, ReadyWindow] | None = None,
    ) -> None:
        self.plan = plan
        self.clock = Clock()
        self.spans: list[Span] = []
        self.cards = Cards(self.clock, self._change_load, alone=not plan.costs.shared)
        self.network = Network(plan, self.clock, self.cards, self.spans)
        self.collectives = Collectives(plan, self.clock, self.cards, self.spans)
        self.made: set[tuple[int, int]] = set()
        self.windows = {} if windows is None else windows
        self.ranks = {rank: _Rank(self, rank) for rank in range(plan.ranks) if rank != absent}

    def begin(self) -> None:
        """Let every rank go until it works or waits."""
        for rank in self.ranks.values():
            rank.resume()

    def end(self, least_us: float = 0.0) -> float:
        """Go on until the last rank has ended, or to `least_us` if that is later; the others wait until then.
        Raises PlanError when one never ends."""
        self.clock.run()
        if not all(rank.finished for rank in self.ranks.values()):
            faults = deadlock_faults(self.plan) or plan_faults(self.plan)
            raise PlanError("the plan stops: its ranks wait for each other forever", faults)
        step_us = max((rank.end_us for rank in self.ranks.values()), default=0.0)
        step_us = max(step_us, least_us)
        for rank in self.ranks.values():
            rank.accounts.stall(rank.end_us, step_us, step_us, "end of the step")
        return step_us

    def run(self) -> Timeline:
        self.begin()
        step_us = self.end()
        spans = without_closing_waits(self.spans)
        spans.sort(key=lambda s: (s.rank, s.lane != COMPUTE_LANE, s.lane, s.start_us, s.end_us))
        return Timeline(
            "simulated",
            len(self.ranks),
            step_us,
            tuple(spans),
            tuple(rank.accounts.peak_bytes for rank in self.ranks.values()),
            tuple(tuple(rank.accounts.steps) for rank in self.ranks.values()),
            members=self.plan.members,
        )

    def take_apart(self) -> None:
        """Its parts know each other; apart they go at once, and not when garbage is collected."""
        for rank in self.ranks.values():
            vars(rank).clear()
        vars(self).clear()

    def _change_load(self, rank: int, was: float, load: float) -> None:
        if rank in self.ranks:
            self.ranks[rank].compute.change_load(was, load)


class _Rank:
    def __init__(self, walk: Walk, index: int) -> None:
        costs = walk.plan.costs
        self._walk = walk
        self._clock = walk.clock
        self._index = index
        self._memory = RankMemory(walk.plan, index)
        self.accounts = Accounts(index, walk.spans, self._memory.bytes_held)
        self._started: dict[tuple[object, int], RunningCollective] = {}
        self.compute = ComputeLane(walk.clock, costs)
        self._lane = self._walk_lane()
        self.finished = False
        self.end_us = 0.0
        self._straggler = Straggler(costs.skew)

    def _walk_lane(self) -> Lane:
        network, memory = self._walk.network, self._memory
        for instruction in self._walk.plan.orders[self._index]:
            kind = instruction.kind
            if kind is InstructionKind.RUN:
                yield from self._run(str(instruction.ref), instruction.microbatches)
            elif kind is InstructionKind.RECV:
                network.post(int(instruction.ref), instruction.microbatches[0])
                memory.post(int(instruction.ref))
                self.accounts.keep(self._clock.now_us, memory.bytes_held)
            else:
                edge, microbatch = int(instruction.ref), instruction.microbatches[0]
                message = network.message(edge, microbatch)
                yield from self._wait(message.left, message.name)
                memory.sent(edge, microbatch)
                self.accounts.keep(self._clock.now_us, memory.bytes_held)

    def _run(self, name: str, microbatches: tuple[int, ...]) -> Lane:
        windows = self._walk.windows
        if name not in windows:  # cut into segments once
            windows[name] = make_ready(self._walk.plan, name)
        ready = windows[name]
        changes = self._memory.run(ready.window, microbatches, ready.stretches, ready.op_us)
        actions = [
            Action(stage, phase, microbatch)
            for (stage, phase), microbatch in zip(ready.window.parts, microbatches, strict=True)
        ]
        accounts, memory, clock = self.accounts, self._memory, self._clock
        extra_us = self._walk.plan.costs.action_us if ready.window.actions else 0.0
        for segment, change in zip(ready.segments, changes, strict=True):
            work_us = segment.work_us + extra_us
            start_us = clock.now_us
            if work_us:
                accounts.extend(actions[segment.part], start_us)
                yield work_us
                self._straggler.work(work_us, self.compute.behind_us())
                accounts.action_end_us = clock.now_us
            if change is not None:
                kept = memory.bytes_held
                if change.peak:
                    accounts.keep(start_us + change.at * (clock.now_us - start_us), kept + change.peak)
                memory.bytes_held = kept + change.end
                accounts.keep(clock.now_us, memory.bytes_held)
            extra_us = 0.0
            call = segment.call
            if call is not None:
                microbatch = microbatches[segment.control_part]
                key = (call.key, microbatch)
                if segment.control is Control.START:
                    self._started[key] = self._walk.collectives.start(call, self._index, microbatch)
                    continue
                started = self._started.get(key)
                # What has not started only this lane could start: the wait never ends.
                yield from self._wait(Moment() if started is None else started.done, call.name)
                if started is not None and microbatch != ONCE:
                    yield from self._meet(started)
            elif segment.control is not Control.NONE:
                yield from self._message(segment, microbatches[segment.control_part])

    def _meet(self, started: RunningCollective) -> Lane:
        """Wait until the slowest rank of the pipeline rank has done its part of a collective that this one
        has."""
        now_us = self._clock.now_us
        late_us = self._straggler.meet(now_us - started.done.us)
        if late_us > 0.0:
            there = Moment()
            there.begun_us = now_us
            self._clock.at(now_us + late_us, lambda: there.happen(self._clock))
            yield from self._wait(there, started.call.name)

    def _message(self, segment: Segment, microbatch: int) -> Lane:
        key = (segment.edge, microbatch)
        if segment.local:
            if segment.control is Control.SEND:
                self._walk.made.add(key)
            elif key not in self._walk.made:
                # Only this lane could make the value: the wait never ends.
                yield from self._wait(Moment(), f"e{segment.edge}:{microbatch}")
        elif segment.control is Control.SEND:
            self._walk.network.send(*key)
        else:
            message = self._walk.network.message(*key)
            yield from self._wait(message.arrived, message.name)

    def _wait(self, moment: Moment, name: str) -> Lane:
        if moment.happened:
            return
        start_us = self._clock.now_us
        yield moment
        begun_us = moment.begun_us
        self.accounts.flush()
        self.accounts.stall(start_us, self._clock.now_us, start_us if begun_us is None else begun_us, name)

    def resume(self) -> None:
        """Let the lane go on until it works, waits or has ended."""
        request = next(self._lane, None)
        if request is None:
            self.finished = True
            self.end_us = self._clock.now_us
            self.accounts.flush()
        elif isinstance(request, Moment):
            request.then(self.resume)
        else:
            self.compute.work(request, self.resume)


def predict(plan: Plan, timeline: Timeline | None = None) -> Prediction:
    """Take the simulated step of `plan` (or its `timeline`) and bound it; microseconds and bytes, lists by
    rank. Raises PlanError for what `simulate` and `lower_bound` refuse."""
    timeline = simulate(plan) if timeline is None else timeline
    bound = lower_bound(plan.job, plan.schedule, plan.costs)
    parts = memory_parts(plan, timeline.peak_bytes)
    return replace(accounts_of(timeline), bound_us=bound.us, binds=bound.binds, memory=parts)


def accounts_of(timeline: Timeline) -> Prediction:
    """What a simulated timeline alone says of its plan; `bound_us` is 0, which is none."""
    return Prediction(
        step_us=timeline.step_us,
        compute_us=timeline.by_rank(SpanKind.COMPUTE),
        exposed_us=timeline.by_rank(SpanKind.EXPOSED),
        bubble_us=timeline.by_rank(SpanKind.BUBBLE),
        peak_bytes=timeline.peak_bytes,
        bound_us=0.0,
        binds="",
        exposed_axis_us=timeline.exposed_axis_us(),
        comm_axis_us=timeline.comm_axis_us(),
    )
