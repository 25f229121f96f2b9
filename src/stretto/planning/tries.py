"""Variants tried: each is made, lowered and simulated, and the fastest comes first.

    1. A variant's passes are run, up to the one that gives windows their order. Variants that begin alike
       share what they have in common.
    2. The windows of the step's short schedule get their order, and the step is simulated.
    3. Where one window a rank is neither far ahead nor near its bound, the most promising of the others are
       ordered again for the step as a whole.
    4. The fastest comes first, and of equal ones the one that moves least. What shares windows, or without a
       limit of memory holds much more, comes first only where it gains what costs can tell (`WORTH`).

A variant that deadlocks, or keeps more microbatches live than the job allows, is left out, and it is said
why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from stretto.bounds.step import lower_bound
from stretto.errors import PlanError, TooLargeError
from stretto.ir.program import Job, OverlapMode
from stretto.order.policies import DEFAULT
from stretto.passes.step import Context, LeftOutError, Pass, Step
from stretto.planning.schedules import moved_across, of_short
from stretto.planning.sums_within import least_us
from stretto.planning.variants import Variant, again, begins, names, overlaps, ways
from stretto.planning.windows import at_once, lowered, short_bound_us, whole_step
from stretto.simulating import simulate

PROMISING = 3
"""Variants that are ordered again for the step as a whole (step 3), of those that are no slower than WITHIN
times the fastest. Measured on GPTs over pp=2 tp=2: the winner was up to 8 % behind."""

WITHIN = 1.2

REFINED = 0.992
"""Of the fastest of them, what a variant takes at most that is ordered again. The search fits orders to
costs that are off by a percent, and lets a rank wait wherever the step of these costs does not need it; an
order of each window by itself hides what can be hidden everywhere. Assumed."""

AHEAD_OF, NEAR = 0.96, 1.03
"""Of the fastest other variant's step, or of its own bound, what one window a rank takes at most where the
others need not be ordered again. Measured on GPTs over pp=2 tp=2: that gains 1 to 7 %, and one window was
then faster still; what is left above the bound is not worth it."""

WORTH = 0.98
"""Of the fastest step without windows that microbatches share, what one with them takes at most where it
comes first. Such windows hold more microbatches live and meet colder caches, and costs are off by a percent
or two: without a limit on the network a GPT with tp=2 was promised 1.5 %, and its ops took 5 % longer."""

HEAVY = 1.5
"""Times the memory of another variant, from where one must gain over it what costs can tell (`WORTH`), too.
Assumed: whoever needs the memory for a larger model or batch gains more by it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """step_us: of the step by which variants are compared; 0 for one alone, infinite for what is there in
    case that all others are refused."""

    variant: Variant
    overlap: OverlapMode
    step_us: float


