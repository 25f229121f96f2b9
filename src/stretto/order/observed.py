"""What windows see of other ranks in a timeline: when messages arrive, and when theirs should leave.

    1. A run begins when the one before it on its rank has ended.
    2. An arrival is counted from the begin of the receiver's run.
    3. A message is due when its receiver comes to the wait for it: where the lane stood for it, when that
       began; else when the window's own clock (`order.follow`) comes there.
    4. A message's tail is the time from when it should have left, to be there when it is due, to the end of
       the sender's run.
    5. Of many runs of one window, medians count, without the first and the last: the steady state. They are
       rounded to a part of the window's work, so that windows of equal stages stay equal.

May touch `stretto.ir` and this room.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.ir.plan import Plan, Window
from stretto.ir.timeline import COMPUTE_LANE, SpanKind, Timeline
from stretto.order import Arranger, Outside, Role, replay
from stretto.schedule.windows import window_name, without_sums

PARTS = 100
"""Times are rounded to this part of a window's work. Assumed: finer ones do not change orders for good."""

Key = tuple[int, int]
"""(part, edge)."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a window: its begin and end."""

    window: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message between runs: by rank and index of the run, and part."""

    sender: tuple[int, int]
    out: Key
    receiver: tuple[int, int]
    into: Key
    sent_us: float
    arrives_us: float
    stands_us: float | None
    """When the receiver's lane began to stand for it."""


def observe(plan: Plan, timeline: Timeline, arranger: Arranger) -> dict[str, Outside]:
    """Window name -> what its runs see, for windows that have messages. arranger: of the plan's windows."""
    runs = _runs(plan, timeline)
    messages = _messages(plan, timeline)
    # 2. Arrivals.
    arrivals: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for message in messages:
        run = runs[message.receiver]
        arrivals[run.window][message.into].append(max(0.0, message.arrives_us - run.begin_us))
    ordered = _windows(plan)
    works_us = {name: arranger.graph(window).work_us for name, window in ordered.items()}
    seen = {name: _typical(found, works_us[name]) for name, found in arrivals.items()}
    # 3 and 4. When they are due, and tails.
    reached = {name: _reached(arranger, ordered[name], found) for name, found in seen.items()}
    tails: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for message in messages:
        sender, receiver = runs[message.sender], runs[message.receiver]
        due_us = message.stands_us
        if due_us is None:
            due_us = max(message.arrives_us, receiver.begin_us + reached[receiver.window][message.into])
        tail_us = sender.end_us - (message.sent_us - (message.arrives_us - due_us))
        tails[sender.window][message.out].append(max(0.0, tail_us))
    return {
        name: Outside(seen.get(name, {}), _typical(tails.get(name, {}), works_us[name]))
        for name in ordered
        if name in seen or name in tails
    }


def _typical(found: Mapping[Key, list[float]], work_us: float) -> dict[Key, float]:
    """Step 5."""
    grain_us = work_us / PARTS
    typical: dict[Key, float] = {}
    for key, times in found.items():
        us = statistics.median(times[1:-1] if len(times) > 3 else times)
        typical[key] = round(us / grain_us) * grain_us if grain_us else us
    return typical


def _windows(plan: Plan) -> dict[str, Window]:
    """The windows of runs, by the names of their slots. A window whose last run is one of its own is taken as
    other runs have it; sums that start there are nothing to other ranks."""
    found: dict[str, Window] = {}
    for rank, slots in enumerate(plan.schedule.orders):
        for (_, _, window), slot in zip(plan.runs(rank), slots, strict=True):
            found.setdefault(window_name(slot), without_sums(window))
    return found


def _reached(arranger: Arranger, window: Window, arrivals: Mapping[Key, float]) -> dict[Key, float]:
    """Step 3: (part, edge) -> microseconds from the run's begin to the wait."""
    graph = arranger.graph(window, Outside(arrivals))
    played = replay(graph, range(len(graph.nodes)))
    return {
        (node.item.part, int(node.item.ref)): played.reached_us[index]
        for index, node in enumerate(graph.nodes)
        if node.role is Role.RECEIVE
    }


def _runs(plan: Plan, timeline: Timeline) -> dict[tuple[int, int], _Run]:
    """Step 1: by rank and index in its order."""
    at = {
        (rank, str(action)): index
        for rank, order in enumerate(plan.schedule.orders)
        for index, slot in enumerate(order)
        for action in slot.actions
    }
    ends: dict[tuple[int, int], float] = {}
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE and span.kind is SpanKind.COMPUTE:
            key = span.rank, at[span.rank, span.name]
            ends[key] = max(ends.get(key, 0.0), span.end_us)
    found: dict[tuple[int, int], _Run] = {}
    for rank, order in enumerate(plan.schedule.orders):
        begin_us = 0.0
        for index, slot in enumerate(order):
            end_us = ends.get((rank, index), begin_us)
            found[rank, index] = _Run(window_name(slot), begin_us, end_us)
            begin_us = end_us
    return found


def _messages(plan: Plan, timeline: Timeline) -> list[_Sent]:
    places = {
        (action.stage, phase, action.microbatch): ((rank, index), part)
        for rank, order in enumerate(plan.schedule.orders)
        for index, slot in enumerate(order)
        for part, action in enumerate(slot.actions)
        for phase in action.phase.parts
    }
    stands: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE and span.kind in (SpanKind.EXPOSED, SpanKind.BUBBLE):
            key = span.rank, span.name
            stands[key] = min(stands.get(key, span.start_us), span.start_us)
    found: list[_Sent] = []
    for span in timeline.spans:
        edge, microbatch = span.edge, span.microbatch
        if edge is None or microbatch is None or span.sent_us is None:
            continue
        goes = plan.job.edges[edge]
        sender, out = places[goes.source, goes.phase, microbatch]
        receiver, into = places[goes.target, goes.user_phase, microbatch]
        stood = stands.get((span.rank, span.name))
        found.append(_Sent(sender, (out, edge), receiver, (into, edge), span.sent_us, span.end_us, stood))
    return found
