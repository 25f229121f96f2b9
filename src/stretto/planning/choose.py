"""Choosing how a step is made: estimate all, try the best few, search the best.

A variant is a list of passes that make a plan's step out of a job and its schedule, in this order:

    STEP_PASSES        those that change the job (`stretto.passes`)
    paired, one_window forwards share windows with backwards of other microbatches
    at_once ...        windows in an order: at once, as captured, ordered, whole_step

A new way to overlap is one more list here. Variants that begin with the same passes share their results.

    1. Estimate: every variant is made over few microbatches (`Step.short`), each window in the order of a
       list, and simulated. One that deadlocks, or keeps more microbatches live than the job allows, is left
       out, with the reason.
    2. Stay: of the best that gathers or scatters in every program, some parameters and gradients stay full
       for longer, as many as fit, where so much may be gained that it is worth it (`STAY_WORTH`).
    3. Try: the best few (`TRIED`) are simulated again with the best order of each window that a search finds.
    4. Search: the best of these is also ordered with one window a rank (`windows.whole_step`).
    5. The fastest comes first. Costs are off by a percent or two: what shares windows, or needs much more
       memory, comes first only where it gains more (`WORTH`, `HEAVY`).

Where the user chose a policy that orders ops, all variants are estimated with it, and that is all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf

from stretto.bounds.step import lower_bound
from stretto.errors import PlanError, TooLargeError
from stretto.ir.action import Overlap
from stretto.ir.parameters import scatters
from stretto.ir.program import Job
from stretto.ir.timeline import Timeline
from stretto.order.policies import DEFAULT
from stretto.passes import STEP_PASSES
from stretto.passes.recompute_choice import recomputed
from stretto.passes.sharded_state import sharded_state
from stretto.passes.stays import KINDS, kept_full
from stretto.passes.step import Context, LeftOutError, Pass, Step
from stretto.planning.finish import reduced_best
from stretto.planning.schedules import of_short, one_window, paired
from stretto.planning.tried import WORTH, Tried, Variant, lighter
from stretto.planning.windows import as_captured, at_once, lowered, ordered, short_bound_us, whole_step
from stretto.simulating import simulate

QUICK = "list"
"""The policy that orders ops in estimates."""

AHEAD = (0, 1)
"""How much longer than its own the warm-up of a paired schedule may be, in forwards for every rank behind:
with one more, 1F1B has the warm-up that pairs need, and eager 1F1B has room for its messages."""

TRIED = 3
"""Variants that are tried with the best order of each window (step 3)."""

STAY_WORTH = 0.005
"""Of a step's time, what is gained at least where all that fits stays full; where a part stays, so much of
it. Assumed, as `stretto.planning.finish.WORTH`."""

STAYS = tuple(product(KINDS, (1.0, 0.5)))
"""What stays before the others, and how much of what fits (`kept_full`)."""


def begins() -> list[Variant]:
    """How variants begin: with what changes the job, with and without what is only tried."""
    result: list[Variant] = [()]
    for one in STEP_PASSES:
        longer = [(*begin, one.apply) for begin in result]
        result = [*result, *longer] if one.tried else longer
    return result


def ways(step: Step) -> list[Variant]:
    """How variants go on, with more and more overlap, as far as the step may."""
    if step.asked == "off":
        return [(at_once,)]
    if not communicates(step.job):
        return [(as_captured,)]
    result: list[Variant] = [(at_once,), (ordered,)]
    for ahead in AHEAD if may_pair(step) else ():
        result.append((partial(paired, ahead=ahead), ordered))
    return result


def likely_ways(step: Step, ahead: int | None = AHEAD[-1]) -> list[Variant]:
    """How variants go on where one is enough to compare steps: the one that is often the fastest first, or
    the one with `ahead` (None: without pairs)."""
    if step.asked == "off" or not communicates(step.job):
        return ways(step)
    order: list[int | None] = [*reversed(AHEAD), None] if may_pair(step) else [None]
    order.sort(key=lambda one: one != ahead)
    return [(ordered,) if one is None else (partial(paired, ahead=one), ordered) for one in order]


def may_share(step: Step) -> bool:
    """Whether microbatches may share windows."""
    return step.asked == "window" and communicates(step.job) and step.job.trains


def may_pair(step: Step) -> bool:
    """The same where the schedule itself has no such windows."""
    return may_share(step) and not overlaps(step)


def overlaps(step: Step) -> bool:
    """Whether the schedule itself has windows that microbatches share."""
    return any(isinstance(slot, Overlap) for slots in step.schedule.orders for slot in slots)


def communicates(job: Job) -> bool:
    """Whether any op starts a collective."""
    return any(op.kind is not None for _, op in job.all_ops)


def names(variant: Variant) -> str:
    """What a variant does to windows, for users: its last passes, without those of `begins`."""
    passes = [one.func if isinstance(one, partial) else one for one in variant]
    job = {one.apply for one in STEP_PASSES}
    return ", ".join(one.__name__ for one in passes if one not in job)


class Variants:
    """The variants of one step, `first`. missing: why some are not there; not_full: why none of those is in
    which more stays full."""

    def __init__(self, step: Step, context: Context) -> None:
        self.first = step
        self.context = context
        self.missing: list[str] = []
        self.not_full = ""
        self._made: dict[tuple[int, Pass], Step | Exception] = {}
        self._tried: dict[Variant, Tried] = {}

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
        result = self._made[key]
        if isinstance(result, Exception):
            raise result
        return result

    def roomier(self, spare_bytes: int) -> Variants:
        """Those that leave so much more of a limit of memory to messages."""
        context = self.context
        return Variants(self.first, replace(context, spare_bytes=context.spare_bytes + spare_bytes))

    def best_first(self) -> list[Tried]:
        """All that the step may be; the last is what waits for everything at once, where there is nothing to
        compare it with. At an interrupt (`stretto.passes.step`), what there is.

        Raises PlanError when the job cannot be made as it must be, or its schedule cannot be simulated.
        """
        searches = self.context.order == DEFAULT and self.first.asked != "off"
        try:
            quick = replace(self.context, order=QUICK if searches else self.context.order)
            self._estimate(quick)
            if len(self._tried) > 1:
                self._stay(quick)
            if searches and any(one.overlap == "off" for one in self._tried.values()):
                self._try()
                self._search()
        except KeyboardInterrupt as error:
            if not self._tried:
                raise
            self.context.watch.stop(error)
        return self._best_first()

    def _estimate(self, context: Context) -> None:
        """Step 1. A variant without others is not simulated."""
        asked = self.first.asked
        variants: list[tuple[Variant, int]] = []
        for begin in self._begins():
            step = self.step(begin)
            if step.asked != asked:
                self._miss(f"overlap has more than recompute = {step.job.recompute:,} bytes a rank")
            variants += [((*begin, *way), len(begin)) for way in ways(step)]
        if len(variants) == 1:
            [(variant, begin_count)] = variants
            self._tried[variant] = Tried(variant, self.step(variant).overlap, 0.0, 0, begin_count)
            return
        seen = set[object]()
        for variant, begin_count in variants:
            if self._tried and self.context.watch.stopped:
                break
            try:
                before = self.step(variant[:-1])
                key = id(before.job), before.schedule, variant[-1]
                if key not in seen:
                    seen.add(key)
                    self._simulate(variant, begin_count, context, f"variant {len(self._tried) + 1}, ")
            except LeftOutError as error:
                self._miss(str(error))
            except (PlanError, TooLargeError) as error:
                if before.schedule is self.first.schedule:
                    raise
                self._miss(_stops(error))

    def _stay(self, context: Context) -> None:
        """Step 2. Where the fastest of "auto" fits, and keeps all in full, there is nothing to gain."""
        limit, tried = self.first.max_bytes, self._tried.values()
        best, some = min(tried, key=self._weighed_us), [one for one in tried if scatters(one.zero)]
        if not some or (not scatters(best.zero) and (limit is None or best.peak_bytes <= limit)):
            return
        much = [limit is not None and one.peak_bytes > limit for one in some]
        _, base = min(zip(much, some, strict=True), key=lambda pair: (pair[0], self._weighed_us(pair[1])))
        begin, way = base.variant[: base.begin], base.variant[base.begin :]
        plain = tuple(one for one in begin if one is not sharded_state)
        gain_us = base.exposed_us + self._work_us(begin) - self._work_us(plain)
        if gain_us <= STAY_WORTH * base.step_us:
            self.not_full = "nothing stays full: it would gain nothing"
            return
        # Pairs, and sends, need more than ops as captured.
        more = max(0, base.peak_bytes - max(context.peaks(self.step(begin), True)))
        # Of a limit, recomputation leaves room for nothing else, or for all that may stay.
        rooms: list[dict[Pass, Pass]] = [{}]
        if isinstance(self.first.job.recompute, int):
            rooms.append({recomputed: partial(recomputed, stays=True)})
        for room, (first, share) in product(rooms, STAYS):
            if not context.watch.stopped:
                other = room | {sharded_state: partial(kept_full, first=first, share=share, spare_bytes=more)}
                variant = (*(other.get(one, one) for one in begin), *way)
                self._stays(variant, base.begin, context)

    def _stays(self, variant: Variant, begin: int, context: Context) -> None:
        try:
            self.step(variant[:begin])
            self._simulate(variant, begin, context, f"variant {len(self._tried) + 1}, ")
        except LeftOutError as error:
            self.not_full = self.not_full or str(error)
        except PlanError as error:
            self.not_full = self.not_full or f"nothing stays full: {error.faults[0]}"

    def _work_us(self, begin: Variant) -> float:
        """What the ops of the few microbatches take on a rank, in the mean."""
        step = self.step(begin)
        op_us, short = self.context.costs_of(step.job).op_us, step.short
        # A view or a wait costs nothing, and need not be named.
        us = sum(op_us.get((stage, op.name), 0.0) for stage, op in step.job.all_ops)
        return us * short.microbatches / short.ranks

    def _try(self) -> None:
        """Step 3: of the others than what waits at once, which is in no order; of each number of microbatches
        in a window the best, in case that memory refuses the others. What stops in a better order than a
        list's is no variant."""
        others = sorted((one for one in self._tried.values() if one.overlap != "off"), key=self._weighed_us)
        best = others[:TRIED]
        best += [one for one in others[TRIED:] if one.overlap not in {other.overlap for other in best}][:1]
        for one in best:
            if self.context.watch.stopped:
                break
            try:
                self._simulate(one.variant, one.begin, self.context)
            except (PlanError, TooLargeError) as error:
                del self._tried[one.variant]
                self._miss(_stops(error))

    def _search(self) -> None:
        """Step 4. The windows of a full step have an order for all microbatches: its time is compared by the
        part of the best other variant's that the few microbatches take."""
        others = [one for one in self._tried.values() if one.overlap != "off"]
        first = self.first
        # What microbatches change and later ones read, as a batch norm's running mean, keeps its order.
        if not others or not may_share(first) or any(buffer.updates for buffer in first.job.buffers):
            return
        best = min(others, key=lambda one: one.step_us)
        variant = (*best.variant[: best.begin], one_window, whole_step)
        self._report(names(variant))
        try:
            timeline = reduced_best(lowered(self.step(variant), self.context))
        except (LeftOutError, PlanError, TooLargeError) as error:
            self._miss(str(error))
            return
        step_us = timeline.step_us
        if first.short is not first.schedule:
            step_us *= best.step_us / reduced_best(lowered(self.step(best.variant), self.context)).step_us
        self._tried[variant] = Tried(variant, "window", step_us, max(timeline.peak_bytes), best.begin)
        self._tried[variant] = replace(self._tried[variant], zero=best.zero, stays=best.stays)

    def _best_first(self) -> list[Tried]:
        """Step 5."""
        result = sorted(self._tried.values(), key=self._weighed_us)
        first = result[0]
        if all(one.overlap != "off" for one in result):
            if self.first.asked == "window":
                self._miss("no collectives that another microbatch's ops could hide")
            off = (*first.variant[:-1], at_once)
            return [*result, Tried(off, "off", inf, zero=first.zero, stays=first.stays)]
        # Up to a limit that was asked for, memory is there to be used.
        if isinstance(self.first.job.recompute, int):
            return result
        light = lighter(result)
        return [light, *(one for one in result if one is not light)]

    def _begins(self) -> list[Variant]:
        """Those that can be done. Where none can, that without what is only tried says why."""
        result: list[Variant] = []
        for begin in begins():
            with suppress(LeftOutError, PlanError):
                self.step(begin)
                result.append(begin)
        if not result:
            self.step(begins()[0])
        return result

    def _simulate(self, variant: Variant, begin: int, context: Context, what: str = "") -> None:
        self._report(what + names(variant))
        before = self.step(variant[:-1])
        made = variant[-1](replace(before, schedule=before.short), context)
        timeline = reduced_best(lowered(made, context))
        exposed_us = sum(map(sum, timeline.exposed_axis_us().values()))
        self._tried[variant] = Tried(
            *(variant, made.overlap, timeline.step_us, max(timeline.peak_bytes), begin, exposed_us),
            *(made.job.zero, made.stays),
        )

    def bound_us(self, anywhere: bool = False) -> float:
        """No variant is faster; anywhere: with its stages on any of the ranks. Raises PlanError as
        `best_first` does."""
        bounds_us: list[float] = []
        # What stays full takes least: `sharded_state` is the last of these.
        for job in (self.step(begin[:-1]).job for begin in self._begins()):
            costs = self.context.costs_of(job)
            if anywhere:
                # One rank takes no longer than all in turn, and a microbatch needs its longest chain.
                single = lower_bound(job, (0,) * len(job.stages), costs)
                bounds_us.append(max(single.us / self.first.schedule.ranks, single.parts["critical path"]))
            else:
                bounds_us.append(lower_bound(job, self.first.schedule, costs).us)
        return min(bounds_us)

    def _report(self, what: str) -> None:
        """What is tried now, and how far it has come."""
        if self.context.watch.shown:
            best = min(self._tried.values(), key=lambda one: one.step_us, default=None)
            if best is not None and best.step_us:
                bound_us = short_bound_us(self.step(best.variant[: best.begin]), self.context)
                what += f"; best so far {best.step_us / 1000:.1f} ms{of_short(self.first)}"
                what += f", {best.step_us / bound_us:.3f} of the bound" if bound_us else ""
            self.context.watch.report(what)

    def _miss(self, why: str) -> None:
        if why and why not in self.missing:
            self.missing.append(why)

    def _weighed_us(self, tried: Tried) -> float:
        """By what variants are ordered. Where the schedule itself has windows that microbatches share, there
        is no choice."""
        shares = tried.overlap == "window" and not overlaps(self.first)
        passes = (one for one in tried.variant if isinstance(one, partial) and one.func is kept_full)
        stays = sum(float(one.keywords["share"]) for one in passes)
        return tried.step_us / ((WORTH if shares else 1.0) * (1.0 - STAY_WORTH * stays))


def _stops(error: PlanError | TooLargeError) -> str:
    """Why there is no such variant."""
    return f"pairs wait for each other: {error.faults[0]}" if isinstance(error, PlanError) else str(error)


@dataclass(frozen=True, slots=True)
class ShortStep:
    """A step over few microbatches, simulated; way: the passes that made it."""

    way: Variant
    step: Step
    timeline: Timeline


def short_steps(
    before: Step, context: Context, ways: Sequence[Variant], ahead: int = 0
) -> Iterator[ShortStep | LeftOutError | PlanError]:
    """A step that has the passes of its job, made in each of these ways over few microbatches, or why it
    cannot be. ahead: microbatches that receives are posted ahead."""
    for way in ways:
        step = replace(before, schedule=before.short)
        try:
            for one in way:
                step = one(step, context)
            step = replace(step, ahead=ahead)
            yield ShortStep(way, step, simulate(lowered(step, context)))
        except (LeftOutError, PlanError) as error:
            yield error
