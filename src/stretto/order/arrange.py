"""All windows of a plan put in order, each kind once: windows that differ in names alone share one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.costs import Costs
from stretto.ir.plan import Window
from stretto.ir.program import Job
from stretto.order.depend import NOTHING, Outside, Role, WindowGraph, make_graph
from stretto.order.policies import DEFAULT, legal_order
from stretto.order.window import improve_order

MESSAGES = (Role.SEND, Role.RECEIVE)


class Arranger:
    """Orders windows, and remembers the orders of those that it has seen."""

    def __init__(
        self,
        job: Job,
        costs: Costs,
        stage_ranks: Sequence[int],
        policy: str = DEFAULT,
        rounds: int | None = None,
        share: float = 1.0,
    ) -> None:
        """policy: a name of `stretto.order.policies`. rounds: instead of it, local search
        with so many rounds. share: of the search for an order, what a window is worth. The costs are those
        of every window."""
        self._job = job
        self._costs = costs
        self._stage_ranks = stage_ranks
        self._policy = policy
        self._rounds = rounds
        self._share = share
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._windows: dict[tuple[object, ...], Window] = {}
        self._graphs: dict[str, tuple[WindowGraph, int]] = {}
        self._kinds: dict[tuple[object, ...], int] = {}

    def arrange(self, window: Window, outside: Outside = NOTHING) -> Window:
        """The window in the policy's order; as it is when nothing in it communicates over an axis.

        outside: as in `make_graph`. Raises UsageError for a policy that is unknown or gives an illegal
        order.
        """
        name = window.name, outside.key()
        if name not in self._windows:
            self._windows[name] = self._arranged(window, outside)
        return self._windows[name]

    def graph(self, window: Window) -> WindowGraph:
        """What the policy is given, of which nothing is known on other ranks."""
        return self._known(window)[0]

    def _known(self, window: Window) -> tuple[WindowGraph, int]:
        """The graph, and its kind: equal for those that differ in names alone."""
        found = self._graphs.get(window.name)
        if found is None:
            graph = make_graph(self._job, self._costs, window, self._stage_ranks)
            kinds = self._kinds
            found = graph, kinds.setdefault(graph.key(), len(kinds)) if graph.communicates else -1
            if self._rounds is not None:  # it comes again, with what is outside
                self._graphs[window.name] = found
        return found

    def _arranged(self, window: Window, outside: Outside) -> Window:
        alone, kind = self._known(window)
        if not alone.communicates:
            return window
        graph = alone.seen(outside)
        key = kind, *((node.time_us, node.tail_us) for node in graph.nodes if node.role in MESSAGES)
        order = self._orders.get(key)
        if order is None:
            if self._rounds is not None:
                order = improve_order(graph, walks=self._rounds)
            elif self._policy == DEFAULT:
                order = improve_order(graph, share=self._share)
            else:
                order = legal_order(self._policy, graph)
            self._orders[key] = order
        return replace(window, items=tuple(graph.nodes[index].item for index in order))
