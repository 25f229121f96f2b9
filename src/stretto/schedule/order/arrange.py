"""All windows of a plan put in order, each kind once: windows that differ in names alone share one order.

May touch `stretto.ir` and this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.ir.plan import Costs, Window
from stretto.ir.program import Job
from stretto.schedule.order.depend import make_graph
from stretto.schedule.order.policies import DEFAULT, legal_order


class Arranger:
    """Orders windows, and remembers the orders of those that it has seen."""

    def __init__(self, job: Job, costs: Costs, stage_ranks: Sequence[int], policy: str = DEFAULT) -> None:
        """policy: a name of `stretto.schedule.order.policies`. The costs are those of every window."""
        self._job = job
        self._costs = costs
        self._stage_ranks = stage_ranks
        self._policy = policy
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._windows: dict[tuple[str, object], Window] = {}

    def arrange(self, window: Window, arrivals: Mapping[tuple[int, int], float] | None = None) -> Window:
        """The window in the policy's order; as it is when nothing in it communicates over an axis.

        arrivals: as in `make_graph`. Raises UsageError for a policy that is unknown or gives an illegal
        order.
        """
        name = window.name, frozenset((arrivals or {}).items())
        if name not in self._windows:
            self._windows[name] = self._arranged(window, arrivals)
        return self._windows[name]

    def _arranged(self, window: Window, arrivals: Mapping[tuple[int, int], float] | None) -> Window:
        graph = make_graph(self._job, self._costs, window, self._stage_ranks, arrivals)
        if not graph.communicates:
            return window
        key = graph.key()
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = legal_order(self._policy, graph)
        return replace(window, items=tuple(graph.nodes[index].item for index in order))
