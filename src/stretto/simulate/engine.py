"""The simulation: walks every rank's instructions, item by item, with no device.

May touch `stretto.ir`, `stretto.schedule.transfers` and this room. The contract:

1. Every rank has one compute lane, which walks the rank's instructions in order.
2. `recv` posts a buffer, and takes no time. `run` walks a window: `action_us`, then its ops, each for its
   cost. A `send` starts a message and takes no time; a `wait` stands until the message can be used. A
   value for a stage of the same rank is there as soon as it is made.
3. `sent` stands until the message has left. `loss` and `reduce` start a collective; `heard` and
   `reduced` stand until it is done.
4. How messages and collectives move is the contract of `simulate.network`; what is held in memory that of
   `simulate.memory`.
5. While transfers take shares of a rank's processor, its ops go slower by these shares (at least 0 is
   left). A lane that stands loses nothing.
6. A rank's time from 0 to the end of the step is its ops' (compute), its waiting for something that is
   under way (exposed), and the rest (bubble): waiting for what has not been started, or for the end of the
   step.
7. When nothing can happen any more and a rank has instructions left, the plan is refused; the message says
   what every such rank waits for.
"""

from __future__ import annotations

from collections.abc import Generator

from stretto.errors import PlanError
from stretto.ir.action import Action
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.simulate.clock import Clock, Moment
from stretto.simulate.memory import Change, RankMemory
from stretto.simulate.network import Collective, Message, Network
from stretto.simulate.windows import ReadyWindow, Segment, make_ready

Lane = Generator[float | Moment, None, None]
"""Yields microseconds of work to do, or a moment to stand still for."""


def simulate(plan: Plan) -> Timeline:
    """Predict the timeline of one step of `plan`: spans, accounts and memory of every rank.

    Times are microseconds from the step's common start, memory is bytes. The method is discrete events,
    as this module's contract says. Raises PlanError when ranks wait for each other for ever, and for
    windows, ops or costs that are missing.
    """
    return _Walk(plan).run()


