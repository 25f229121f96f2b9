"""What became of candidates: plans with their figures, and why others have none. Plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.ir.plan import Plan
from stretto.tune.choices import Candidate


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate's plan. exposed_us: axis -> the most of any rank; peak_bytes: of the fullest rank, the
    optimizer's state included; order: the policy that ordered its ops."""

    candidate: Candidate
    order: str
    step_us: float
    bound_us: float
    binds: str
    exposed_us: Mapping[str, float]
    bubble_us: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Briefed:
    """What a candidate's plan would about take and hold, by a short step (`stretto.planning.brief`)."""

    candidate: Candidate
    step_us: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """why: in one line. bytes_needed: where memory is why, what the fullest rank needs, 0 if not known.
    by_memory: whether less to keep could help."""

    candidate: Candidate
    why: str
    by_memory: bool = False
    bytes_needed: int = 0


@dataclass(slots=True)
class Tuned:
    """What tuning found.

    planned: the fastest first; those planned in full before those with quick settings only are told apart by
        `Planned.order`. dropped: reason -> how many layouts, schedules or candidates; examples: one of each.
    layouts: how many were looked at; own: the settings' own, where it was planned. unseen_us: no candidate
        that was not planned and likely fits has a lower bound; None where all were. least: of what does not
        fit in memory, the candidate that needs least, and its bytes. stopped: why the search ended before it
        was done.
    """

    layouts: int = 0
    planned: list[Planned] = field(default_factory=list)
    own: Planned | Refused | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    unseen_us: float | None = None
    least: tuple[str, float] | None = None
    stopped: str = ""

    def drop(self, reason: str, example: object = "", count: int = 1) -> None:
        """Count what is dropped for a reason."""
        self.dropped[reason] += count
        self.examples.setdefault(reason, str(example))

    def needs(self, what: object, nbytes: float) -> None:
        """Note what does not fit in memory."""
        if nbytes and (self.least is None or nbytes < self.least[1]):
            self.least = str(what), nbytes


def planned_of(candidate: Candidate, order: str, plan: Plan) -> Planned:
    """The figures of a plan."""
    found = plan.prediction
    assert found is not None
    return Planned(
        candidate,
        order,
        found.step_us,
        found.bound_us,
        found.binds,
        {axis: max(by) for axis, by in found.exposed_axis_us.items() if by},
        max(found.bubble_us),
        max(found.peak_bytes),
    )
