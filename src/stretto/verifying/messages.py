"""Proves that messages match, and that all ranks reach the end of their orders.

Each message is sent once and received once, in one order on each communicator, posted before it is waited
for, and its buffer is kept until it has left. A value that stays on its rank is there before it is waited
for.

The walk for deadlock goes over all ranks at once, without times. Messages must match.

1. A message passes when its send has started, its receive is posted, and the messages before it on the same
   communicator have passed.
2. `wait` blocks until its message has passed; that for a sum until every member has started it. Collectives
   over other axes join ranks of one pipeline rank, which walk the same order: none waits for another.
3. `sent` blocks, on a transport with buffers, not at all; on one without (rendezvous), until its message
   has passed. A plan must reach its end on both, because a transport may do either.

Nothing here depends on the order in which the walk visits ranks: whatever can pass stays able to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from stretto.errors import listed
from stretto.ir.plan import Plan
from stretto.verifying.fault import Fault
from stretto.verifying.schedule import walk
from stretto.verifying.trace import Event, EventKind, Message, ends_of, shown, trace_of

BEFORE = {
    EventKind.WAIT: (EventKind.RECV, "whose receive is not posted before", "Post the receive before it"),
    EventKind.SENT: (EventKind.SEND, "which has not started before", "Move it after the run that sends it"),
}
"""What a wait needs before it, in words, and what to do."""

ONCE = {
    EventKind.SEND: ("not sent", "Run the window that sends it once for each"),
    EventKind.SENT: ("nothing waits until it has left", "Add `sent` for each"),
    EventKind.RECV: ("not received", "Add `recv` for each"),
}
"""What each message needs once: in words, where it is absent, and what to do."""


def message_faults(plan: Plan) -> list[Fault]:
    """Every fault of the messages between ranks. References must be sound."""
    result: list[Fault] = []
    lanes: dict[EventKind, dict[str, list[Message]]] = {kind: defaultdict(list) for kind in ONCE}
    for rank in range(plan.ranks):
        seen: dict[EventKind, set[Message]] = {kind: set() for kind in EventKind}
        for event in trace_of(plan, rank):
            if event.op is None:
                result += _event(plan, event, seen)
                seen[event.kind].add(event.message)
                if event.kind in ONCE and event.source != event.target:
                    lanes[event.kind][plan.lane_of(event.message[0])].append(event.message)
        result += _complete(plan, rank, seen)
    for name, sends in sorted(lanes[EventKind.SEND].items()):
        result += _one_order(plan, name, sends, lanes[EventKind.RECV][name])
    return result


def _event(plan: Plan, event: Event, seen: Mapping[EventKind, set[Message]]) -> Iterator[Fault]:
    """What one event does is due on its rank, and once, after what it needs. seen: what is before it."""
    kind, message, source, target = event.kind, event.message, event.source, event.target
    stays, bare = source == target, kind in (EventKind.RECV, EventKind.SENT)
    before, lacks, fix = BEFORE.get(kind, (None, "", ""))
    if stays and kind is EventKind.WAIT:
        stage = plan.job.edges[message[0]].source
        before, lacks = EventKind.SEND, f"which stage {stage} of the same rank has not made yet"
        fix = f"Run stage {stage} for that microbatch before it"
    if bare and stays:
        yield event.fault(f"the value stays on rank {source}; there is no message", "Remove it")
    elif bare and event.rank != (target if kind is EventKind.RECV else source):
        yield event.fault(
            f"the edge leads from rank {source} to rank {target}", "Move it there, or remove it"
        )
    elif bare and not 0 <= message[1] < plan.job.microbatches:
        fix = f"Microbatches count from 0 to {plan.job.microbatches - 1}"
        yield event.fault(f"there is no microbatch {message[1]}", fix)
    elif kind in ONCE and message in seen[kind]:
        yield event.fault(f"{kind} of {shown(plan, message)} is there twice", "Remove one of them")
    elif before is not None and message not in seen[before]:
        yield event.fault(f"waits for {shown(plan, message)}, {lacks}", fix)


def _complete(plan: Plan, rank: int, seen: Mapping[EventKind, set[Message]]) -> Iterator[Fault]:
    """Every edge between ranks carries one message for every microbatch. seen: what the rank does."""
    for edge in plan.job.edges:
        source, target = ends_of(plan, edge.index)
        for kind, (lacks, fix) in ONCE.items() if source != target else ():
            if rank == (target if kind is EventKind.RECV else source):
                absent = [m for m in range(plan.job.microbatches) if (edge.index, m) not in seen[kind]]
                if absent:
                    yield Fault(rank, f"edge {edge}", f"{lacks} for microbatches {listed(absent)}", fix)


def _one_order(plan: Plan, name: str, sends: list[Message], posts: list[Message]) -> Iterator[Fault]:
    """The k-th message that is sent on a communicator is the k-th that is received."""
    if sorted(sends) != sorted(posts):
        return  # what is missing or there twice is reported as such
    for k, (send, post) in enumerate(zip(sends, posts, strict=True)):
        if send != post:
            sender, receiver = ends_of(plan, send[0])
            yield Fault(
                receiver,
                f"recv e{post[0]}:{post[1]}",
                f"receive {k} on communicator {name} is {shown(plan, post)}, "
                f"but rank {sender} sends {shown(plan, send)} there",
                "Post the receives in the sender's order",
            )
            return


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
    """The state of one walk: where each rank is, and what has started on each communicator."""

    def __init__(self, plan: Plan, traces: list[list[Event]], rendezvous: bool) -> None:
        self.plan = plan
        self.traces = traces
        self.rendezvous = rendezvous
        self.heads = [0] * len(traces)
        self.sent: Counter[str] = Counter()
        self.position: dict[Message, int] = {}
        self.posted: Counter[str] = Counter()
        self.started: set[tuple[str, int]] = set()
        # Groups along an axis are within a rank of the pipeline; only these wait for other ranks.
        self.joined = {result.name: result.ranks for result in plan.communicators if result.joins_pp_ranks}

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
                self.position[event.message] = count[lane]
            count[lane] += 1
        elif event.kind is EventKind.START and event.op is not None:
            self.started.add((event.op.lane, event.rank))
        return True

    def blocked(self, event: Event) -> str | None:
        """What the event waits for, in words; None if it can pass."""
        if event.kind is EventKind.WAIT or (event.kind is EventKind.SENT and self.rendezvous):
            if event.source == event.target:
                return None  # proved by `stretto.verifying.messages`
            if event.message not in self.position:
                return f"{shown(self.plan, event.message)}, which rank {event.source} has not sent"
            if self.position[event.message] >= self.posted[self.plan.lane_of(event.message[0])]:
                return f"{shown(self.plan, event.message)}, whose receive rank {event.target} has not posted"
        elif event.kind is EventKind.FINISH and event.op is not None:
            lane = event.op.lane
            absent = [r for r in self.joined.get(lane, ()) if (lane, r) not in self.started]
            if absent:
                wait = self.plan.windows[str(event.instruction.ref)].items[event.item].ref
                return f"{event.op.name} ({wait}), which ranks {absent} have not started"
        return None

    def stuck(self, rank: int) -> Fault:
        event = self.traces[rank][self.heads[rank]]
        transport = " on a transport without buffers" if self.rendezvous else ""
        what = f"deadlock{transport}: waits for {self.blocked(event)}"
        return event.fault(what, CURES.get(event.kind, "Move this wait later"))
