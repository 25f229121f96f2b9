"""Ordering policies by name, the check that what a policy gives is a legal order, and the windows of a plan
in the order of a policy. Also here are the baseline's windows, in which nothing hides a collective.

A policy is a function from a window's graph to the indexes of its nodes in the order in which they run:

    import stretto.order as order

    def as_captured(graph):
        return range(len(graph.nodes))

    order.register("as-captured", as_captured)
    plan = stretto.plan(job, order="as-captured")

(That is legal because a node needs only nodes of lower numbers. Some of them may be of earlier parts: of two
backwards in one window, 0B+0B, the second adds its gradients to what the first has added.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from reprlib import repr as short

from stretto.errors import StrettoError, UsageError, meant
from stretto.ir.costs import Costs
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import WAIT, Job
from stretto.order.depend import WindowGraph, make_graph
from stretto.order.window import improve_order, list_order

Policy = Callable[[WindowGraph], Sequence[int]]


def captured_order(graph: WindowGraph) -> tuple[int, ...]:
    """The order in which the ops were captured, one part after the other."""
    return tuple(range(len(graph.nodes)))


POLICIES: dict[str, Policy] = {
    "captured": captured_order,
    "list": list_order,
    "improve": improve_order,
}
"""Every policy by its name: those of Stretto, and what users register."""

DEFAULT = "improve"

OWN = frozenset(POLICIES)
"""The policies of Stretto."""


def register(name: str, policy: Policy) -> None:
    """Make `policy` known under `name`, for `stretto.plan(job, order=name)`.

    It is called once for each kind of window and must depend on the graph alone. Raises UsageError when
    Stretto has a policy of that name (a user's own is replaced), for a name that is no text, and for a policy
    that cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"an ordering policy's name is a text, not {short(name)}: register(name, policy)")
    if name in OWN:
        raise UsageError(f"Stretto has an ordering policy {name!r}: register yours under another name")
    if not callable(policy):
        raise UsageError(
            f"ordering policy {name!r} is {short(policy)}, which cannot be called: give a function"
        )
    POLICIES[name] = policy


def policy_of(name: str) -> Policy:
    """The policy of that name. Raises UsageError when there is none."""
    if not isinstance(name, str) or name not in POLICIES:
        raise UsageError(
            f"unknown ordering policy {name!r}; {meant(name, POLICIES)}choose one of: {', '.join(POLICIES)}. "
            "`stretto.order.register` names one of your own"
        )
    return POLICIES[name]


def legal_order(name: str, graph: WindowGraph) -> tuple[int, ...]:
    """What the policy `name` makes of the graph.

    Raises UsageError when it is no legal order: no numbers of nodes, a node that is missing or there twice,
    or one that comes before what it needs. Also for a user's policy that fails.
    """
    where = f"policy {name!r}, window {graph.window.name}"
    count = len(graph.nodes)
    order = tuple(_index(where, given, count) for given in _given(name, graph, where))
    positions = {index: at for at, index in enumerate(order)}
    if len(positions) < len(order):
        twice = next(index for at, index in enumerate(order) if positions[index] != at)
        raise UsageError(f"{where}: {_called(graph, twice)} is there twice; name every node once")
    if len(order) < count:
        missing = next(index for index in range(count) if index not in positions)
        raise UsageError(f"{where}: {_called(graph, missing)} is missing; name every node once")
    for index, needs in enumerate(graph.before):
        for needed in needs:
            if positions[needed] > positions[index]:
                raise UsageError(
                    f"{where}: {_called(graph, index)} comes before {_called(graph, needed)}, which it "
                    "needs; keep every node behind all of `graph.before`"
                )
    return order


def _given(name: str, graph: WindowGraph, where: str) -> list[object]:
    """What the policy gives, one by one; of too many the first that is one too many, as it may never end."""
    policy = policy_of(name)
    try:
        given: object = policy(graph)
        if isinstance(given, Iterable):
            return list(islice(given, len(graph.nodes) + 1))
    except Exception as error:
        if name in OWN or isinstance(error, StrettoError):
            raise  # of a policy with a message of its own, or of a defect here
        raise UsageError(
            f"{where}: the policy fails with {type(error).__name__}: {error}; correct it, for it has to "
            "order every window"
        ) from error
    raise UsageError(f"{where}: it gives {short(given)}; give the indexes of `graph.nodes` in their order")


