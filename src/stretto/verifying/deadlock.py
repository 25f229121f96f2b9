"""Proves that all ranks reach the end of their orders: a walk over all of them at once, without times.

1. A message passes when its send has started, its receive is posted, and the messages before it on the same
   communicator have passed.
2. `wait` blocks until its message has passed; that for a sum until every member has started it.
   Collectives over other axes join ranks of one place, which walk the same order: none waits for another.
3. `sent` blocks, on a transport with buffers, not at all; on one without (rendezvous), until its message has
   passed. A plan must reach its end on both, because a transport may do either.

Nothing here depends on the order in which the walk visits ranks: whatever can pass stays able to. Messages
must match (`stretto.verifying.messages`).
"""

from __future__ import annotations

from collections import Counter

from stretto.ir.plan import Plan
from stretto.verifying.fault import Fault
from stretto.verifying.schedule import walk
from stretto.verifying.trace import Event, EventKind, Message, shown, trace_of

CURES = {
    EventKind.SENT: "Move it later: other runs must go on before the message can leave",
    EventKind.WAIT: "Reorder the runs, so that the sender need not wait for this rank first",
}


def deadlock_faults(plan: Plan) -> list[Fault]:
    """A fault for each rank that gets stuck: with buffered sends, else (if none does) with rendezvous."""
    traces = [list(trace_of(plan, rank)) for rank in range(plan.ranks)]
    for rendezvous in (False, True):
        walk = _Walk(plan, traces, rendezvous)
        stuck = walk.run()
        if stuck:
            return stuck
    return []


class _Walk:
    """The state of one walk: where each rank stands, and what has started on each communicator."""

    def __init__(self, plan: Plan, traces: list[list[Event]], rendezvous: bool) -> None:
        self.plan = plan
        self.traces = traces
        self.rendezvous = rendezvous
        self.heads = [0] * len(traces)
        self.sent: Counter[str] = Counter()
        self.place: dict[Message, int] = {}
        self.posted: Counter[str] = Counter()
        self.reducing: set[tuple[str, int]] = set()
        # Groups along an axis lie within a rank of the pipeline; only these wait for other ranks.
        self.joined = {result.name: result.ranks for result in plan.communicators if result.joins_places}

    def run(self) -> list[Fault]:
        """Walk until no rank can move; a fault for each rank that has not reached its end."""
        walk(self.heads, self.step)
        return [self.stuck(rank) for rank, trace in enumerate(self.traces) if self.heads[rank] < len(trace)]

    def step(self, rank: int) -> bool:
        """Do what comes next on a rank, if it can pass."""
        if self.heads[rank] == len(self.traces[rank]):
            return False
        event = self.traces[rank][self.heads[rank]]
        if self.blocked(event) is not None:
            return False
        if event.kind in (EventKind.SEND, EventKind.RECV) and event.source != event.target:
            lane = self.plan.lane_of(event.message[0])
            count = self.sent if event.kind is EventKind.SEND else self.posted
            if event.kind is EventKind.SEND:
                self.place[event.message] = count[lane]
            count[lane] += 1
        elif event.kind is EventKind.REDUCE and event.op is not None:
            self.reducing.add((event.op.lane, event.rank))
        return True

    def blocked(self, event: Event) -> str | None:
        """What the event waits for, in words; None if it can pass."""
        if event.kind is EventKind.WAIT or (event.kind is EventKind.SENT and self.rendezvous):
            if event.source == event.target:
                return None  # proved by `stretto.verifying.messages`
            if event.message not in self.place:
                return f"{shown(self.plan, event.message)}, which rank {event.source} has not sent"
            if self.place[event.message] >= self.posted[self.plan.lane_of(event.message[0])]:
                return f"{shown(self.plan, event.message)}, whose receive rank {event.target} has not posted"
        elif event.kind is EventKind.REDUCED and event.op is not None:
            lane = event.op.lane
            absent = [r for r in self.joined.get(lane, ()) if (lane, r) not in self.reducing]
            if absent:
                wait = self.plan.windows[str(event.instruction.ref)].items[event.item].ref
                return (
                    f"the sum of {', '.join(event.op.sums)} ({wait}), which ranks {absent} have not started"
                )
        return None

    def stuck(self, rank: int) -> Fault:
        event = self.traces[rank][self.heads[rank]]
        transport = " on a transport without buffers" if self.rendezvous else ""
        others = "; ".join(
            f"rank {other} stands at `{trace[self.heads[other]].instruction}`"
            for other, trace in enumerate(self.traces)
            if other != rank and self.heads[other] < len(trace)
        )
        what = f"deadlock{transport}: waits for {self.blocked(event)}"
        cure = CURES.get(event.kind, "Move this wait later")
        return event.fault(what + (f" ({others})" if others else ""), cure)
