"""Proves that messages match: each sent once and received once, in one order on each communicator, posted
before it is waited for, and its buffer kept until it has left. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.plan import Plan
from stretto.verify.fault import Fault, listed
from stretto.verify.trace import Event, EventKind, Message, ends_of, shown, trace_of


def message_faults(plan: Plan) -> list[Fault]:
    """Every fault of the messages between ranks. References must be sound."""
    found: list[Fault] = []
    sends: dict[str, list[Message]] = defaultdict(list)
    posts: dict[str, list[Message]] = defaultdict(list)
    for rank in range(plan.ranks):
        events = list(trace_of(plan, rank))
        for event in events:
            source, target = ends_of(plan, event.message[0]) if event.message[0] >= 0 else (-1, -1)
            if event.kind is EventKind.SEND and source == rank != target:
                sends[plan.lane_of(event.message[0])].append(event.message)
            elif event.kind is EventKind.RECV and target == rank != source:
                posts[plan.lane_of(event.message[0])].append(event.message)
        found += _receives(plan, rank, events)
        found += _departures(plan, rank, events)
    for name in sorted({*sends, *posts}):
        found += _one_order(plan, name, sends[name], posts[name])
    found += _complete(plan, sends, posts)
    return found


def _receives(plan: Plan, rank: int, events: list[Event]) -> Iterator[Fault]:
    """Each receive on the rank that its edge leads to, once, and posted before the run that waits."""
    posted: dict[Message, int] = {}
    for event in events:
        if event.kind is not EventKind.RECV:
            continue
        source, target = ends_of(plan, event.message[0])
        if source == target:
            yield Fault(
                rank,
                str(event.instruction),
                f"the value stays on rank {source}; there is no message",
                "Remove it",
            )
        elif target != rank:
            yield Fault(
                rank,
                str(event.instruction),
                f"the edge leads from rank {source} to rank {target}, not here",
                f"Move it to rank {target}",
            )
        elif not 0 <= event.message[1] < plan.job.microbatches:
            yield Fault(
                rank,
                str(event.instruction),
                f"there is no microbatch {event.message[1]}",
                f"Microbatches count from 0 to {plan.job.microbatches - 1}",
            )
        elif event.message in posted:
            yield Fault(rank, str(event.instruction), "the receive is posted twice", "Remove one of them")
        else:
            posted[event.message] = event.at
    for event in events:
        if event.kind is not EventKind.WAIT or len(set(ends_of(plan, event.message[0]))) == 1:
            continue
        at = posted.get(event.message)
        if at is None:
            yield Fault(
                rank,
                str(event.instruction),
                f"waits for {shown(plan, event.message)}, whose receive is never posted",
                f"Add `recv e{event.message[0]}:{event.message[1]}` before it",
            )
        elif at > event.at:
            yield Fault(
                rank,
                str(event.instruction),
                f"waits for {shown(plan, event.message)}, whose receive is posted later, at instruction {at}",
                f"Move `recv e{event.message[0]}:{event.message[1]}` before it",
            )


def _departures(plan: Plan, rank: int, events: list[Event]) -> Iterator[Fault]:
    """Each send is waited for once, after it has started."""
    started: dict[Message, int] = {}
    left: set[Message] = set()
    for event in events:
        if event.kind is EventKind.SEND and len(set(ends_of(plan, event.message[0]))) > 1:
            started.setdefault(event.message, event.at)
        elif event.kind is EventKind.SENT:
            if event.message in left:
                yield Fault(rank, str(event.instruction), "waited for twice", "Remove one of them")
            elif event.message not in started:
                here = ends_of(plan, event.message[0])[0] == rank
                yield Fault(
                    rank,
                    str(event.instruction),
                    "waits for a message that has not started"
                    if here
                    else "the message is not sent from this rank",
                    "Move it after the run that sends it" if here else "Remove it",
                )
            left.add(event.message)
    for message in started:
        if message not in left:
            yield Fault(
                rank,
                f"send e{message[0]}:{message[1]}",
                f"nothing waits until {shown(plan, message)} has left; its buffer could be reused too early",
                f"Add `sent e{message[0]}:{message[1]}`",
            )


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


def _complete(
    plan: Plan, sends: dict[str, list[Message]], posts: dict[str, list[Message]]
) -> Iterator[Fault]:
    """Every edge between ranks carries one message for every microbatch."""
    for edge in plan.job.edges:
        source, target = ends_of(plan, edge.index)
        if source == target:
            continue
        lane = plan.lane_of(edge.index)
        for rank, word, cure, messages in (
            (source, "sent", "run the window that sends it once for each", sends[lane]),
            (target, "received", f"add `recv e{edge.index}:<microbatch>` once for each", posts[lane]),
        ):
            carried = [m for e, m in messages if e == edge.index]
            have = set(carried)
            if len(have) < plan.job.microbatches:
                absent = listed(m for m in range(plan.job.microbatches) if m not in have)
                yield Fault(
                    rank,
                    f"edge {edge}",
                    f"not {word} for microbatches {absent}",
                    cure[0].upper() + cure[1:],
                )
            if len(have) < len(carried) and word == "sent":
                twice = listed(sorted(m for m in have if carried.count(m) > 1))
                yield Fault(rank, f"edge {edge}", f"{word} twice for microbatches {twice}", "Send it once")
