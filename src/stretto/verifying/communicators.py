"""Proves communicators.

Each communicator that is needed (`stretto.schedule.sums.communicators_of`) is there once, along the right
axes, with the right members. Every rank creates them in the order of the plan's one list, so creation cannot
differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.axes import PIPELINE
from stretto.ir.plan import Plan
from stretto.schedule.once import communicators_of
from stretto.verifying.fault import Fault


def communicator_faults(plan: Plan) -> Iterator[Fault]:
    """Every fault of communicators. References must be sound."""

    def fault(name: str, what: str, fix: str) -> Fault:
        return Fault(None, f"communicator {name}", what, fix)

    needed = {one.name: one for one in communicators_of(plan.job, plan.schedule)}
    seen: set[str] = set()
    for communicator in plan.communicators:
        name = communicator.name
        want = needed.get(name, communicator)
        if name in seen:
            yield fault(name, "is there twice", "Remove one of them")
        seen.add(name)
        for what, kept, needs in (
            ("ranks", communicator.ranks, want.ranks),
            ("axes", communicator.axes, want.axes),
        ):
            if kept != needs:
                said = f"has the {what} {list(kept)}, but its work is between {list(needs)}"
                yield fault(name, said, f"Give it the {what} {list(needs)}")
            elif len(set(kept)) < len(kept):
                yield fault(name, f"has one of its {what} twice: {list(kept)}", "Name each once")
    for name, want in needed.items():
        if name not in seen:
            along = "" if want.axes == (PIPELINE,) else f" along {' and '.join(want.axes)}"
            what = f"missing, and ranks {list(want.ranks)}{along} need it"
            yield fault(name, what, "Add it to the list of communicators")
