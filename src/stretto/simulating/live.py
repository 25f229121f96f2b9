"""A step in which one rank is real: its peers and all lanes are simulated, and answer to what it does when
it does it. So one rank of a plan can be tried alone (`stretto.runtime.rehearse`).

The caller gives the time, in microseconds from the step's start, with everything that it does; no time may be
before an earlier one. The contract:

1. Before the real rank does anything, all events up to its time happen (`clock.advance`).
2. What it starts, sends, posts or joins enters lanes and network cards as in `stretto.simulating.engine`
   (`collectives.start`, `network.send` and `post`).
3. When it waits, events happen until what it waits for does; it learns when that is. Nothing that it
   could do is missed: it waits.
"""

from __future__ import annotations

from stretto.errors import PlanError
from stretto.ir.plan import InstructionKind, Plan
from stretto.simulating.cards import Moment
from stretto.simulating.engine import Walk
from stretto.simulating.windows import Call, Control, ReadyWindow
from stretto.verifying.messages import deadlock_faults
from stretto.verifying.trace import EventKind, ends_of, trace_of


class Live(Walk):
    """One step of `plan` with a real rank at a pipeline rank. windows: all, ready to walk. Raises PlanError
    for windows, ops or costs that are missing."""

    def __init__(self, plan: Plan, pp_rank: int, windows: dict[str, ReadyWindow] | None = None) -> None:
        super().__init__(plan, pp_rank, windows)
        self._place = pp_rank

    def until(self, moment: Moment, what: str) -> float:
        """Let events happen until `moment` does; returns when that is, in microseconds. Raises PlanError when
        it never will."""
        while not moment.happened:
            if not self.clock.step():
                fault = f"rank {self._place} waits forever: waits for {what}"
                raise PlanError("the plan stops", [fault, *deadlock_faults(self.plan)])
        return self.clock.now_us

    def end(self, least_us: float = 0.0) -> float:
        """The real rank has ended: the others go on to their ends. Returns when the last of all ended."""
        self.clock.advance(least_us)
        return super().end(least_us)


def calls_of(plan: Plan, pp_rank: int, windows: dict[str, ReadyWindow]) -> dict[str, list[tuple[Call, int]]]:
    """Lane -> the collectives that a pipeline rank starts there in one step, in order, each with its
    microbatch."""
    result: dict[str, list[tuple[Call, int]]] = {}
    for instruction in plan.orders[pp_rank]:
        if instruction.kind is InstructionKind.RUN:
            ready = windows[str(instruction.ref)]
            for segment in ready.segments:
                if segment.control is Control.START and segment.call is not None:
                    started = segment.call, instruction.microbatches[segment.control_part]
                    result.setdefault(segment.call.axis, []).append(started)
    return result


def messages_of(plan: Plan, pp_rank: int, kind: EventKind) -> dict[str, list[tuple[int, int]]]:
    """Lane -> (edge, microbatch) of the messages that a pipeline rank sends (kind SEND), or posts receives
    for (RECV), in order."""
    result: dict[str, list[tuple[int, int]]] = {}
    for event in trace_of(plan, pp_rank):
        if event.kind is kind and len(set(ends_of(plan, event.message[0]))) > 1:
            result.setdefault(plan.lane_of(event.message[0]), []).append(event.message)
    return result
