"""Ordering policies by name, and the check that what a policy gives is a legal order.

A policy is a function from a window's graph to the indexes of its nodes in the order in which they run:

    import stretto.schedule.order as order

    def backward_first(graph):
        return sorted(range(len(graph.nodes)), key=lambda n: -graph.nodes[n].item.part)

    order.register("backward-first", backward_first)
    plan = stretto.plan(job, order="backward-first")

(That sort is legal because nodes are numbered part by part and no part needs a later one.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.errors import UsageError
from stretto.schedule.order.depend import WindowGraph
from stretto.schedule.order.exact import exact_order
from stretto.schedule.order.improve import improve_order
from stretto.schedule.order.listing import list_order

Policy = Callable[[WindowGraph], Sequence[int]]


def captured_order(graph: WindowGraph) -> tuple[int, ...]:
    """The order in which the ops were captured, one part after the other."""
    return tuple(range(len(graph.nodes)))


POLICIES: dict[str, Policy] = {
    "captured": captured_order,
    "list": list_order,
    "improve": improve_order,
    "exact": exact_order,
}
"""Every policy by its name: those of Stretto, and what users register."""

DEFAULT = "improve"


def register(name: str, policy: Policy) -> None:
    """Make `policy` known under `name`, for `stretto.plan(job, order=name)`.

    It is called once for each kind of window and must depend on the graph alone. Raises UsageError when
    Stretto has a policy of that name; a user's own is replaced.
    """
    if name in ("captured", "list", "improve", "exact"):
        raise UsageError(f"Stretto has an ordering policy {name!r}: register yours under another name")
    POLICIES[name] = policy


def policy_of(name: str) -> Policy:
    """The policy of that name. Raises UsageError when there is none."""
    if name not in POLICIES:
        raise UsageError(f"unknown ordering policy {name!r}; choose one of: {', '.join(POLICIES)}")
    return POLICIES[name]


def legal_order(name: str, graph: WindowGraph) -> tuple[int, ...]:
    """What the policy `name` makes of the graph.

    Raises UsageError when it is no legal order: a node that is missing or there twice, or one that stands
    before what it needs.
    """
    order = tuple(policy_of(name)(graph))
    where = f"policy {name!r}, window {graph.window.name}"
    count = len(graph.nodes)
    places = {index: at for at, index in enumerate(order)}
    unknown = [index for index in order if not isinstance(index, int) or not 0 <= index < count]
    if unknown:
        raise UsageError(f"{where}: {unknown[0]!r} is no node; nodes are numbered from 0 to {count - 1}")
    if len(places) < len(order):
        twice = next(index for at, index in enumerate(order) if places[index] != at)
        raise UsageError(f"{where}: {graph.nodes[twice].item} is there twice; name every node once")
    if len(order) < count:
        missing = next(index for index in range(count) if index not in places)
        raise UsageError(f"{where}: {graph.nodes[missing].item} is missing; name every node once")
    for index, needs in enumerate(graph.before):
        for needed in needs:
            if places[needed] > places[index]:
                raise UsageError(
                    f"{where}: {graph.nodes[index].item} stands before {graph.nodes[needed].item}, which it "
                    "needs; keep every node behind all of `graph.before`"
                )
    return order
