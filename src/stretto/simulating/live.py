"""A step in which one rank is real: its peers and all lanes are simulated, and answer to what it does when
it does it. So one rank of a plan can be tried alone (`stretto.runtime.rehearse`).

The caller gives the time, in microseconds from the step's start, with everything that it does; no time may be
before an earlier one. The contract:

1. Before the real rank does anything, all events up to its time happen.
2. What it starts, sends, posts or joins enters lanes and network cards as in `stretto.simulating.engine`.
3. When it waits, events happen until what it waits for does; it learns when that is. Nothing that it
   could do is missed: it waits.
"""

from __future__ import annotations

from stretto.errors import PlanError
from stretto.ir.plan import InstructionKind, Plan
from stretto.ir.program import WAIT
from stretto.simulating.cards import Moment
from stretto.simulating.collectives import RunningCollective
from stretto.simulating.engine import Walk
from stretto.simulating.network import Message
from stretto.simulating.windows import Call, ReadyWindow, make_ready
from stretto.verifying.trace import EventKind, ends_of, trace_of


class Live(Walk):
    """One step of `plan` with a real rank at a pipeline rank. windows: see `ready_windows`. Raises PlanError
    for windows, ops or costs that are missing."""

    def __init__(self, plan: Plan, pp_rank: int, windows: dict[str, ReadyWindow] | None = None) -> None:
        super().__init__(plan, pp_rank, windows)
        self._place = pp_rank

    @property
    def now_us(self) -> float:
        """The latest time that was reported, or that a wait ended at."""
        return self.clock.now_us

    def advance(self, now_us: float) -> None:
        """Step 1."""
        self.clock.advance(now_us)

    def send(self, edge: int, microbatch: int) -> Message:
        """Start a message; `left` of what is returned happens when its buffer may go."""
        self.network.send(edge, microbatch)
        return self.network.message(edge, microbatch)

    def post(self, edge: int, microbatch: int) -> Message:
        """Post a receive; `arrived` of what is returned happens when the message can be used."""
        self.network.post(edge, microbatch)
        return self.network.message(edge, microbatch)

    def start(self, call: Call, microbatch: int) -> RunningCollective:
        """Start a collective, or the rank's part of a collective that joins pipeline ranks."""
        return self.collectives.start(call, self._place, microbatch)

    def until(self, moment: Moment, what: str) -> float:
        """Let events happen until `moment` does; returns when that is, in microseconds. Raises PlanError when
        it never will, with what every other rank waits for."""
        while not moment.happened:
            if not self.clock.step():
                fault = f"rank {self._place} waits forever: waits for {what}"
                raise PlanError("the plan stops", [fault, *self.stuck()])
        return self.clock.now_us

    def end(self, least_us: float = 0.0) -> float:
        """The real rank has ended: the others go on to their ends. Returns when the last of all ended."""
        self.clock.advance(least_us)
        self.clock.run()
        if stuck := self.stuck():
            raise PlanError("the plan stops: ranks wait for each other forever", stuck)
        return super().end(least_us)

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The other ranks' peak memory."""
        return {rank: result.accounts.peak_bytes for rank, result in self.ranks.items()}


def ready_windows(plan: Plan) -> dict[str, ReadyWindow]:
    """All windows ready to walk, so that no step has to make them. Raises PlanError for what is missing."""
    return {name: make_ready(plan, name) for name in plan.windows}


def calls_of(plan: Plan, pp_rank: int, windows: dict[str, ReadyWindow]) -> dict[str, list[tuple[Call, int]]]:
    """Lane -> the collectives that a pipeline rank starts there in one step, in order, each with its
    microbatch."""
    result: dict[str, list[tuple[Call, int]]] = {}
    for instruction in plan.orders[pp_rank]:
        if instruction.kind is InstructionKind.RUN:
            ready = windows[str(instruction.ref)]
            for item, op, call in zip(ready.window.items, ready.ops, ready.calls, strict=True):
                if call is not None and op is not None and op.target != WAIT:
                    result.setdefault(call.axis, []).append((call, instruction.microbatches[item.part]))
    return result


def messages_of(plan: Plan, pp_rank: int, kind: EventKind) -> dict[str, list[tuple[int, int]]]:
    """Lane -> (edge, microbatch) of the messages that a pipeline rank sends (kind SEND), or posts receives
    for (RECV), in order."""
    result: dict[str, list[tuple[int, int]]] = {}
    for event in trace_of(plan, pp_rank):
        if event.kind is kind and len(set(ends_of(plan, event.message[0]))) > 1:
            result.setdefault(plan.lane_of(event.message[0]), []).append(event.message)
    return result
