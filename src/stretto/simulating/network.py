"""The messages of the simulation: in order on their communicator, cards shared.

Knows ranks, edges and links; nothing of windows or memory. The contract:

1. A message may transfer once its send has started, its receive is posted, and the message before it on its
   communicator has been transferred.
2. A rank sends one message at a time and receives one at a time: of messages, its network card serves each
   direction in turn. Of the messages that may transfer, the one whose send started first goes first, of
   those that started at one moment that of the lower rank; one whose receiver is busy lets the next go.
   What may transfer at a moment is known when all that happens then has happened.
3. A transfer keeps both cards for `occupancy_us`. Its message can be used `latency_us` later; the latency
   keeps nothing busy. Collectives that use the same cards slow it down, and it them (`simulating.cards`).
4. A message has left, and its sender need not wait for it, when its transfer has ended.
5. While it transfers, a message takes an even share of both ends' processors, processor time over
   transfer time. What the shares leave is the speed of the compute lane, at least 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stretto.ir.costs import Costs
from stretto.ir.plan import Plan
from stretto.ir.timeline import Span, SpanKind
from stretto.ir.transfers import occupancy_us, processor_us
from stretto.simulating.cards import Cards, Clock, Moment, Transfer


@dataclass(slots=True, eq=False)
class Message:
    """One microbatch's value on its way over one edge. number: how many sends its rank started before it."""

    channel: Channel
    edge: int
    microbatch: int
    nbytes: int
    sent_us: float | None = None
    number: int = 0
    posted: bool = False
    left: Moment = field(default_factory=Moment)
    arrived: Moment = field(default_factory=Moment)

    @property
    def name(self) -> str:
        return f"{self.channel.lane} e{self.edge}:{self.microbatch}"


@dataclass(slots=True, eq=False)
class Channel:
    """One communicator of two ranks: its sent messages, which transfer in order."""

    lane: str
    sender: int
    receiver: int
    waiting: deque[Message] = field(default_factory=deque)
    busy: bool = False


class Network:
    """All messages of one step."""

    def __init__(self, plan: Plan, clock: Clock, cards: Cards, spans: list[Span]) -> None:
        self._plan = plan
        self._costs: Costs = plan.costs
        self._clock = clock
        self._cards = cards
        self._spans = spans
        self._messages: dict[tuple[int, int], Message] = {}
        self._channels: dict[tuple[int, int], Channel] = {}
        self._from: dict[int, list[Channel]] = {}
        self._to: dict[int, list[Channel]] = {}
        self._sending: set[int] = set()
        self._receiving: set[int] = set()
        self._sent: dict[int, int] = {}
        self._may_start: dict[tuple[int, int], Channel] = {}

    def message(self, edge: int, microbatch: int) -> Message:
        """The message of an edge for a microbatch, whether or not anything has happened to it."""
        result = self._messages.get((edge, microbatch))
        if result is None:
            of = self._plan.job.edges[edge]
            ends = self._plan.rank_of(of.source), self._plan.rank_of(of.target)
            channel = self._channels.get(ends)
            if channel is None:
                channel = self._channels[ends] = Channel(f"pp {ends[0]}>{ends[1]}", *ends)
                self._from.setdefault(ends[0], []).append(channel)
                self._to.setdefault(ends[1], []).append(channel)
            result = self._messages[edge, microbatch] = Message(channel, edge, microbatch, of.spec.nbytes)
        return result

    def send(self, edge: int, microbatch: int) -> Message:
        """Step 1: the sender starts the message now; when it has `left`, its buffer may go."""
        message = self.message(edge, microbatch)
        message.sent_us = message.left.begun_us = message.arrived.begun_us = self._clock.now_us
        sender = message.channel.sender
        message.number = self._sent.get(sender, 0)
        self._sent[sender] = message.number + 1
        message.channel.waiting.append(message)
        self._start([message.channel])
        return message

    def post(self, edge: int, microbatch: int) -> Message:
        """Step 1: the receiver posts the buffer now; when the message has `arrived`, it can be used."""
        message = self.message(edge, microbatch)
        message.posted = True
        self._start([message.channel])
        return message

    def _start(self, channels: list[Channel]) -> None:
        """Step 2: let transfers begin on those of `channels` that can, when all has come that comes now."""
        ready = {
            (channel.sender, channel.receiver): channel
            for channel in channels
            if not channel.busy and channel.waiting and channel.waiting[0].posted
        }
        if ready and not self._may_start:
            self._clock.choose(self._choose)
        self._may_start |= ready

    def _choose(self) -> None:
        ready, self._may_start = self._may_start, {}
        for channel in sorted(ready.values(), key=_turn):
            if channel.sender not in self._sending and channel.receiver not in self._receiving:
                self._transfer(channel, channel.waiting.popleft())

    def _transfer(self, channel: Channel, message: Message) -> None:
        link = self._costs.link(channel.sender, channel.receiver)
        start_us = self._clock.now_us
        busy_us = occupancy_us(link, message.nbytes)
        share = processor_us(link, message.nbytes) / busy_us if busy_us else 0.0
        ends = (channel.sender, channel.receiver)
        self._sending.add(channel.sender)
        self._receiving.add(channel.receiver)

        def leave() -> None:
            channel.busy = False
            self._sending.discard(channel.sender)
            self._receiving.discard(channel.receiver)
            self._draw(message, start_us, self._clock.now_us + link.latency_us)
            message.left.happen(self._clock)
            into = [c for c in self._to[channel.receiver] if c.sender != channel.sender]
            self._start([*self._from[channel.sender], *into])

        def arrive() -> None:
            message.arrived.happen(self._clock)

        cards = ((channel.sender, True), (channel.receiver, False))
        channel.busy = True
        self._cards.begin(
            Transfer(busy_us, link.latency_us, cards, ends, share, 0.0, leave, arrive, until_arrival=False)
        )

    def _draw(self, message: Message, start_us: float, arrival_us: float) -> None:
        edge, channel = self._plan.job.edges[message.edge], message.channel
        lane, kind, name = channel.lane, SpanKind.MESSAGE, message.name
        of = edge.source, edge.phase, message.microbatch, message.nbytes
        sent = *of, channel.sender, message.sent_us, message.edge
        self._spans.append(Span(channel.receiver, lane, kind, name, start_us, arrival_us, *sent))


def _turn(channel: Channel) -> tuple[float, int, int]:
    """By what messages that may transfer go, of the first on each channel."""
    first = channel.waiting[0]
    assert first.sent_us is not None
    # A picosecond is a rounding of sums in another order.
    return round(first.sent_us, 6), channel.sender, first.number