class Tries:
    """The variants of one step, `first`. missing: why some are not there; tried: those that are."""

    def __init__(self, step: Step, context: Context) -> None:
        self.first = step
        self.context = context
        self._made: dict[tuple[int, Pass], Step | Exception] = {}
        self.missing: list[str] = []
        self.tried: list[Tried] = []

    def step(self, variant: Variant) -> Step:
        """The step that a variant makes. Raises what its passes raise.

        What a pass makes of a step is made once: a variant with a pass that changes nothing is the one
        without it."""
        if not variant:
            return self.first
        before = self.step(variant[:-1])
        key = id(before), variant[-1]
        if key not in self._made:
            try:
                self._made[key] = variant[-1](before, self.context)
            except (LeftOutError, PlanError, TooLargeError) as error:
                self._made[key] = error
        found = self._made[key]
        if isinstance(found, Exception):
            raise found
        return found

    def best_first(self, order: str) -> list[Tried]:
        """All that the step may be; the last is what waits for everything at once, where there is nothing to
        compare it with. At an interrupt (`stretto.passes.watch`), what has been tried.

        Raises PlanError when the job cannot be made as it must be, or its schedule cannot be simulated.
        """
        try:
            return self._best_first(order)
        except KeyboardInterrupt as error:
            if not self.tried:
                raise
            self.context.watch.stop(error)
        # One window a rank has the time of all microbatches, to which others are not compared yet.
        others = [one for one in self.tried if whole_step not in one.variant]
        return sorted(others or self.tried, key=self._weighed_us)

    def _best_first(self, order: str) -> list[Tried]:
        asked = self.first.asked
        variants: list[Variant] = []
        for begin in self._begins():
            step = self.step(begin)
            if step.asked != asked:
                self._miss(f"overlap holds more than recompute = {step.job.recompute:,} bytes a rank")
            variants += [(*begin, *way) for way in ways(step, order)]
        found = self.compared(variants)
        if all(one.overlap != "off" for one in found):
            if asked == "window":
                self._miss("no collectives that another microbatch's ops could hide")
            found.sort(key=self._weighed_us)
            return [*found, Tried((*found[0].variant[:-1], at_once), "off", inf)]
        others = [one for one in found if one.overlap != "off" and whole_step not in one.variant]
        if order == DEFAULT and others:
            wholes = [one for one in found if whole_step in one.variant]
            least = min(others, key=lambda one: one.step_us)
            alike = [self._as_short(one, least) for one in wholes]
            found = [one for one in found if one not in wholes] + alike
            near = any(one.step_us <= NEAR * self._bound_us(one) for one in wholes)
            if not near and all(one.step_us > AHEAD_OF * least.step_us for one in alike):
                found += self._again(others, asked)
        found.sort(key=self._weighed_us)
        # Up to a limit that was asked for, memory is there to be used.
        return found if isinstance(self.first.job.recompute, int) else lighter(found, self._holds)

    def _begins(self) -> list[Variant]:
        """Those that can be done. Without what is only tried it must be."""
        plain, *others = begins()
        self.step(plain)
        return [plain, *(begin for begin in others if self._can(begin))]

    def _can(self, variant: Variant) -> bool:
        try:
            self.step(variant)
        except (LeftOutError, PlanError):
            return False
        return True

    def compared(self, variants: Sequence[Variant]) -> list[Tried]:
        """Steps 1 and 2, in the order given. One alone is not simulated."""
        if len(variants) == 1:
            return [Tried(variants[0], self.step(variants[0]).overlap, 0.0)]
        found: list[Tried] = []
        seen: set[object] = set()
        for variant in variants:
            if found and self.context.watch.stopped:
                break
            plain = moved_across not in variant
            try:
                before = self.step(variant[:-1])
                plain &= before.schedule is self.first.schedule
                place = id(before.job), before.schedule, variant[-1]
                if place not in seen:
                    seen.add(place)
                    least_us = min((one.step_us for one in found), default=inf)
                    self._tell(f"variant {len(found) + 1}, {names(variant)}", found)
                    found.append(self._tried(before, variant, least_us))
            except LeftOutError as error:
                self._miss(str(error))
            except (PlanError, TooLargeError) as error:
                if plain:
                    raise
                self._miss(
                    f"pairs wait for each other: {error.faults[0]}"
                    if isinstance(error, PlanError)
                    else str(error)
                )
        return found

    def _tried(self, before: Step, variant: Variant, than_us: float = inf) -> Tried:
        """than_us: as in `least_us`."""
        if before.short is before.schedule:
            made = self.step(variant)
        else:
            made = variant[-1](replace(before, schedule=before.short), self.context)
        step_us = least_us(lowered(made, self.context), than_us)
        self.tried.append(Tried(variant, made.overlap, step_us))
        return self.tried[-1]

    def _as_short(self, whole: Tried, other: Tried) -> Tried:
        """One window a rank, which is ordered and simulated for all microbatches, with the step by which
        others are compared."""
        if self.first.short is self.first.schedule:
            return whole
        all_us = least_us(lowered(self.step(other.variant), self.context))
        return replace(whole, step_us=whole.step_us * other.step_us / all_us)

    def bound_us(self, anywhere: bool = False) -> float:
        """No variant is faster; anywhere: with its stages on any of the ranks. Raises PlanError as
        `best_first` does."""
        find = self._bound_anywhere_us if anywhere else self._job_bound_us
        return min(find(self.step(begin).job) for begin in self._begins())

    def _bound_us(self, tried: Tried) -> float:
        return self._job_bound_us(self.step(tried.variant[:-1]).job)

    def _job_bound_us(self, job: Job) -> float:
        return lower_bound(job, self.first.schedule, self.context.costs_of(job)).us

    def _bound_anywhere_us(self, job: Job) -> float:
        """One rank alone takes no longer than all in turn, and a microbatch needs its longest chain."""
        alone = lower_bound(job, (0,) * len(job.stages), self.context.costs_of(job))
        return max(alone.us / self.first.schedule.ranks, alone.parts["critical path"])

    def _tell(self, what: str, found: Sequence[Tried]) -> None:
        """What is tried now, and how far it has come."""
        if self.context.watch.shown:
            # One window a rank has the time of all microbatches.
            shorts = [one for one in found if whole_step not in one.variant]
            best_us = min((one.step_us for one in shorts), default=inf)
            best = ""
            if 0.0 < best_us < inf:
                bound_us = short_bound_us(self.step(shorts[0].variant[:-1]), self.context)
                best = f"; best so far {best_us / 1000:.1f} ms{of_short(self.first)}"
                best += f", {best_us / bound_us:.3f} of the bound"
            self.context.watch.tell(what + best)

    def _miss(self, why: str) -> None:
        if why and why not in self.missing:
            self.missing.append(why)

    def _again(self, tried: Sequence[Tried], asked: OverlapMode) -> list[Tried]:
        """Step 3: of those that overlap as much as is allowed, else of all."""
        most = [one for one in tried if one.overlap == asked] or list(tried)
        most.sort(key=lambda one: one.step_us)
        promising = [one.variant for one in most[:PROMISING] if one.step_us <= WITHIN * most[0].step_us]
        found: list[Tried] = []
        for variant in again(promising):
            if self.context.watch.stopped:
                break
            self._tell(names(variant), tried)
            try:
                one = self._tried(self.step(variant[:-1]), variant)
            except LeftOutError:
                continue
            if one.step_us <= REFINED * most[0].step_us:
                found.append(one)
        return found

    def _holds(self, tried: Tried) -> int:
        """The most bytes of any rank."""
        return max(simulate(lowered(self.step(tried.variant), self.context)).peak_bytes)

    def _weighed_us(self, tried: Tried) -> float:
        """By what variants are ordered. Where the schedule itself has windows that microbatches share, there
        is no choice."""
        shares = tried.overlap == "window" and not overlaps(self.first)
        return tried.step_us / WORTH if shares else tried.step_us


