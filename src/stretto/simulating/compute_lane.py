"""A compute lane: one piece of work at a time, at the speed that transfers leave it; and its accounts.

1. While transfers take shares of its rank's processor, it goes slower by these shares (at least 0 is left);
   a lane that is idle loses nothing.
2. Work is counted in the time that it takes a lane that never waits. A lane does as much of it in any time as
   its speed says. On an accelerator that is `Steady`; on a processor under a quota it is
   `stretto.processor.budget`.
3. Ranks that share a pipeline rank are walked as one. Each stretch of work puts the slowest further behind,
   by `Costs.skew` of it. At a wait for a collective the others wait for it, less what the collective has
   been done for; then it is behind by that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stretto.ir.action import Action
from stretto.ir.costs import Costs
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind
from stretto.processor.budget import DONE_US, Budget
from stretto.simulating.cards import Clock


class Straggler:
    """By how much the slowest rank of one pipeline rank is behind."""

    __slots__ = ("_behind_us", "_skew")

    def __init__(self, skew: float) -> None:
        self._skew = skew
        self._behind_us = 0.0

    def work(self, work_us: float, behind_us: float = 0.0) -> None:
        """The pipeline rank has worked for so long. behind_us: what brings the slowest rank behind besides
        that."""
        self._behind_us += self._skew * work_us + behind_us

    def late_us(self, slack_us: float) -> float:
        """How long a wait would be for the slowest rank. slack_us: since when the collective is done."""
        return max(0.0, self._behind_us - slack_us)

    def meet(self, slack_us: float) -> float:
        """The ranks wait for such a collective; how long they do so for the slowest."""
        late_us = self.late_us(slack_us)
        self._behind_us = min(self._behind_us, slack_us)
        return late_us


class Accounts:
    """Spans of the compute lane, and steps of memory, of one rank. action_end_us: when the last work of the
    action that is being extended ended."""

    def __init__(self, rank: int, spans: list[Span], bytes_held: int) -> None:
        self._rank = rank
        self._spans = spans
        self.peak_bytes = bytes_held
        self.steps: list[tuple[float, int]] = [(0.0, bytes_held)]
        # The compute span that is being extended: its action and its start.
        self._action: Action | None = None
        self._action_start_us = 0.0
        self.action_end_us = 0.0
        self._stalled = -1

    def extend(self, action: Action, start_us: float) -> None:
        """Work of `action` begins."""
        if self._action is not action:
            self.flush()
            self._action, self._action_start_us = action, start_us

    def flush(self) -> None:
        """Write the compute span that was being extended."""
        action, self._action = self._action, None
        if action is not None:
            # Work too short for the clock ends where it began: no stall goes on across it.
            self._stalled = -1
            start_us, end_us = self._action_start_us, self.action_end_us
            of = action.stage, action.phase, action.microbatch
            span = Span(self._rank, COMPUTE_LANE, SpanKind.COMPUTE, str(action), start_us, end_us, *of)
            self._spans.append(span)

    def stall(self, start_us: float, end_us: float, begun_us: float, name: str) -> None:
        """The lane stalled; what it waited for was under way from `begun_us` on."""
        begun_us = min(max(begun_us, start_us), end_us)
        for kind, first, last in (
            (SpanKind.BUBBLE, start_us, begun_us),
            (SpanKind.EXPOSED, begun_us, end_us),
        ):
            if last > first:
                self._stand(Span(self._rank, COMPUTE_LANE, kind, name, first, last))

    def _stand(self, span: Span) -> None:
        """Write a span, or make the last one longer that it goes on with."""
        before = self._spans[self._stalled] if self._stalled >= 0 else None
        goes_on = span.kind, span.name, span.start_us
        if before is not None and (before.kind, before.name, before.end_us) == goes_on:
            self._spans[self._stalled] = replace(before, end_us=span.end_us)
            return
        self._stalled = len(self._spans)
        self._spans.append(span)

    def keep(self, time_us: float, kept: int) -> None:
        """So many bytes are in use from now on."""
        if kept > self.peak_bytes:
            self.peak_bytes = kept
        if self.steps[-1][1] != kept:
            self.steps.append((time_us, kept))


class Steady:
    """A microsecond's work in a microsecond, less what transfers take. load: the share that they take."""

    def run(self, since_us: float, now_us: float, load: float, working: bool) -> float:
        """A stretch of time has passed since the last call; returns the work that was done in it."""
        return (now_us - since_us) * (1.0 - load) if working else 0.0

    def end(self, now_us: float, work_us: float, load: float) -> float | None:
        """When work that goes on from now is done, if the load stays; None if never."""
        return now_us + work_us / (1.0 - load) if load < 1.0 else None

    def behind_us(self) -> float:
        """What brings the slowest rank behind besides `Costs.skew` of the work, since the last call."""
        return 0.0


class ComputeLane:
    """One rank's. `working`: whether there is work that has not ended."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        self._clock = clock
        self.working = False
        self._left_us = self._since_us = 0.0
        self._loads: list[float] = []
        self._load = 0.0
        """What the loads take together, as a share."""
        self._version = 0
        self._then: Callable[[], None] = lambda: None
        self._speed: Steady | Budget = Steady() if costs.processor is None else Budget(costs.processor)

    def work(self, work_us: float, then: Callable[[], None]) -> None:
        """Work from now on; `then` is called at its end. The lane must not be working."""
        assert not self.working
        self._pass()
        self.working, self._left_us, self._then = True, work_us, then
        self._aim()

    def change_load(self, was: float, load: float) -> None:
        """A transfer that took the share `was` of the processor takes `load` from now on."""
        self._pass()
        if was:
            self._loads.remove(was)
        if load:
            self._loads.append(load)
        self._load = min(1.0, sum(self._loads))
        if self.working:
            self._aim()

    def behind_us(self) -> float:
        """As `Steady.behind_us`. While the lane does not work."""
        return self._speed.behind_us()

    def _pass(self) -> None:
        since_us, now_us = self._since_us, self._clock.now_us
        self._since_us = now_us
        self._left_us -= self._speed.run(since_us, now_us, self._load, self.working)

    def _aim(self) -> None:
        """Put the end of the work into the clock; an earlier aim no longer counts."""
        self._version += 1
        version, now_us = self._version, self._clock.now_us
        # Work that ends as a transfer begins has ended, whichever of the two the clock shows first.
        end_us: float | None = now_us
        if self._left_us > DONE_US:
            end_us = self._speed.end(now_us, self._left_us, self._load)
        if end_us is not None:  # else nothing is left for it until a transfer ends
            self._clock.at(end_us, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version == self._version and self.working:
            self._pass()
            self.working = False
            self._then()