class _Walk:
    """One simulated step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.spans: list[Span] = []
        self.network = Network(plan, self.clock, self._change_load, self.spans)
        self.made: set[tuple[int, int]] = set()
        self._windows: dict[str, ReadyWindow] = {}
        self.ranks = [_Rank(self, rank) for rank in range(plan.ranks)]

    def run(self) -> Timeline:
        for rank in self.ranks:
            rank.resume()
        self.clock.run()
        stuck = [rank.stuck() for rank in self.ranks if not rank.finished]
        if stuck:
            raise PlanError("the plan stops: its ranks wait for each other for ever", stuck)
        step_us = max((rank.end_us for rank in self.ranks), default=0.0)
        for rank in self.ranks:
            rank.stand(rank.end_us, step_us, step_us, "end of the step")
        self.spans.sort(key=lambda s: (s.rank, s.lane != COMPUTE_LANE, s.lane, s.start_us, s.end_us))
        return Timeline(
            "simulated",
            len(self.ranks),
            step_us,
            tuple(self.spans),
            tuple(rank.peak_bytes for rank in self.ranks),
            tuple(tuple(rank.steps) for rank in self.ranks),
        )

    def window(self, name: str) -> ReadyWindow:
        """The window ready to walk; cut into segments once."""
        if name not in self._windows:
            self._windows[name] = make_ready(self.plan, name)
        return self._windows[name]

    def _change_load(self, rank: int, share: float) -> None:
        self.ranks[rank].change_load(share)


class _Rank:
    """One rank's compute lane."""

    def __init__(self, walk: _Walk, index: int) -> None:
        self._walk = walk
        self._clock = walk.clock
        self._index = index
        self._memory = RankMemory(walk.plan, index)
        self.peak_bytes = self._memory.bytes_held
        self.steps: list[tuple[float, int]] = [(0.0, self.peak_bytes)]
        self._lane = self._walk_lane()
        self.finished = False
        self.end_us = 0.0
        self._at: Instruction | None = None
        self._waits_for: Message | Collective | str = ""
        # The work that is being done: what is left of it, how fast it goes, since when.
        self._left_us = 0.0
        self._since_us = 0.0
        self._speed = 1.0
        self._shares: list[float] = []
        self._working = False
        self._version = 0
        # The compute span that is being extended: its action and its start.
        self._action: Action | None = None
        self._action_start_us = 0.0
        self._action_end_us = 0.0

    # --- steps 1 to 3: the lane ---------------------------------------------------------------------

    def _walk_lane(self) -> Lane:
        network, memory = self._walk.network, self._memory
        for instruction in self._walk.plan.orders[self._index]:
            self._at = instruction
            kind = instruction.kind
            if kind is InstructionKind.RUN:
                yield from self._run(str(instruction.ref), instruction.microbatches)
            elif kind is InstructionKind.RECV:
                network.post(int(instruction.ref), instruction.microbatches[0])
                memory.post(int(instruction.ref))
                self._note_memory(self._clock.now_us, memory.bytes_held)
            elif kind is InstructionKind.SENT:
                edge, microbatch = int(instruction.ref), instruction.microbatches[0]
                message = network.message(edge, microbatch)
                yield from self._wait(message.left, message.name, message)
                memory.sent(edge, microbatch)
                self._note_memory(self._clock.now_us, memory.bytes_held)
            else:
                collective = self._collective(instruction)
                if kind in (InstructionKind.LOSS, InstructionKind.REDUCE):
                    network.join(collective, self._index)
                else:
                    yield from self._wait(collective.done, f"pp {collective.lane}", collective)

    def _collective(self, instruction: Instruction) -> Collective:
        of_loss = instruction.kind in (InstructionKind.LOSS, InstructionKind.HEARD)
        name = "loss" if of_loss else f"tied {instruction.ref}"
        found = self._walk.network.collective(name)
        if found is None or self._index not in found.ranks:
            fault = f"rank {self._index}: `{instruction}` needs a communicator {name!r} that holds the rank"
            raise PlanError("cannot simulate the plan", [fault])
        return found

    def _run(self, name: str, microbatches: tuple[int, ...]) -> Lane:
        ready = self._walk.window(name)
        changes = self._memory.run(ready, microbatches)
        actions = [
            Action(stage, phase, microbatch)
            for (stage, phase), microbatch in zip(ready.window.parts, microbatches, strict=True)
        ]
        extra_us = self._walk.plan.costs.action_us
        for segment, change in zip(ready.segments, changes, strict=True):
            work_us = segment.work_us + extra_us
            start_us = self._clock.now_us
            if work_us:
                self._extend(actions[segment.part], start_us)
                yield work_us
                self._action_end_us = self._clock.now_us
            self._apply(change, start_us)
            extra_us = 0.0
            if segment.control is not None:
                yield from self._control(segment, microbatches[segment.control_part])

    def _control(self, segment: Segment, microbatch: int) -> Lane:
        key = (segment.edge, microbatch)
        if segment.local:
            if segment.control is ItemKind.SEND:
                self._walk.made.add(key)
            elif key not in self._walk.made:
                name = f"e{segment.edge}:{microbatch}"
                # Only this lane could make the value, so the wait can never end.
                yield from self._wait(Moment(), name, f"{name}, which this rank itself makes later")
        elif segment.control is ItemKind.SEND:
            self._walk.network.send(*key)
        else:
            message = self._walk.network.message(*key)
            yield from self._wait(message.arrived, message.name, message)

    def _wait(self, moment: Moment, name: str, what: Message | Collective | str) -> Lane:
        if moment.happened:
            return
        start_us = self._clock.now_us
        self._waits_for = what
        yield moment
        begun_us = moment.begun_us
        self._flush()
        self.stand(start_us, self._clock.now_us, start_us if begun_us is None else begun_us, name)

    # --- step 5: work at the speed that transfers leave ---------------------------------------------

    def resume(self) -> None:
        """Let the lane go on until it works, stands or has ended."""
        request = next(self._lane, None)
        if request is None:
            self.finished = True
            self.end_us = self._clock.now_us
            self._flush()
        elif isinstance(request, Moment):
            request.then(self.resume)
        else:
            self._left_us = request
            self._since_us = self._clock.now_us
            self._working = True
            self._aim()

    def change_load(self, share: float) -> None:
        """A transfer takes `share` of the processor from now on, or (negative) gives it back."""
        if share > 0:
            self._shares.append(share)
        else:
            self._shares.remove(-share)
        now_us = self._clock.now_us
        self._left_us -= (now_us - self._since_us) * self._speed
        self._since_us = now_us
        self._speed = max(0.0, 1.0 - sum(self._shares))
        if self._working:
            self._aim()

    def _aim(self) -> None:
        """Put the end of the work into the clock; an earlier aim no longer counts."""
        self._version += 1
        version = self._version
        if self._speed > 0:
            end_us = self._clock.now_us + max(0.0, self._left_us) / self._speed
            self._clock.at(end_us, lambda: self._finish_work(version))

    def _finish_work(self, version: int) -> None:
        if version == self._version and self._working:
            self._working = False
            self.resume()

    # --- step 6: accounts ---------------------------------------------------------------------------

    def _extend(self, action: Action, start_us: float) -> None:
        if self._action is not action:
            self._flush()
            self._action, self._action_start_us = action, start_us

    def _flush(self) -> None:
        """Write the compute span that was being extended."""
        action, self._action = self._action, None
        if action is not None:
            self._walk.spans.append(
                Span(
                    self._index,
                    COMPUTE_LANE,
                    SpanKind.COMPUTE,
                    str(action),
                    self._action_start_us,
                    self._action_end_us,
                    action.stage,
                    action.phase,
                    action.microbatch,
                )
            )

    def stand(self, start_us: float, end_us: float, begun_us: float, name: str) -> None:
        """The lane stood still; what it waited for was under way from `begun_us` on."""
        begun_us = min(max(begun_us, start_us), end_us)
        for kind, first, last in (
            (SpanKind.BUBBLE, start_us, begun_us),
            (SpanKind.EXPOSED, begun_us, end_us),
        ):
            if last > first:
                self._walk.spans.append(Span(self._index, COMPUTE_LANE, kind, name, first, last))

    def _apply(self, change: Change, start_us: float) -> None:
        now_us = self._clock.now_us
        held = self._memory.bytes_held
        if change.peak:
            self._note_memory(start_us + change.at * (now_us - start_us), held + change.peak)
        self._memory.bytes_held = held + change.end
        self._note_memory(now_us, held + change.end)

    def _note_memory(self, time_us: float, held: int) -> None:
        self.peak_bytes = max(self.peak_bytes, held)
        if self.steps[-1][1] != held:
            self.steps.append((time_us, held))

    # --- step 7: nothing can happen any more --------------------------------------------------------

    def stuck(self) -> str:
        """Where the rank stands for ever, and what it waits for."""
        what = self._waits_for
        if isinstance(what, Message | Collective):
            what = what.why_missing()
        return f"rank {self._index} stands at `{self._at}`: waits for {what}"
