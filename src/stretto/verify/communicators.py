"""Proves communicators: each that is needed is there once, along the right axes, with the right members.

Every rank creates them in the order of the plan's one list, so creation cannot differ between ranks; what can
be wrong is a name, a member, an axis, or one that is used and not there. Needed are one for each pair of
places and direction with messages, `loss` where ranks must be told it, one for each tied gradient, and one
for each axis beside pp, whose groups are all the ranks that differ in that coordinate alone. May touch
`stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.axes import PIPELINE
from stretto.ir.plan import LOSS, Communicator, Plan
from stretto.ir.transfers import tied_ranks
from stretto.verify.fault import Fault
from stretto.verify.trace import ends_of

TIED = "tied "
"""What the names of tied gradients' communicators begin with."""


def communicator_faults(plan: Plan) -> list[Fault]:
    """Every fault of communicators. References must be sound."""
    return list(_communicators(plan))


def tells_loss(plan: Plan) -> bool:
    """Whether ranks have a part of the step's loss, or none, and must be told it."""
    return plan.ranks > 1 or bool(plan.job.data_axes)


def _needed(plan: Plan) -> dict[str, Communicator]:
    found: dict[str, Communicator] = {}
    for edge in plan.job.edges:
        ends = ends_of(plan, edge.index)
        if ends[0] != ends[1]:
            name = plan.lane_of(edge.index)
            found[name] = Communicator(name, ends)
    if tells_loss(plan):
        found[LOSS] = Communicator(LOSS, tuple(range(plan.ranks)), (PIPELINE, *plan.job.data_axes))
    for name, ranks in tied_ranks(plan.job, plan.schedule.stage_ranks).items():
        found[TIED + name] = Communicator(TIED + name, ranks)
    for axis, size in plan.job.axes:
        if size > 1:
            found[axis] = Communicator(axis, tuple(range(size)), (axis,))
    return found


def _communicators(plan: Plan) -> Iterator[Fault]:
    needed = _needed(plan)
    seen: set[str] = set()
    for communicator in plan.communicators:
        where = f"communicator {communicator.name}"
        want = needed.get(communicator.name, communicator)
        if communicator.name in seen:
            yield Fault(None, where, "is there twice", "Remove one of them")
        seen.add(communicator.name)
        if communicator.ranks != want.ranks:
            yield Fault(
                None,
                where,
                f"joins ranks {list(communicator.ranks)}, but its work is between ranks {list(want.ranks)}",
                f"Give it the ranks {list(want.ranks)}",
            )
        elif len(set(communicator.ranks)) < len(communicator.ranks):
            yield Fault(None, where, f"has a rank twice: {list(communicator.ranks)}", "Name each rank once")
        if communicator.axes != want.axes:
            yield Fault(
                None,
                where,
                f"is along {', '.join(communicator.axes)}, but its work is along {', '.join(want.axes)}",
                f"Give it the axes {list(want.axes)}",
            )
        elif len(set(communicator.axes)) < len(communicator.axes):
            yield Fault(None, where, f"names an axis twice: {list(communicator.axes)}", "Name each axis once")
    for name, want in needed.items():
        if name not in seen:
            along = "" if want.axes == (PIPELINE,) else f" along {' and '.join(want.axes)}"
            yield Fault(
                None,
                f"communicator {name}",
                f"missing, and ranks {list(want.ranks)}{along} need it",
                "Add it to the list of communicators",
            )
