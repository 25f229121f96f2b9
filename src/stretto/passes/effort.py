"""How much time planning takes: as much as it can save over the run that the plan is for.

A search for orders makes steps some percent shorter. Over a run that is so much of the run's time, and the
devices wait while the search goes on, so that it does not count how many they are. What the search takes is
counted in items walked and not by a clock: equal jobs get equal plans on every machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from stretto.errors import UsageError

SEARCH_S = "STRETTO_SEARCH_S"
"""Environment variable: `search_s` of plans that have none."""

STEPS = 1_000
"""Steps of a run of which nobody says how many it has. Assumed: a short training."""

SHARE = 0.05
"""Of the time of a run, what planning takes at most. Assumed: what it gains is up to 13 % of a step."""

FULL_US = 100_000.0
"""A step of so much, `STEPS` times, is worth what ordering a window gains: from there on windows are searched
as long as they gain something. Measured on the grid of `benchmarks/grid.py`."""

LEAST_US = 5_000.0
"""The least that a step is worth: its search takes 0.25 s of a core. Measured."""

MOST_US = 2_500_000.0
"""The most that a step is worth: the longest search takes two minutes of a core. Assumed: who can wait longer
says so."""


@dataclass(frozen=True, slots=True)
class Effort:
    """steps: of the run. search_s: instead of what follows from it, seconds of one processor core that the
    longest search may take, about."""

    steps: int = STEPS
    search_s: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for what is no number of steps, or no time."""
        steps, search_s = self.steps, self.search_s
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UsageError(f"steps = {steps!r}: give the number of steps that the plan is for, 1 or more")
        number = isinstance(search_s, (int, float)) and not isinstance(search_s, bool)
        if search_s is not None and not (number and 0.0 < search_s < float("inf")):
            raise UsageError(
                f"search_s = {search_s!r}: give seconds of a processor core above 0, or leave it out; "
                "order = 'list' searches for nothing"
            )

    def worth_us(self, step_us: float) -> float:
        """How long a step would be that is worth as much search if it ran `STEPS` times."""
        search_s = self.search_s
        if search_s is None and (given := os.environ.get(SEARCH_S)):
            search_s = _seconds(given)
        if search_s is not None:
            return search_s * 1e6 / (SHARE * STEPS)
        return min(MOST_US, max(LEAST_US, step_us * self.steps / STEPS))

    def part(self, step_us: float) -> float:
        """Of all that windows can be searched for, what this step is worth."""
        return min(1.0, self.worth_us(step_us) / FULL_US)


def _seconds(text: str) -> float:
    """Raises UsageError for a text that is no time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise UsageError(
            f"{SEARCH_S} = {text!r} in the environment: give seconds of a processor core above 0"
        )
    return seconds
