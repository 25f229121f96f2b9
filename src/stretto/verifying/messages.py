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
from collections.abc import Iterator

from stretto.errors import listed
from stretto.ir.plan import Plan
from stretto.verifying.fault import Fault
from stretto.verifying.schedule import walk
from stretto.verifying.trace import Event, EventKind, Message, ends_of, shown, trace_of

Lanes = dict[str, list[Message]]
"""By communicator: its messages, in the order of a rank."""


def message_faults(plan: Plan) -> list[Fault]:
    """Every fault of the messages between ranks. References must be sound."""
    result: list[Fault] = []
    sends: Lanes = defaultdict(list)
    posts: Lanes = defaultdict(list)
    for rank in range(plan.ranks):
        events = list(trace_of(plan, rank))
        for event in events:
            if event.source == event.target:
                continue
            if event.kind is EventKind.SEND and event.source == rank:
                sends[plan.lane_of(event.message[0])].append(event.message)
            elif event.kind is EventKind.RECV and event.target == rank:
                posts[plan.lane_of(event.message[0])].append(event.message)
        result += _receives(plan, events)
        result += _departures(plan, events)
    for name in sorted({*sends, *posts}):
        result += _one_order(plan, name, sends[name], posts[name])
    result += _complete(plan, sends, posts)
    return result


def _receives(plan: Plan, events: list[Event]) -> Iterator[Fault]:
    """Each receive on the rank that its edge leads to, once, and posted before the run that waits."""
    posted: dict[Message, int] = {}
    for event in events:
        source, target, microbatch = event.source, event.target, event.message[1]
        if event.kind is not EventKind.RECV:
            continue
        if source == target:
            yield event.fault(f"the value stays on rank {source}; there is no message", "Remove it")
        elif target != event.rank:
            what = f"the edge leads from rank {source} to rank {target}, not here"
            yield event.fault(what, f"Move it to rank {target}")
        elif not 0 <= microbatch < plan.job.microbatches:
            fix = f"Microbatches count from 0 to {plan.job.microbatches - 1}"
            yield event.fault(f"there is no microbatch {microbatch}", fix)
        elif event.message in posted:
            yield event.fault("the receive is posted twice", "Remove one of them")
        else:
            posted[event.message] = event.at
    made: set[Message] = set()
    for event in events:
        if event.kind is EventKind.SEND:
            made.add(event.message)
        elif event.kind is EventKind.WAIT and event.source == event.target:
            if event.message not in made:
                source = plan.job.edges[event.message[0]].source
                what = f"{_waits(plan, event)}, which stage {source} of the same rank has not made yet"
                yield event.fault(what, f"Run stage {source} for that microbatch before it")
        elif event.kind is EventKind.WAIT:
            at, receive = posted.get(event.message), "`recv e{}:{}`".format(*event.message)
            if at is None:
                what = f"{_waits(plan, event)}, whose receive is never posted"
                yield event.fault(what, f"Add {receive} before it")
            elif at > event.at:
                what = f"{_waits(plan, event)}, whose receive is posted later, at instruction {at}"
                yield event.fault(what, f"Move {receive} before it")


def _waits(plan: Plan, event: Event) -> str:
    return f"waits for {shown(plan, event.message)}"


def _departures(plan: Plan, events: list[Event]) -> Iterator[Fault]:
    """Each send is waited for once, after it has started."""
    started: dict[Message, Event] = {}
    left: set[Message] = set()
    for event in events:
        if event.kind is EventKind.SEND and event.source != event.target:
            started.setdefault(event.message, event)
        elif event.kind is EventKind.SENT:
            if event.message in left:
                yield event.fault("waited for twice", "Remove one of them")
            elif event.source != event.rank:
                yield event.fault("the message is not sent from this rank", "Remove it")
            elif event.message not in started:
                what = "waits for a message that has not started"
                yield event.fault(what, "Move it after the run that sends it")
            left.add(event.message)
    for message, event in started.items():
        if message not in left:
            name = f"e{message[0]}:{message[1]}"
            what = (
                f"nothing waits until {shown(plan, message)} has left; its buffer could be reused too early"
            )
            yield Fault(event.rank, f"send {name}", what, f"Add `sent {name}`")


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


def _complete(plan: Plan, sends: Lanes, posts: Lanes) -> Iterator[Fault]:
    """Every edge between ranks carries one message for every microbatch."""
    for edge in plan.job.edges:
        source, target = ends_of(plan, edge.index)
        if source == target:
            continue
        for rank, word, fix, lanes in (
            (source, "sent", "Run the window that sends it once for each", sends),
            (target, "received", f"Add `recv e{edge.index}:<microbatch>` once for each", posts),
        ):
            carried = [m for e, m in lanes[plan.lane_of(edge.index)] if e == edge.index]
            have = set(carried)
            if len(have) < plan.job.microbatches:
                absent = listed(m for m in range(plan.job.microbatches) if m not in have)
                yield Fault(rank, f"edge {edge}", f"not {word} for microbatches {absent}", fix)
            if len(have) < len(carried) and word == "sent":
                twice = listed(sorted(m for m in have if carried.count(m) > 1))
                yield Fault(rank, f"edge {edge}", f"sent twice for microbatches {twice}", "Send it once")


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
        self.reducing: set[tuple[str, int]] = set()
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
        elif event.kind is EventKind.REDUCE and event.op is not None:
            self.reducing.add((event.op.lane, event.rank))
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
            f"rank {other} is at `{trace[self.heads[other]].instruction}`"
            for other, trace in enumerate(self.traces)
            if other != rank and self.heads[other] < len(trace)
        )
        what = f"deadlock{transport}: waits for {self.blocked(event)}"
        cure = CURES.get(event.kind, "Move this wait later")
        return event.fault(what + (f" ({others})" if others else ""), cure)
