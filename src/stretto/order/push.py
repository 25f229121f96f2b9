"""A move of the search for orders (`order.search`): a step is pushed to its end, and back to its begin.

Double justification, as for projects with scarce resources (Valls, Ballestin and Quintanilla, "Justification
and RCPSP: a technique that pays", European Journal of Operational Research 165, 2005):

    1. A step has been walked, so each op's end is known. From the last end to the first, each op is put as
       late as what needs it and its lane allow, into gaps that later ops have left, too: a step pushed to its
       end.
    2. By where ops begin in it, they are ordered, and the step is walked again: in that order
       (`order.follow`), and with what begins first as the most urgent (`order.listing`).
    3. Where the last push was in vain, ends are a little off, by another draw for each stretch of ops.

What pushes is rougher than the walk: lanes take one thing at a time, for as long as it took in the walk, and
nothing slows another. It makes orders; how long they take the walk says.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from stretto.order.depend import Role
from stretto.order.scope import Whole
from stretto.order.search import Point, Search
from stretto.order.walk import Chosen

OFF = (0.05, 0.25, 0.75, 1.5)
"""How far ends are off in step 3: standard deviations, as shares of what urgencies are changed by. Measured
on GPTs over pp=2 tp=2: without the large ones steps are up to 5 % longer, with larger ones as well."""

Place = tuple[int, int]
"""(rank, node)."""


class Pushing:
    """The move, for the steps of one scope. What does not change from step to step is prepared once."""

    def __init__(self, wholes: Sequence[Whole]) -> None:
        self._wholes = wholes
        self._graphs = [whole.graph for whole in wholes]
        receives: dict[tuple[int, int], Place] = {}
        sends: list[tuple[tuple[int, int], Place]] = []
        for rank, whole in enumerate(wholes):
            for index, node in enumerate(whole.graph.nodes):
                message = (
                    (int(node.item.ref), whole.microbatches[node.item.part])
                    if node.role in (Role.SEND, Role.RECEIVE)
                    else None
                )
                if message is not None and node.role is Role.RECEIVE:
                    receives[message] = rank, index
                elif message is not None:
                    sends.append((message, (rank, index)))
        self._arrives = {place: receives[message] for message, place in sends if message in receives}
        """Send -> its receive."""
        self._missing = {
            (rank, index): len(users) + ((rank, index) in self._arrives)
            for rank, graph in enumerate(self._graphs)
            for index, users in enumerate(graph.after)
        }
        self._sent = {receive: send for send, receive in self._arrives.items()}

    def __call__(self, search: Search) -> Iterator[Point]:
        """Where the last push was in vain, step 3."""
        best, draw = search.best, search.draw
        assert best is not None
        off: dict[Place, float] = {}
        if search.stale:
            spread_us = draw.choice(OFF) * search.scope.change_us
            for rank, group in search.groups:
                by_us = draw.gauss(0.0, spread_us)
                off.update({(rank, index): by_us for index in group})
        begins = self.begins_us(best, off)
        # Of ops that begin at one time those that are needed come first: nodes stand behind what they use.
        mine = zip(self._wholes, begins, strict=True)
        yield Point(
            orders=tuple(sorted(one.names(range(len(of))), key=of.__getitem__) for one, of in mine),
            pairs=search.point.pairs,
        )
        urgency = tuple([-us for us in of] for of in begins)
        yield Point(urgency, (0.0,) * len(self._wholes), search.point.pairs)

    def begins_us(self, found: Chosen, off_us: Mapping[Place, float]) -> list[list[float]]:
        """By rank and node, when it begins in the pushed step. off_us: by how much later than in `found` an
        op is taken to have ended; 0 for others."""
        begins = [[0.0] * len(graph.nodes) for graph in self._graphs]
        missing = dict(self._missing)
        lanes: dict[tuple[int, str], _Lane] = defaultdict(_Lane)
        ready: list[tuple[float, int, int]] = []

        def can_go(place: Place) -> None:
            rank, index = place
            end_us = found.timings[rank].ends_us[index] + off_us.get(place, 0.0)
            heapq.heappush(ready, (-end_us, -index, rank))

        def processed(place: Place) -> None:
            missing[place] -= 1
            if not missing[place]:
                can_go(place)

        for place, users in missing.items():
            if not users:
                can_go(place)
        while ready:
            _, minus, rank = heapq.heappop(ready)
            index = -minus
            begins[rank][index] = self._begin_us(rank, index, found, begins, lanes)
            for needed in self._graphs[rank].before[index]:
                processed((rank, needed))
            sender = self._sent.get((rank, index))
            if sender is not None:
                processed(sender)
        return begins

    def _begin_us(
        self,
        rank: int,
        index: int,
        found: Chosen,
        begins: Sequence[Sequence[float]],
        lanes: dict[tuple[int, str], _Lane],
    ) -> float:
        graph, timing, end_us = self._graphs[rank], found.timings[rank], found.step_us
        node, mine = graph.nodes[index], begins[rank]
        lane_end_us = end_us
        for user in graph.after[index]:
            end_us = min(end_us, mine[user])
            if graph.nodes[user].start == index and graph.nodes[user].role is Role.FINISH:
                lane_end_us = min(lane_end_us, mine[user])
        work_us = node.work_us * timing.stretch
        if node.role is Role.START:
            goes_us = lanes[rank, node.lane].put(lane_end_us, timing.lane_us.get(index, node.time_us))
            end_us = min(end_us, goes_us + work_us)  # it goes to its lane with its start
        elif (rank, index) in self._arrives:
            receiver, receive = self._arrives[rank, index]
            arrives_us = begins[receiver][receive]
            end_us = min(end_us, lanes[rank, f"to {receiver}"].put(arrives_us, node.time_us))
        return lanes[rank, ""].put(end_us, work_us) if work_us else end_us


class _Lane:
    """What takes a lane, from the end of the step on: intervals that do not overlap, ascending."""

    __slots__ = ("_begins_us", "_ends_us")

    def __init__(self) -> None:
        self._begins_us: list[float] = []
        self._ends_us: list[float] = []

    def put(self, end_us: float, us: float) -> float:
        """Take the last `us` that are free and end by `end_us`; where they begin."""
        at = bisect_left(self._begins_us, end_us)
        while at > 0 and self._ends_us[at - 1] > end_us - us:
            end_us = min(end_us, self._begins_us[at - 1])
            at -= 1
        begin_us = end_us - us
        self._begins_us.insert(at, begin_us)
        self._ends_us.insert(at, end_us)
        return begin_us
