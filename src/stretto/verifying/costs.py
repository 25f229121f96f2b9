"""Proves that costs and prediction are about this plan: they name its axes, communicators and ranks.

A wrong name would not stop a run; it would be priced by another rule than the one that was written down. May
touch `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.collectives import PRICED
from stretto.ir.plan import Plan
from stretto.verifying.fault import Fault


def cost_faults(plan: Plan) -> list[Fault]:
    """Every fault of costs and prediction. References must be sound."""
    return list(_faults(plan))


def _faults(plan: Plan) -> Iterator[Fault]:
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
            yield Fault(None, "costs.shared", f"there is no axis {axis!r} beside pp", "Remove it")
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
