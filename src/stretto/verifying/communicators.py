"""Proves communicators, and that costs and prediction are about this plan: they name its axes, communicators
and ranks.

Each communicator that is needed is there once, along the right axes, with the right members. Every rank
creates them in the order of the plan's one list, so creation cannot differ between ranks. Needed are one for
each pair of pipeline ranks and direction with messages, `loss` where ranks do not have all of it, one for
each tied gradient, and one for each axis other than pp, whose groups are all the ranks that differ in that
coordinate alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import PRICED
from stretto.ir.plan import LOSS, Communicator, Plan
from stretto.ir.transfers import tied_ranks
from stretto.verifying.fault import Fault
from stretto.verifying.trace import ends_of

TIED = "tied "
"""What the names of tied gradients' communicators begin with."""


def reduces_loss(plan: Plan) -> bool:
    """Whether ranks have a part of the step's loss, or none, and must receive it."""
    return plan.ranks > 1 or bool(plan.job.data_axes)


def _needed(plan: Plan) -> dict[str, Communicator]:
    result: dict[str, Communicator] = {}
    for edge in plan.job.edges:
        ends = ends_of(plan, edge.index)
        if ends[0] != ends[1]:
            name = plan.lane_of(edge.index)
            result[name] = Communicator(name, ends)
    if reduces_loss(plan):
        result[LOSS] = Communicator(LOSS, tuple(range(plan.ranks)), (PIPELINE, *plan.job.data_axes))
    for name, ranks in tied_ranks(plan.job, plan.schedule.stage_ranks).items():
        result[TIED + name] = Communicator(TIED + name, ranks)
    for axis, size in plan.job.axes:
        if size > 1:
            result[axis] = Communicator(axis, tuple(range(size)), (axis,))
    return result


def communicator_faults(plan: Plan) -> Iterator[Fault]:
    """Every fault of communicators. References must be sound."""

    def fault(name: str, what: str, fix: str) -> Fault:
        return Fault(None, f"communicator {name}", what, fix)

    needed = _needed(plan)
    seen: set[str] = set()
    for communicator in plan.communicators:
        name = communicator.name
        want = needed.get(name, communicator)
        if name in seen:
            yield fault(name, "is there twice", "Remove one of them")
        seen.add(name)
        ranks, axes = list(communicator.ranks), list(communicator.axes)
        if communicator.ranks != want.ranks:
            what = f"joins ranks {ranks}, but its work is between ranks {list(want.ranks)}"
            yield fault(name, what, f"Give it the ranks {list(want.ranks)}")
        elif len(set(ranks)) < len(ranks):
            yield fault(name, f"has a rank twice: {ranks}", "Name each rank once")
        if communicator.axes != want.axes:
            what = f"is along {', '.join(axes)}, but its work is along {', '.join(want.axes)}"
            yield fault(name, what, f"Give it the axes {list(want.axes)}")
        elif len(set(axes)) < len(axes):
            yield fault(name, f"names an axis twice: {axes}", "Name each axis once")
    for name, want in needed.items():
        if name not in seen:
            along = "" if want.axes == (PIPELINE,) else f" along {' and '.join(want.axes)}"
            what = f"missing, and ranks {list(want.ranks)}{along} need it"
            yield fault(name, what, "Add it to the list of communicators")


def cost_faults(plan: Plan) -> Iterator[Fault]:
    """Every fault of costs and prediction. References must be sound."""
    axes = dict(plan.job.axes)
    lanes = {communicator.name for communicator in plan.communicators} | axes.keys()
    for name, kind in plan.costs.collectives:
        where = f"costs of {kind} on {name}"
        if name not in lanes:
            yield Fault(None, where, f"there is no communicator {name}", "Remove them")
        if kind not in PRICED:
            yield Fault(None, where, f"there is no collective {kind}", f"Known are {', '.join(PRICED)}")
    for axis in plan.costs.shared:
        if axis not in axes:
            yield Fault(None, "costs.shared", f"there is no axis {axis!r} other than pp", "Remove it")
    if plan.prediction is not None:
        for key in ("exposed_axis_us", "comm_axis_us"):
            for axis, times in getattr(plan.prediction, key).items():
                what = ""
                if axis not in dict(plan.mesh.sizes):
                    what = f"there is no axis {axis!r}"
                elif len(times) != plan.ranks:
                    what = f"has {len(times)} ranks for {axis}, but the plan has {plan.ranks}"
                if what:
                    yield Fault(None, f"prediction.{key}", what, "Predict the plan again")
