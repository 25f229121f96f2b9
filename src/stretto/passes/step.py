"""What passes work on: a step on its way to a plan, and what they may ask.

All passes that know costs have one signature, `Step, Context -> Step`, give the step itself where they have
nothing to do, and never price what they make (`stretto.ir.prices`). A pass that was asked for and cannot be
done raises `LeftOutError`. Those that look at a captured graph, before there are stages, ranks and costs, are
`Graph -> Graph` (`stretto.passes.graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.plan import Window
from stretto.ir.prices import Prices
from stretto.ir.program import Job, OverlapMode
from stretto.passes.effort import Effort
from stretto.passes.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """short: the schedule of fewer microbatches by which steps are compared; `schedule` where they are few.

    overlap: what the windows of `schedule` let overlap; asked: the most that they may. max_bytes: the most
    that a rank may use.
    windows: by name, in the order of their items. sent_before: message (edge, microbatch) -> the sender's run
    before which its send is waited for; others are waited for at the end. ahead: microbatches before that
    which needs it a receive is posted at the latest, beside what lowering does anyway.
    """

    job: Job
    schedule: Schedule
    short: Schedule
    overlap: OverlapMode
    max_bytes: int | None = None
    asked: OverlapMode = "off"
    windows: Mapping[str, Window] = field(default_factory=dict)
    sent_before: Mapping[tuple[int, int], int] = field(default_factory=dict)
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """What passes may ask. order: the policy that orders ops in windows. peaks: the most bytes that each rank
    uses when a step is planned. effort: how long orders are searched for; watch: who waits for the plan."""

    prices: Prices
    order: str
    peaks: Callable[[Step], Sequence[int]]
    effort: Effort = field(default_factory=Effort)
    watch: Watch = field(default_factory=Watch, repr=False)
    _known: dict[object, object] = field(default_factory=dict, repr=False)

    def costs_of(self, job: Job) -> Costs:
        """Costs with the price list of a job."""
        return self.prices.costs_of(job)

    def once(self, job: Job, key: object, make: Callable[[], T]) -> T:
        """What was made for a job under this key before, else what `make` makes."""
        place = id(job), key
        if place not in self._known:
            self._known[place] = job, make()
        return cast("tuple[Job, T]", self._known[place])[1]


Pass = Callable[[Step, Context], Step]


class LeftOutError(Exception):
    """A pass cannot be done for this step. The text says why, where a user may have wished it."""
