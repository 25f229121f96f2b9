"""Forward-backward improvement, a move of the search for orders (`order.search`).

As for projects with scarce resources (Valls, Ballestin and Quintanilla, "Justification and RCPSP: a technique
that pays", European Journal of Operational Research 165, 2005):

    1. A step has been walked, so each op's end is known. From the last end to the first, each op is put as
       late as what needs it and its lane allow, also into gaps that later ops have left: the backward pass.
    2. By where ops begin in it, they are ordered, and the step is walked again, forward: in that order, and
       with what begins first as the most urgent.
    3. Where the last move was in vain, ends are a little off, by another draw for each stretch of ops.

The backward pass is rougher than the walk: lanes take one thing at a time, for as long as it took in the
walk, and nothing slows another. It makes orders; the walk shows how long they take.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from stretto.order.depend import Role
from stretto.order.rank_window import RankWindow
from stretto.order.search import OrderSearch, SearchPoint
from stretto.order.walk import WalkResult

OFF = (0.05, 0.25, 0.75, 1.5)
"""How far ends are off in step 3: standard deviations, in parts of what urgencies are changed by. Measured on
GPTs over pp=2 tp=2: without the large ones steps are up to 5 % longer, with larger ones as well."""

RankNode = tuple[int, int]
"""(rank, node)."""


class ForwardBackward:
    """The move, for the steps of one scope. What does not change from step to step is prepared once."""

    def __init__(self, windows: Sequence[RankWindow]) -> None:
        self._windows = windows
        self._graphs = [window.graph for window in windows]
        receives: dict[tuple[int, int], RankNode] = {}
        sends: list[tuple[tuple[int, int], RankNode]] = []
        for rank, window in enumerate(windows):
            for index, node in enumerate(window.graph.nodes):
                if node.role in (Role.SEND, Role.RECEIVE):
                    message = int(node.item.ref), window.microbatches[node.item.part]
                    if node.role is Role.RECEIVE:
                        receives[message] = rank, index
                    else:
                        sends.append((message, (rank, index)))
        self._arrives = {key: receives[message] for message, key in sends if message in receives}
        """Send -> its receive."""
        self._missing = {
            (rank, index): len(users) + ((rank, index) in self._arrives)
            for rank, graph in enumerate(self._graphs)
            for index, users in enumerate(graph.after)
        }
        self._sent = {receive: send for send, receive in self._arrives.items()}

    def __call__(self, search: OrderSearch) -> Iterator[SearchPoint]:
        """Where the last move was in vain, step 3."""
        best, draw = search.best, search.draw
        assert best is not None
        off: dict[RankNode, float] = {}
        if search.stale:
            deviation_us = draw.choice(OFF) * search.scope.change_us
            for rank, group in search.groups:
                by_us = draw.gauss(0.0, deviation_us)
                off.update({(rank, index): by_us for index in group})
        begins = self.begins_us(best, off)
        # Of ops that begin at one time those that are needed come first: nodes come behind what they use.
        ranks = zip(self._windows, begins, strict=True)
        yield SearchPoint(
            orders=tuple(sorted(window.placed_in(range(len(of))), key=of.__getitem__) for window, of in ranks)
        )
        yield SearchPoint(tuple([-us for us in of] for of in begins), (0.0,) * len(self._windows))

    def begins_us(self, walked: WalkResult, off_us: Mapping[RankNode, float]) -> list[list[float]]:
        """By rank and node, when it begins in the backward pass. off_us: by how much later than in `walked`
        an op is taken to have ended; 0 for others."""
        begins = [[0.0] * len(graph.nodes) for graph in self._graphs]
        missing = dict(self._missing)
        lanes: dict[tuple[int, str], _Lane] = defaultdict(_Lane)
        ready: list[tuple[float, int, int]] = []

        def can_go(key: RankNode) -> None:
            rank, index = key
            end_us = walked.timings[rank].ends_us[index] + off_us.get(key, 0.0)
            heapq.heappush(ready, (-end_us, -index, rank))

        def processed(key: RankNode) -> None:
            missing[key] -= 1
            if not missing[key]:
                can_go(key)

        for key, users in missing.items():
            if not users:
                can_go(key)
        while ready:
            _, minus, rank = heapq.heappop(ready)
            index = -minus
            begins[rank][index] = self._begin_us(rank, index, walked, begins, lanes)
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
        walked: WalkResult,
        begins: Sequence[Sequence[float]],
        lanes: dict[tuple[int, str], _Lane],
    ) -> float:
        graph, timing, end_us = self._graphs[rank], walked.timings[rank], walked.step_us
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