def _index(where: str, given: object, count: int) -> int:
    """The number of a node, which may be an integer of NumPy or torch: what sorting there gives."""
    try:
        index = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # the latter from a tensor without data
        index = -1
    if not 0 <= index < count:
        raise UsageError(
            f"{where}: {short(given)} is no node; nodes are numbered from 0 to {count - 1} (integers, not "
            "the nodes themselves)"
        )
    return index


def _called(graph: WindowGraph, index: int) -> str:
    """A node in messages. Where a window has several parts, their ops may have the same names."""
    item = graph.nodes[index].item
    if len(graph.window.parts) == 1:
        return str(item)
    stage, phase = graph.window.parts[item.part]
    return f"{replace(item, part=0)} of part {item.part} ({stage}{phase})"


class WindowOrders:
    """Orders windows, and remembers the orders of those that it has seen."""

    def __init__(
        self,
        job: Job,
        costs: Costs,
        stage_ranks: Sequence[int],
        policy: str = DEFAULT,
        share: float = 1.0,
    ) -> None:
        """policy: a name of `stretto.order.policies`. share: of the search for an order, what a window is
        worth. The costs are those of every window."""
        self._job = job
        self._costs = costs
        self._stage_ranks = stage_ranks
        self._policy = policy
        self._share = share
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._windows: dict[str, Window] = {}

    def ordered(self, window: Window) -> Window:
        """The window in the policy's order; as it is when nothing in it communicates over an axis.

        Raises UsageError for a policy that is unknown or gives an illegal order.
        """
        if window.name not in self._windows:
            self._windows[window.name] = self._ordered(window)
        return self._windows[window.name]

    def _ordered(self, window: Window) -> Window:
        graph = make_graph(self._job, self._costs, window, self._stage_ranks)
        if not graph.communicates:
            return window
        key = graph.key()
        if key not in self._orders:
            improves = self._policy == DEFAULT
            self._orders[key] = (
                improve_order(graph, share=self._share) if improves else legal_order(self._policy, graph)
            )
        return replace(window, items=tuple(graph.nodes[index].item for index in self._orders[key]))


def waits_at_once(job: Job, window: Window) -> Window:
    """The window in its captured order, but every collective is waited for directly after its start."""
    ops = [
        {op.name: op for sub in phase.parts for op in job.stages[stage].ops[sub]}
        for stage, phase in window.parts
    ]
    waits: dict[tuple[int, str], Item] = {}
    for item in window.items:
        if item.kind is ItemKind.OP and ops[item.part][str(item.ref)].target == WAIT:
            waits[item.part, ops[item.part][str(item.ref)].uses[0]] = item
    here = {(item.part, str(item.ref)) for item in window.items if item.kind is ItemKind.OP}
    moved = {item for key, item in waits.items() if key in here}
    items: list[Item] = []
    for item in window.items:
        if item in moved:
            continue
        items.append(item)
        wait = waits.get((item.part, str(item.ref))) if item.kind is ItemKind.OP else None
        if wait is not None:
            items.append(wait)
    return replace(window, items=tuple(_sends_behind(job, items)))


def _sends_behind(job: Job, items: Sequence[Item]) -> list[Item]:
    """The items with every send directly after the item that makes what it sends."""
    sends: dict[tuple[int, str], list[Item]] = {}
    for item in items:
        if item.kind is ItemKind.SEND:
            sends.setdefault((item.part, job.edges[int(item.ref)].value), []).append(item)
    behind: list[Item] = []
    for item in items:
        if item.kind is ItemKind.SEND:
            continue
        behind.append(item)
        if item.kind is ItemKind.OP:
            behind += sends.get((item.part, str(item.ref)), ())
    return behind
