"""What is known of candidates so far: plans, and short steps of those that have none."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from stretto.ir.stage_maps import AUTO
from stretto.order.policies import DEFAULT
from stretto.tune.choices import Candidate
from stretto.tune.outcome import Briefed, Planned


class Standing:
    """plans: the best of each candidate; briefs: of candidates, what a plan would about take."""

    def __init__(self) -> None:
        self.plans: dict[Candidate, Planned] = {}
        self.briefs: dict[Candidate, float] = {}

    @property
    def best_us(self) -> float:
        """The fastest plan's step."""
        return min((one.step_us for one in self.plans.values()), default=inf)

    @property
    def likely_us(self) -> float:
        """The fastest step of all, planned or about."""
        return min(self.known_us().values(), default=inf)

    def known_us(self) -> dict[Candidate, float]:
        """What a step takes; of a candidate with a plan, by that."""
        return self.briefs | {candidate: one.step_us for candidate, one in self.plans.items()}

    def brief(self, found: Briefed) -> None:
        """A short step was simulated."""
        self.briefs[found.candidate] = found.step_us

    def plan(self, found: Planned) -> None:
        """A plan was made; one in full counts more than a quick one."""
        before = self.plans.get(found.candidate)
        if before is None or found.order == DEFAULT or found.step_us <= before.step_us:
            self.plans[found.candidate] = found

    def forget(self, candidate: Candidate) -> bool:
        """It is refused. Whether anything was known of it."""
        known = self.briefs.pop(candidate, None), self.plans.pop(candidate, None)
        return any(one is not None for one in known)

    def ranked(self) -> list[Candidate]:
        """All of them, the fastest first."""
        known_us = self.known_us()
        return sorted(known_us, key=lambda one: (known_us[one], one))

    def ranked_plans(self) -> list[Planned]:
        """The fastest first. Of equal ones a family comes before "auto", which every plan would have to look
        for again."""
        return sorted(
            self.plans.values(), key=lambda one: (one.step_us, one.candidate.schedule == AUTO, one.candidate)
        )

    def unplanned(self) -> list[Candidate]:
        """Those with a short step alone, the fastest first."""
        return sorted(self.briefs.keys() - self.plans.keys(), key=lambda one: (self.briefs[one], one))

    def promising(self) -> Candidate | None:
        """What is faster by its short step than every plan: the fastest, if any is."""
        first = next(iter(self.unplanned()), None)
        return first if first is not None and self.briefs[first] < self.best_us else None

    def in_full(self) -> Collection[Candidate]:
        """Those whose plan is in full."""
        return {one.candidate for one in self.plans.values() if one.order == DEFAULT}
