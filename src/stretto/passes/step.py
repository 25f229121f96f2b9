"""What passes work on: a step on its way to a plan, and what they may ask: costs, the effort, who waits.

All passes that know costs have one signature, `Step, Context -> Step`, give the step itself where they have
nothing to do, and never price what they make (`stretto.ir.prices`). A pass that was asked for and cannot be
done raises `LeftOutError`. Those that look at a captured graph, before there are stages, ranks and costs, are
`StepProgram, sharded -> StepProgram` (`stretto.passes.layout.program`; sharded: values of whose first dim
tensor-parallel ranks have parts).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from stretto.errors import UsageError
from stretto.files.say import Say
from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.plan import Window
from stretto.ir.prices import Prices
from stretto.ir.program import Job, OverlapMode

STILL_S = 0.5
"""Seconds between two lines of the same search. Assumed: users read no faster."""


class Watch:
    """Of one plan. stopped: whether an interrupt has ended the search; nothing is printed from then on."""

    def __init__(self, say: Say | None = None) -> None:
        self.stopped = False
        self._say = say
        self._reported_s = -STILL_S

    @property
    def shown(self) -> bool:
        """Whether somebody sees progress."""
        return self._say is not None and not self.stopped

    def report(self, line: str) -> None:
        """What has been done, or begins."""
        if self._say is not None and not self.stopped:
            self._reported_s = time.monotonic()
            self._say(line)

    def still(self, line: Callable[[], str]) -> None:
        """How far something is that takes long, where the last line is old."""
        if self.shown and time.monotonic() - self._reported_s >= STILL_S:
            self.report(line())

    def stop(self, error: KeyboardInterrupt) -> None:
        """Where something is there in spite of an interrupt. Raises it where it is not for the search."""
        if not self.shown:
            raise error
        self.stopped = True


SEARCH_S = "STRETTO_SEARCH_S"
"""Environment variable: `search_s` of plans that have none."""

STEPS = 1_000
"""Steps of a run of which no one says how many it has. Assumed: a short training."""

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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """short: the schedule of fewer microbatches by which steps are compared; `schedule` where they are few.

    overlap: what the windows of `schedule` let overlap; asked: the most that they may. max_bytes: the most
    that a rank may use.
    windows: by name, in the order of their items. sent_before: message (edge, microbatch) -> the sender's run
    before which its send is waited for; others are waited for at the end. ahead: microbatches before that
    which needs it a receive is posted at the latest, besides what lowering does anyway. stays: in words, what
    of sharded state stays full for longer than a program.
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
    stays: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What passes may ask. order: the policy that orders ops in windows. peaks: the most bytes that each rank
    uses when a step is planned, exactly or about (True), which takes less time. effort: how long orders are
    searched for; watch: who waits for the plan. spare_bytes: of a limit of memory, what is left to messages,
    of which no one knows yet when they are sent."""

    prices: Prices
    order: str
    peaks: Callable[[Step, bool], Sequence[int]]
    effort: Effort = field(default_factory=Effort)
    watch: Watch = field(default_factory=Watch, repr=False)
    spare_bytes: int = 0
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