def lighter(found: list[Tried], holds: Callable[[Tried], int]) -> list[Tried]:
    """What was found, the fastest first, with another that overlaps in front where the first holds much more
    for a gain that costs cannot tell. holds: bytes of a variant; asked only where others are as fast."""
    first = found[0]
    alike = [one for one in found[1:] if one.step_us * WORTH <= first.step_us and one.overlap != "off"]
    most = holds(first) if alike else 0
    less = next((one for one in alike if HEAVY * holds(one) <= most), first)
    return [less, *(one for one in found if one is not less)]


def why_less(asked: OverlapMode, chosen: Tried, found: Sequence[Tried], missing: Sequence[str]) -> str:
    """Why `chosen`, of all that were `found`, overlaps less than was asked; "" when it does not."""
    if chosen.overlap == asked:
        return ""
    others = [one for one in found if one.overlap == asked]
    if others:
        fastest = min(one.step_us for one in others)
        if fastest >= chosen.step_us:
            times = fastest / chosen.step_us if chosen.step_us else 1.0
            return f"{asked} is predicted to take {times:.3f} times as long"
        if asked == "window" and fastest >= WORTH * chosen.step_us:
            gain = 100.0 * (1.0 - fastest / chosen.step_us)
            return f"{asked} is predicted to gain {gain:.1f} %, which is less than costs can tell"
    return "; ".join(dict.fromkeys(missing)) or f"no {asked} plan is faster"
