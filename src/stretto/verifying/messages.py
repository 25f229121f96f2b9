"""Proves that messages match: each sent once and received once, in one order on each communicator, posted
before it is waited for, and its buffer kept until it has left. A value that stays on its rank is there before
it is waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.plan import Plan
from stretto.verifying.fault import Fault, listed
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
