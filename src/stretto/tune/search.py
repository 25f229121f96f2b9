"""The search for a layout: estimate all, simulate short steps of the best, plan the best of these.

    1. Every layout that the settings allow has a guess of its step (`tune.layouts`).
    2. The next piece of work is that of the least time; of two pieces, one at least is a candidate's. A
       layout whose own block is not known is priced; one with its block becomes candidates, each schedule
       with an estimate (`tune.estimate`). Of a candidate a short step is simulated, and where that is faster
       than every plan, it is planned at once, quickly. One that does not fit comes back with more computed
       again.
    3. What cannot win by its bound is dropped, and what is unlikely to by its estimate (`WITHIN`), once there
       are some to compare it with (`LEAST`).
    4. Where a plan that is the best so far exposes communication in blocks, other numbers of AMPipe's chunks
       are layouts too; where it exposes what copies communicate once a step, so are the other kinds of that.
    5. The best are planned in full (`finalists`), also with "auto" for a schedule. The fastest of these wins.

The settings' own candidate is planned first. The search can end at any time with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from stretto.errors import UsageError
from stretto.ir.stage_maps import AUTO
from stretto.order.policies import DEFAULT
from stretto.planning.brief import Brief
from stretto.planning.choose import QUICK
from stretto.price.cluster import Description
from stretto.tune.block import TuneBlock
from stretto.tune.choices import Candidate, Choices, LayoutChoice
from stretto.tune.estimate import Estimate
from stretto.tune.layouts import LIKELY_TOO_LARGE, Layouts
from stretto.tune.work import Answer, Asked, Planned, Refused, Tuned, Workers

WITHIN = 1.10
"""Times the best step, up to which an estimate lets a candidate be simulated. Measured on GPTs over 32
devices: plans take 0.8 to 1.07 times as long as estimated, and similar ones are off by similar factors."""

LEAST = 6
"""Candidates that are simulated whatever their estimates are. Assumed."""

FULL_TIMES, FULL_SHARE = 6.0, 0.5
"""Of the time, what is kept for the plans in full: so many times what a quick one takes, since each takes
about three times as long and they come in two rounds; and this part of all at most. Assumed."""

FINALISTS = 3
"""Candidates that are planned in full. Assumed."""

HIDES = 0.02
"""Of a step, what communication exposes at least where other ways are tried (step 4). Assumed."""

SAY_S = 2.0
"""Seconds between two lines of progress."""

BY_BOUND = "slower by its bound than the best plan"
BY_ESTIMATE = f"estimated to take {WITHIN:g} times the best step, or more"
BY_SHORT_STEP = "slower over few microbatches than those that were planned"
PLAN_TOO_LARGE = "too large: simulated or planned, and a rank has more than a device has"
NOT_REACHED = "not reached in the time"


@dataclass(order=True, slots=True)
class _Open:
    """A candidate with an estimate. bound_us: of its layout; ahead: as in `Estimate`."""

    step_us: float
    candidate: Candidate
    bound_us: float = field(compare=False)
    ahead: int | None = field(compare=False)


class Search:
    """One tuning. max_seconds: how long it may take in all; say: takes a line of progress every two
    seconds."""

    def __init__(
        self, choices: Choices, cluster: Description, max_seconds: float, say: Callable[[str], None]
    ) -> None:
        self.choices = choices
        self.tuned = Tuned()
        self._say = say
        self._begun_s = self._said_s = time.monotonic()
        self._end_s = self._begun_s + max_seconds
        self._quick_s = 0.0
        self._running: dict[Asked, float] = {}
        self._layouts = Layouts(choices, cluster, self.tuned)
        self._candidates: list[_Open] = []
        self._seen: dict[Candidate, _Open] = {}
        self._priced_last = False
        self._short_us: dict[Candidate, float] = {}
        self._plans: dict[Candidate, Planned] = {}
        self._finals: list[Candidate] | None = None
        self._unseen_us = inf

    def run(self, workers: Workers) -> None:
        """Until it is done or its time is over. Raises UsageError where no layout is allowed."""
        self._begin()
        while time.monotonic() < self._end_s:
            while workers.free and (asked := self._next()) is not None:
                self._running[asked] = time.monotonic()
                workers.give(asked)
            if not self._running:
                return
            for asked, answer in workers.answers(SAY_S / 4):
                self._answered(asked, answer, time.monotonic() - self._running.pop(asked))
            self._progress()
        if self._finals is None or self._finals or self._running:
            self.tuned.stopped = "the time was over"

    def result(self) -> Tuned:
        """What it has, now."""
        # Of equal ones a family comes before "auto", which every plan would have to search for again.
        self.tuned.planned = sorted(
            self._plans.values(), key=lambda one: (one.step_us, one.candidate.schedule == AUTO, one.candidate)
        )
        for candidate in self._short_us.keys() - self._plans.keys():
            self._drop(BY_SHORT_STEP, candidate, self._seen[candidate].bound_us)
        for one in self._candidates:
            self._drop(NOT_REACHED, one.candidate, one.bound_us)
        for layout in self._layouts.open:
            self._drop(NOT_REACHED, layout.layout, layout.bound_us)
        for message, count in self.choices.refused.items():
            self.tuned.drop(message, count=count)
        self.tuned.unseen_us = None if self._unseen_us == inf else self._unseen_us
        return self.tuned

    def _begin(self) -> None:
        for layout in self.choices.layouts():
            self._layouts.add(layout)
            self._progress()
        if not self.tuned.layouts:
            why = "; ".join(text for text, _ in self.choices.refused.most_common(3))
            raise UsageError(
                f"no layout of {self.choices.devices} devices fits these settings: "
                f"{why or 'what is fixed does not multiply to as many'}"
            )
        own = self.choices.own()
        if own is not None and self.choices.allowed(own):
            self._seen[own] = _Open(0.0, own, 0.0, None)
            self._candidates.append(self._seen[own])

    def _next(self) -> Asked | None:
        """What a free process does; None where it waits for the others, or nothing is left."""
        kept_s = min(FULL_TIMES * self._quick_s, FULL_SHARE * (self._end_s - self._begun_s))
        late = time.monotonic() + kept_s > self._end_s
        if self._finals is None and not late:
            asked = self._searched()
            if asked is not None or self._running:
                return asked
        if self._finals is None:
            self._finals = finalists(self._ranked(), self._plans, self.choices)
            if late and (self._candidates or self._layouts.open):
                self.tuned.stopped = "the time was over"
        return Asked(self._finals.pop(0), DEFAULT) if self._finals else None

    def _searched(self) -> Asked | None:
        """Step 2."""
        while True:
            self._prune()
            candidate = min(self._candidates, default=None)
            layout = self._layouts.first(self._running, candidate is None and self._priced_last)
            if candidate is not None and (
                layout is None or self._priced_last or candidate.step_us <= layout.step_us
            ):
                self._candidates.remove(candidate)
                self._priced_last = False
                if candidate.candidate == self.choices.own():
                    return Asked(candidate.candidate, QUICK)
                return Asked(
                    candidate.candidate, QUICK, short=True, ahead=candidate.ahead, best_us=self._best_us()
                )
            if layout is None:
                return None
            if (asked := self._layouts.to_price(layout)) is not None:
                self._priced_last = True
                return asked
            self._layouts.open.remove(layout)
            for family, each in self.choices.orders(layout.layout):
                self._push(Candidate(layout.layout, family, each), layout.bound_us)
                self._progress()

    def _push(self, bare: Candidate, bound_us: float) -> None:
        """Candidates with the least computed again that likely fits."""
        try:
            made = self._layouts.estimated(bare)
        except UsageError as error:
            self.tuned.drop(str(error), bare)
            return
        self._open(made, bound_us)

    def _open(self, made: Sequence[tuple[Candidate, Estimate]], bound_us: float) -> None:
        for candidate, result in made:
            if candidate not in self._seen:
                self._seen[candidate] = _Open(result.step_us, candidate, bound_us, result.ahead)
                self._candidates.append(self._seen[candidate])

    def _prune(self) -> None:
        """Step 3."""
        known_us = self._known_us()
        best_us = self._best_us()
        most_us = WITHIN * min(known_us.values()) if len(known_us) >= LEAST else inf

        def stays(what: Candidate | LayoutChoice, step_us: float, bound_us: float) -> bool:
            if bound_us >= best_us:
                self.tuned.drop(BY_BOUND, what)
            elif known_us and step_us > most_us:
                self._drop(LIKELY_TOO_LARGE if step_us == inf else BY_ESTIMATE, what, bound_us)
            else:
                return True
            return False

        self._candidates = [
            one for one in self._candidates if stays(one.candidate, one.step_us, one.bound_us)
        ]
        open_ = self._layouts.open
        self._layouts.open = [one for one in open_ if stays(one.layout, one.step_us, one.bound_us)]

    def _drop(self, reason: str, what: Candidate | LayoutChoice, bound_us: float) -> None:
        """Drop what could still be faster than all that was planned."""
        self.tuned.drop(reason, what)
        self._unseen_us = min(self._unseen_us, bound_us)

    def _best_us(self) -> float:
        return min((one.step_us for one in self._plans.values()), default=inf)

    def _known_us(self) -> dict[Candidate, float]:
        """What a step takes: by its plan, else by its short step."""
        return self._short_us | {candidate: one.step_us for candidate, one in self._plans.items()}

    def _ranked(self) -> list[Candidate]:
        known_us = self._known_us()
        return sorted(known_us, key=lambda one: (known_us[one], one))

    def _answered(self, asked: Asked, answer: Answer, took_s: float) -> None:
        candidate = asked.candidate
        if asked.order is None:
            assert isinstance(answer, (TuneBlock, Refused))
            self._layouts.priced(candidate, answer)
        elif isinstance(answer, Brief):
            self._short_us[candidate] = answer.step_us
        elif isinstance(answer, Planned):
            self._planned(answer)
            if asked.order == QUICK:
                self._quick_s = max(self._quick_s, took_s)
        elif isinstance(answer, Refused):
            self._refused(answer, asked.order)

    def _planned(self, plan: Planned) -> None:
        candidate, best_us = plan.candidate, self._best_us()
        before = self._plans.get(candidate)
        if before is None or plan.order == DEFAULT or plan.step_us <= before.step_us:
            self._plans[candidate] = plan
        if candidate == self.choices.own():
            self.tuned.own = self._plans[candidate]
        # Step 4.
        if plan.order != QUICK or plan.step_us >= best_us:
            return
        in_blocks_us, over_copies_us = (
            sum(us for axis, us in plan.exposed_us.items() if axis in axes)
            for axes in (("tp", "ep"), ("dp", "dp_shard"))
        )
        known = self._layouts.key(candidate.layout) in self._layouts.blocks
        if known and over_copies_us >= HIDES * plan.step_us:
            self._open(self._layouts.beside(candidate), self._seen[candidate].bound_us)
        if in_blocks_us >= HIDES * plan.step_us and candidate.layout.ampipe_degree == 1:
            for degree in self.choices.degrees(candidate.layout):
                self._layouts.add(replace(candidate.layout, ampipe_degree=degree))

    def _refused(self, answer: Refused, order: str) -> None:
        candidate = answer.candidate
        known = self._short_us.pop(candidate, None), self._plans.pop(candidate, None)
        if order == QUICK or known != (None, None):
            self.tuned.drop(PLAN_TOO_LARGE if answer.by_memory else answer.why, candidate)
        if order == QUICK:
            if candidate == self.choices.own():
                self.tuned.own = answer
            self.tuned.needs(candidate, answer.bytes_needed)
            if answer.by_memory:
                self._layouts.refused(candidate, answer.bytes_needed)
            if answer.by_memory and self._layouts.key(candidate.layout) in self._layouts.blocks:
                self._push(candidate, self._seen[candidate].bound_us)
        elif known != (None, None) and self._finals is not None:
            # What is written is planned in full wherever it is used: one more takes its place.
            full = {one.candidate for one in self._plans.values() if one.order == DEFAULT}
            full |= {asked.candidate for asked in self._running} | {*self._finals}
            self._finals += [one for one in self._ranked() if one not in full][:1]

    def _progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        best = min(self._plans.values(), key=lambda one: one.step_us, default=None)
        open_, priced = len(self._layouts.open), len(self._layouts.blocks)
        self._say(
            f"{now_s - self._begun_s:.0f} s: {priced} blocks priced, {len(self._short_us)} short "
            f"steps simulated, {len(self._plans)} plans made; left {open_} of {self.tuned.layouts} "
            f"layouts, {len(self._candidates)} candidates; "
            + (f"best {best.step_us / 1e3:,.1f} ms: {best.candidate}" if best else "no plan yet")
        )


def finalists(
    ranked: Sequence[Candidate], planned: Mapping[Candidate, Planned], choices: Choices
) -> list[Candidate]:
    """What is planned in full, of candidates from the fastest: what wins most likely first, as the time may
    be over before the last. The settings' own is there, so that the gain is between plans of one kind."""
    chosen = [*ranked[:1], *(auto for one in ranked[:1] for auto in choices.with_auto(one))]
    chosen += ranked[1:FINALISTS]
    own = choices.own()
    if own is None or own not in planned or own in chosen:
        return chosen
    return [*chosen, own]
