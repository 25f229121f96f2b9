"""A step in which one rank is real: its peers and all lanes are simulated, and answer to what it does when
it does it. So one rank of a plan can be tried alone (`stretto.runtime.rehearse`).

The caller tells the time, in microseconds from the step's start, with everything that it does; no time may be
before an earlier one. The contract:

1. Before the real rank does anything, all events up to its time happen.
2. What it starts, sends, posts or joins enters lanes and network cards as in `stretto.simulating.engine`.
3. When it waits, events happen until what it waits for does; it is told when that is. Nothing that it could
   do is missed: it stands.
"""

from __future__ import annotations

from stretto.errors import PlanError
from stretto.ir.plan import InstructionKind, Plan
from stretto.ir.program import WAIT
from stretto.ir.timeline import Span
from stretto.simulating.clock import Moment
from stretto.simulating.collectives import RunningCollective
from stretto.simulating.engine import Walk
from stretto.simulating.network import Message
from stretto.simulating.windows import Call, ReadyWindow, make_ready
from stretto.verifying.trace import EventKind, ends_of, trace_of


class Live:
    """One step of `plan` with a real rank at a place of the pipeline. windows: see `ready_windows`.

    Raises PlanError for windows, ops or costs that are missing.
    """

    def __init__(self, plan: Plan, place: int, windows: dict[str, ReadyWindow] | None = None) -> None:
        self._walk = Walk(plan, place, windows)
        self._clock = self._walk.clock
        self._place = place

    @property
    def now_us(self) -> float:
        """The latest time that was told, or that a wait ended at."""
        return self._clock.now_us

    def begin(self) -> None:
        """The step begins, at 0."""
        self._walk.begin()

    def advance(self, now_us: float) -> None:
        """Step 1."""
        self._clock.advance(now_us)

    # 2. What the real rank does.

    def send(self, edge: int, microbatch: int) -> Message:
        """Start a message; `left` of what is returned happens when its buffer may go."""
        self._walk.network.send(edge, microbatch)
        return self._walk.network.message(edge, microbatch)

    def post(self, edge: int, microbatch: int) -> Message:
        """Post a receive; `arrived` of what is returned happens when the message can be used."""
        self._walk.network.post(edge, microbatch)
        return self._walk.network.message(edge, microbatch)

    def start(self, call: Call, microbatch: int) -> RunningCollective:
        """Start a collective, or the rank's part of one that joins places."""
        return self._walk.collectives.start(call, self._place, microbatch)

    # 3. What it waits for.

    def until(self, moment: Moment, what: str) -> float:
        """Let events happen until `moment` does; returns when that is, in microseconds.

        Raises PlanError when it never will, with what every other rank stands for.
        """
        while not moment.happened:
            if not self._clock.step():
                fault = f"rank {self._place} stands for ever: waits for {what}"
                raise PlanError("the plan stops", [fault, *self._walk.stuck()])
        return self._clock.now_us

    def end(self, now_us: float) -> float:
        """The real rank has ended: the others go on to their ends. Returns when the last of all ended."""
        self._clock.advance(now_us)
        self._clock.run()
        stuck = self._walk.stuck()
        if stuck:
            raise PlanError("the plan stops: ranks wait for each other for ever", stuck)
        return self._walk.end(now_us)

    @property
    def spans(self) -> list[Span]:
        """The other ranks' spans, and the real one's messages and collectives."""
        return self._walk.spans

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The other ranks' peak memory."""
        return {rank: result.accounts.peak_bytes for rank, result in self._walk.ranks.items()}


def ready_windows(plan: Plan) -> dict[str, ReadyWindow]:
    """All windows ready to walk, so that no step has to make them. Raises PlanError for what is missing."""
    return {name: make_ready(plan, name) for name in plan.windows}


def calls_of(plan: Plan, place: int, windows: dict[str, ReadyWindow]) -> dict[str, list[tuple[Call, int]]]:
    """Lane -> the collectives that a place starts there in one step, in order, each with its microbatch."""
    result: dict[str, list[tuple[Call, int]]] = {}
    for instruction in plan.orders[place]:
        if instruction.kind is InstructionKind.RUN:
            ready = windows[str(instruction.ref)]
            for item, op, call in zip(ready.window.items, ready.ops, ready.calls, strict=True):
                if call is not None and op is not None and op.target != WAIT:
                    result.setdefault(call.axis, []).append((call, instruction.microbatches[item.part]))
    return result


def messages_of(plan: Plan, place: int, kind: EventKind) -> dict[str, list[tuple[int, int]]]:
    """Lane -> (edge, microbatch) of the messages that a place sends (kind SEND), or posts receives for
    (RECV), in order."""
    result: dict[str, list[tuple[int, int]]] = {}
    for event in trace_of(plan, place):
        if event.kind is kind and len(set(ends_of(plan, event.message[0]))) > 1:
            result.setdefault(plan.lane_of(event.message[0]), []).append(event.message)
    return result
